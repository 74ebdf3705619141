"""`steadystep check`: hits of the rules and the checklist as text, JSON, SARIF or annotations, and the safe fixes."""

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from steadystep.cli.diagnose import printable_line
from steadystep.errors import ConfigError, SteadystepError

if TYPE_CHECKING:
    from steadystep.lint import Report
    from steadystep.lint.fix import Fixed


class Format(StrEnum):
    """How hits are printed."""

    TEXT = "text"
    JSON = "json"
    SARIF = "sarif"
    GITHUB = "github"


def check(
    paths: Annotated[
        list[str], typer.Argument(help="Training scripts, YAML configs, run folders, or folders of scripts.")
    ],
    select: str = typer.Option("", help="Report only these codes or prefixes: SS101,SS2."),
    ignore: str = typer.Option("", help="Do not report these codes or prefixes."),
    fix: bool = typer.Option(False, "--fix", help="Apply the safe fixes to the scripts and show the diff."),
    dry_run: bool = typer.Option(False, "--dry-run", help="With --fix: show the diff and write nothing."),
    diff: bool | None = typer.Option(
        None, "--diff/--no-diff", help="Show every fix as a diff, or none. Default: short ones only."
    ),
    checklist: bool = typer.Option(True, "--checklist/--no-checklist", help="Show the checklist after the hits."),
    form: Annotated[
        Format, typer.Option("--format", help="Output format; github prints workflow annotations.")
    ] = Format.TEXT,
    as_json: bool = typer.Option(False, "--json", help="Print JSON instead of text; short for --format json."),
    output: str = typer.Option("", help="Write json, sarif or github output to this file, and text to the terminal."),
) -> None:
    """Check a training script, a config or a run for common faults and a checklist, without executing it.

    Exit code 0: no hits. 1: hits. 2: no hits, but something could not be read or written; the rest was checked.
    `# steadystep: ignore[SS101]` on a line suppresses a hit, `# steadystep: ignore-file[SS101]` in the whole file.

    Example: steadystep check train.py
    Example: steadystep check src --fix --dry-run
    """
    form = _form(form, as_json=as_json, output=output, bad_dry_run=dry_run and not fix)
    only, without = _codes(select), _codes(ignore)
    found = _Found(lambda code: _wanted(code, only, without), fix=fix, write=not dry_run)
    for path in paths:
        found.read(path)
    if output:
        _write(output, found.rendered(form))
    if output or form is Format.TEXT:
        found.show(diff=diff, checklist=checklist)
    else:
        sys.stdout.write(found.rendered(form))
    for problem in found.problems if output or form is not Format.GITHUB else ():
        typer.echo(f"error: {problem}", err=True)
    if any(report.faults for report in found.reports):
        raise typer.Exit(1)
    raise typer.Exit(2 if found.problems else 0)


