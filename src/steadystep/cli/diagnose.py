"""`steadystep diagnose`: read the curves of any run and say what is wrong with it."""

import json
from typing import TYPE_CHECKING

import typer

from steadystep.cli.columns import Columns, by_role
from steadystep.cli.plain import plain
from steadystep.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.console import Console

    from steadystep.curves import Reading
    from steadystep.report.verdict import Verdict
    from steadystep.track.run import Run

_MOST_PLANS = 8


def diagnose(
    path: str = typer.Argument(help="A run's folder, TensorBoard events, CSV, JSON lines or trainer_state.json."),
    column: Columns = None,
    notes: bool = typer.Option(False, "--notes", help="Show what is no trouble too, and how the file was read."),
    as_json: bool = typer.Option(False, "--json", help="For a program."),
) -> None:
    """Read the curves of any run and say what is wrong with it: which step, which numbers, what to change.

    Exit code 0: healthy. 1: trouble was found. 2: it could not be read.

    Example: steadystep diagnose runs/a
    Example: steadystep diagnose log.csv --column loss=my_loss --column step=iter
    """
    from rich.console import Console

    from steadystep.curves import diagnose as read_curves
    from steadystep.curves import find_runs, open_run
    from steadystep.report.verdict import judged

    asked = by_role(column)
    found = find_runs(path)
    readings: list[tuple[Run, Reading, Verdict]] = []
    waiting = Console(stderr=True)
    for run_path in found:
        with waiting.status(f"reading {plain(str(run_path))}", spinner="line"):
            try:
                run = open_run(run_path, asked)
                reading = read_curves(run)
                readings.append((run, reading, judged(run, reading)))
            except ConfigError as error:
                if len(found) == 1:
                    raise
                typer.echo(f"error: {error}", err=True)
    if as_json:
        told = [r.as_dict() | {"verdict": verdict.said, "healthy": verdict.healthy} for _, r, verdict in readings]
        typer.echo(json.dumps(told[0] if len(found) == 1 else told, indent=2))
    else:
        console = Console(highlight=False, soft_wrap=True)
        for run, reading, verdict in readings:
            _tell(console, run, reading, verdict, notes=notes, several=len(found) > 1)
    if len(readings) < len(found):
        raise typer.Exit(2)
    raise typer.Exit(int(any(not verdict.healthy for _, _, verdict in readings)))


def _tell(
    console: "Console", run: "Run", reading: "Reading", verdict: "Verdict", *, notes: bool, several: bool
) -> None:
    from steadystep.curves.sparkline import sparkline

    def line(text: str, style: str = "") -> None:
        console.print(plain(text), style=style, markup=False)

    if several:
        line(str(run.path), "bold")
    line(verdict.said, "green" if verdict.healthy else "bold red")
    drawn = sparkline(run, width=min(64, max(20, console.width - 24)))
    if drawn:
        line(drawn, "dim")
    shown = reading.findings if notes else () if verdict.healthy else reading.troubles
    for number, pattern in enumerate(shown, 1):
        until = "" if pattern.until is None or pattern.until == pattern.step else f" to {pattern.until}"
        line("")
        line(f"{number}. {pattern.kind}, step {pattern.step}{until}", "bold" if pattern.is_trouble else "")
        line(f"   {pattern.evidence}")
        if pattern.advice:
            line(f"   do: {pattern.advice}", "cyan" if pattern.is_trouble else "")
    if run.incidents:
        _tell_incidents(line, run)
    elif reading.plans:
        line("")
        line(f"A guard would have acted at {len(reading.plans)} of the logged steps:", "bold")
        for plan in reading.plans[:_MOST_PLANS]:
            line(f"   step {plan.step}: {plan.action} ({plan.reason})")
        if len(reading.plans) > _MOST_PLANS:
            line(f"   and {len(reading.plans) - _MOST_PLANS} more (--json lists all)")
    if notes and reading.notes:
        line("")
        for note in reading.notes:
            line(f"note: {note}", "dim")
    elif not notes and (more := len(reading.findings) - len(shown)) and not several and not reading.healthy:
        line("")
        line(f"{more} more note{'s' * (more > 1)}: --notes", "dim")
    if several:
        line("")


def _tell_incidents(line: "Callable[[str, str], None]", run: "Run") -> None:
    """What the guard of this run did: nothing has to be supposed here."""
    from steadystep.report.episodes import episodes, interventions

    acted = interventions(run, episodes(run))
    if not acted:
        return
    line("", "")
    line(f"What the guard did ({len(acted)}):", "bold")
    for episode in acted[:_MOST_PLANS]:
        head = episode.head
        line(f"   {episode.when}: {episode.cause}; {head.done or 'refused'}. {head.evidence}", "")
    if len(acted) > _MOST_PLANS:
        line(f"   and {len(acted) - _MOST_PLANS} more (steadystep report shows all)", "")
    for advice in dict.fromkeys(episode.head.advice for episode in acted if episode.head.advice):
        line(f"   do: {advice}", "cyan")
