"""`steadystep check`: the checklist, on a config, a training script or a run."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from steadystep.cli.plain import plain_line
from steadystep.errors import ConfigError, SteadystepError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from steadystep.check import Report


def check(
    paths: Annotated[
        list[str], typer.Argument(help="Training scripts, YAML configs, run folders, folders of scripts.")
    ],
    select: str = typer.Option("", help="Only these codes, or everything beginning like them: SS101,SS2."),
    ignore: str = typer.Option("", help="All but these codes."),
    diff: bool | None = typer.Option(
        None, "--diff/--no-diff", help="Every fix as a diff, or none; short ones if left out."
    ),
    checklist: bool = typer.Option(True, "--checklist/--no-checklist", help="The items beside the hits."),
    as_json: bool = typer.Option(False, "--json", help="For a program."),
) -> None:
    """The checklist and the wiring faults, on a training script, a config or a run. Nothing is executed.

    Exit code 0: no hits. 1: hits. 2: no hits, but something could not be read; the others were checked all the same.
    `# steadystep: ignore[SS101]` on the line silences a hit, `# steadystep: ignore-file[SS101]` all of a kind.

    Example: steadystep check train.py
    """
    from dataclasses import replace

    from rich.console import Console

    from steadystep.check import check_path
    from steadystep.check.render import show

    only, without = _codes(select), _codes(ignore)
    console = Console(highlight=False, emoji=False)
    reports: list[Report] = []
    problems: list[str] = []
    for path in paths:
        try:
            for report in check_path(Path(path)):
                kept = tuple(h for h in report.hits if _wanted(h.code, only, without))
                reports.append(replace(report, hits=kept))
        except SteadystepError as error:
            problems += map(plain_line, str(error).split("\n"))
    several = len(reports) > 1
    if as_json:
        sys.stdout.write(json.dumps({"reports": [r.as_dict() for r in reports], "errors": problems}) + "\n")
    else:
        for report in reports:
            show(report, console, diff=diff, checklist=checklist and not (several and report.kind == "script"))
        if reports:
            console.print(_verdict(reports, checklist=checklist), soft_wrap=True)
    for problem in problems:
        typer.echo(f"error: {problem}", err=True)
    if any(report.faults for report in reports):
        raise typer.Exit(1)
    raise typer.Exit(2 if problems else 0)


def _codes(text: str) -> tuple[str, ...]:
    from steadystep.check.catalog import RULES, nearest_code

    codes = tuple(code.strip().upper() for code in text.split(",") if code.strip())
    for code in codes:
        if not any(known.startswith(code) for known in (*RULES, "SS001")):
            raise ConfigError(f"{code}: there is no such rule; {nearest_code(code)}")
    return codes


def _wanted(code: str, only: tuple[str, ...], without: tuple[str, ...]) -> bool:
    return (not only or code.startswith(only)) and not (without and code.startswith(without))


def _verdict(reports: "Sequence[Report]", *, checklist: bool) -> str:
    faults = sum(len(r.faults) for r in reports)
    advice = sum(len(r.hits) for r in reports) - faults
    missing = sum(item.state == "absent" for r in reports for item in r.items)
    parts = [f"[bold red]{faults} {'fault' if faults == 1 else 'faults'}[/]" if faults else "[bold green]no faults[/]"]
    if advice:
        parts.append(f"{advice} pieces of advice")
    if checklist and len(reports) == 1 and missing:
        parts.append(f"{missing} of {len(reports[0].items)} items of the checklist are not there")
    if len(reports) > 1:
        parts.append(f"{len(reports)} files")
    return ", ".join(parts)