class _Found:
    """Reports of all paths, with what was fixed in them and what could not be read."""

    def __init__(self, wanted: Callable[[str], bool], *, fix: bool, write: bool) -> None:
        self.reports: list[Report] = []
        self.fixed: dict[str, Fixed] = {}
        self.problems: list[str] = []
        self._wanted, self._fix, self._write = wanted, fix, write

    def read(self, path: str) -> None:
        """Check one path, and fix its scripts if asked to."""
        from steadystep.lint import check_path

        try:
            for report in check_path(Path(path)):
                kept = self._repaired(report) if self._fix and report.kind == "script" else report
                self.reports.append(replace(kept, hits=tuple(h for h in kept.hits if self._wanted(h.code))))
        except SteadystepError as error:
            self._fail(error)

    def _repaired(self, report: "Report") -> "Report":
        from steadystep.lint.fix import fix_file

        if not any(hit.diff and self._wanted(hit.code) for hit in report.hits):
            return report
        try:
            fixed = fix_file(Path(report.path), wanted=self._wanted, write=self._write)
        except SteadystepError as error:
            self._fail(error)
            return report
        self.fixed[report.path] = fixed
        return fixed.report if self._write else report

    def _fail(self, error: SteadystepError) -> None:
        self.problems += map(printable_line, str(error).split("\n"))

    def rendered(self, form: Format) -> str:
        """Return the reports in a format for programs."""
        from steadystep.lint.sarif import as_github, as_sarif

        if form is Format.GITHUB:
            return as_github(self.reports, self.problems)
        if form is Format.SARIF:
            return json.dumps(as_sarif(self.reports, self.problems), indent=1) + "\n"
        told = []
        for report in self.reports:
            fixed = self.fixed.get(report.path)
            more = {"fixed": [h.as_dict() for h in fixed.applied], "diff": fixed.diff} if fixed is not None else {}
            told.append(report.as_dict() | more)
        return json.dumps({"reports": told, "errors": self.problems}) + "\n"

    def show(self, *, diff: bool | None, checklist: bool) -> None:
        """Print the reports for people."""
        from rich.console import Console

        from steadystep.lint.fix import unfixed
        from steadystep.lint.render import show, show_fixes

        console = Console(highlight=False, emoji=False)
        several = len(self.reports) > 1
        for report in self.reports:
            fixed = self.fixed.get(report.path)
            if fixed is not None and fixed.applied:
                show_fixes(fixed, console, written=self._write)
            left = unfixed(report, fixed) if fixed is not None else dict.fromkeys(report.hits, "")
            listed = checklist and not (several and report.kind == "script")
            show(replace(report, hits=tuple(left)), console, diff=diff, checklist=listed, reasons=left)
        if self.reports:
            console.print(self._verdict(checklist=checklist), soft_wrap=True)

    def _verdict(self, *, checklist: bool) -> str:
        reports = self.reports
        faults = sum(len(r.faults) for r in reports)
        advice = sum(len(r.hits) for r in reports) - faults
        missing = sum(item.state == "absent" for r in reports for item in r.items)
        named = f"{faults} {'fault' if faults == 1 else 'faults'}"
        parts = [f"[bold red]{named}[/]" if faults else "[bold green]no faults[/]"]
        if advice:
            parts.append(f"{advice} recommendations")
        if checklist and len(reports) == 1 and missing:
            parts.append(f"{missing} of {len(reports[0].items)} checklist items are missing")
        if len(reports) > 1:
            parts.append(f"{len(reports)} files")
        return ", ".join([*parts, *self._fixable()])

    def _fixable(self) -> list[str]:
        """How many were fixed, or could be."""
        from steadystep.lint.repairs import fix_state

        done = sum(len(fixed.applied) for fixed in self.fixed.values())
        if self._fix:
            return [f"{done} fixed" if self._write else f"{done} would be fixed"]
        safe = sum(fix_state(h, "\n".join(r.source) + "\n") == "safe" for r in self.reports for h in r.hits)
        return [f"{safe} can be fixed with --fix"] if safe else []


def _form(form: Format, *, as_json: bool, output: str, bad_dry_run: bool) -> Format:
    if bad_dry_run:
        raise ConfigError("--dry-run: only together with --fix")
    if as_json and form not in (Format.TEXT, Format.JSON):
        raise ConfigError(f"--json and --format {form}: give one of them")
    form = Format.JSON if as_json else form
    if output and form is Format.TEXT:
        raise ConfigError("--output: choose what to write with --format json, sarif or github")
    return form


def _write(output: str, text: str) -> None:
    try:
        Path(output).write_text(text, encoding="utf-8", errors="replace")
    except OSError as error:
        raise ConfigError(f"{output}: cannot be written ({error.strerror or error})") from None


def _codes(text: str) -> tuple[str, ...]:
    from steadystep.lint.catalog import RULES, nearest_code

    codes = tuple(code.strip().upper() for code in text.split(",") if code.strip())
    for code in codes:
        if not any(known.startswith(code) for known in (*RULES, "SS001")):
            raise ConfigError(f"{code}: no such rule; {nearest_code(code)}")
    return codes


def _wanted(code: str, only: tuple[str, ...], without: tuple[str, ...]) -> bool:
    return (not only or code.startswith(only)) and not (without and code.startswith(without))
