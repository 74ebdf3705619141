"""`steadystep diagnose`: read the curves of any run and say what is wrong with it."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from steadystep._utils.text import is_folder
from steadystep.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rich.console import Console

    from steadystep.runs.diagnosis import Headline
    from steadystep.runs.reading import PlannedAction, Reading
    from steadystep.runs.run import Run


Columns = Annotated[
    list[str] | None,
    typer.Option(
        "--column",
        metavar="ROLE=NAME",
        help="Which column is the step, loss, grad_norm, lr or val_loss, if it cannot be inferred.",
    ),
]


def by_role(given: list[str] | None) -> dict[str, str]:
    """What was given, as a mapping."""
    asked = {}
    for pair in given or []:
        role, equals, name = pair.partition("=")
        if not equals or not name:
            raise ConfigError(f"--column {pair}: write it as ROLE=NAME, such as loss=my_loss")
        asked[role.strip()] = name
    return asked


_LONGEST = 600  # letters


def printable(text: str) -> str:
    """Without control characters: names in a log are anybody's, and a terminal obeys some."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def printable_line(text: str) -> str:
    """The same as one line of bearable length; what is left out is the middle, for the end says what to do."""
    clean = printable(" ".join(text.split()))
    half = _LONGEST // 2
    return clean if len(clean) <= _LONGEST else f"{clean[:half]} … {clean[-half:]}"


_MOST_PLANS = 8


def diagnose(
    path: str = typer.Argument(
        help="A run folder, TensorBoard events, CSV, JSON lines, trainer_state.json, what a script printed, SQLite or "
        "Parquet."
    ),
    column: Columns = None,
    notes: bool = typer.Option(False, "--notes", help="Also show harmless findings and how the file was read."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON instead of text."),
) -> None:
    """Diagnose a run from its curves: what is wrong, since which step, and what to change.

    Exit code 0: healthy, too short to tell, or learning not judged. 1: problems found. 2: it could not be read.

    Example: steadystep diagnose runs/a
    Example: steadystep diagnose train.log
    Example: steadystep diagnose log.csv --column loss=my_loss --column step=iter
    """
    asked = by_role(column)
    is_folder(Path(path))  # before anything is imported for it
    readings, num_paths, failed = _readings(path, asked)
    several = num_paths > 1 or len(readings) > 1
    if as_json:
        told = [as_json_dict(*one) for one in readings]
        typer.echo(json.dumps(told if several else told[0], indent=2))
    else:
        from rich.console import Console

        console = Console(highlight=False, soft_wrap=True)
        for run, reading, verdict in readings:
            _tell(console, run, reading, verdict, notes=notes, several=several)
    if failed:
        raise typer.Exit(2)
    raise typer.Exit(int(any(verdict.healthy is False for _, _, verdict in readings)))


def _readings(path: str, asked: dict[str, str]) -> "tuple[list[tuple[Run, Reading, Headline]], int, bool]":
    """The runs found at a path, how many paths there were, and whether one of several could not be read."""
    from rich.console import Console

    from steadystep.runs.diagnosis import diagnose as read_curves
    from steadystep.runs.diagnosis import headline
    from steadystep.runs.open import find_runs, open_runs

    found, failed = find_runs(path), False
    readings: list[tuple[Run, Reading, Headline]] = []
    waiting = Console(stderr=True)
    for run_path in found:
        with waiting.status(f"reading {printable(str(run_path))}", spinner="line"):
            try:
                for run in open_runs(run_path, asked):
                    reading = read_curves(run)
                    readings.append((run, reading, headline(run, reading)))
            except ConfigError as error:
                if len(found) == 1:
                    raise
                failed = True
                typer.echo(f"error: {error}", err=True)
    return readings, len(found), failed


def _tell(
    console: "Console", run: "Run", reading: "Reading", verdict: "Headline", *, notes: bool, several: bool
) -> None:
    from steadystep.pages import sparkline

    def line(text: str, style: str = "") -> None:
        console.print(printable(text), style=style, markup=False)

    if several:
        line(str(run.path) if run.name in (run.path.stem, run.path.name) else f"{run.path}: {run.name}", "bold")
    line(verdict.said, "green" if verdict.healthy else "yellow" if verdict.healthy is None else "bold red")
    drawn = sparkline(run, width=min(64, max(20, console.width - 24)))
    if drawn:
        line(drawn, "dim")
    if run.source == "steadystep":
        line(_numbers(run), "dim")
    if reading.read:
        line(reading.read, "dim")
    shown = [sign for sign in verdict.signs if notes or (sign.severity != "info" and verdict.healthy is False)]
    for number, sign in enumerate(shown, 1):
        until = "" if sign.until is None or sign.until == sign.step else f" to {sign.until}"
        line("")
        line(f"{number}. {sign.kind}, step {sign.step}{until}", "" if sign.severity == "info" else "bold")
        line(f"   {sign.evidence}")
        if sign.advice:
            line(f"   try: {sign.advice}", "" if sign.severity == "info" else "cyan")
    if run.incidents:
        _tell_incidents(line, run)
    elif reading.plans:
        _tell_plans(line, reading.plans)
    if notes and reading.notes:
        line("")
        for note in reading.notes:
            if note != reading.read:
                line(f"note: {note}", "dim")
    elif not notes and (more := len(reading.findings) - len(shown)) and not several and reading.healthy is False:
        line("")
        line(f"{more} more note{'s' * (more > 1)}: --notes", "dim")
    if several:
        line("")


def _tell_plans(line: "Callable[[str, str], None]", plans: "Sequence[PlannedAction]") -> None:
    """What a guard would have done in a run that had none."""
    line("", "")
    line(f"A guard would have intervened at {len(plans)} of the logged steps:", "bold")
    rows = _rows(plans)
    for alike in rows[:_MOST_PLANS]:
        line(f"   step {alike[0].step}: {alike[0].action} ({alike[0].reason})", "")
        if len(alike) > 1:
            line(f"     … repeated {len(alike) - 1} times (steps {alike[1].step}-{alike[-1].step})", "")
    if len(rows) > _MOST_PLANS:
        line(f"   and {sum(map(len, rows[_MOST_PLANS:]))} more (--json lists all)", "")


def _rows(plans: "Sequence[PlannedAction]") -> "list[list[PlannedAction]]":
    """Consecutive plans with the same actions for the same cause, in one row."""
    rows: list[list[PlannedAction]] = []
    for plan in plans:
        cause = plan.reason.partition(":")[0]
        if rows and (rows[-1][-1].action, rows[-1][-1].reason.partition(":")[0]) == (plan.action, cause):
            rows[-1].append(plan)
        else:
            rows.append([plan])
    return rows


def _tell_incidents(line: "Callable[[str, str], None]", run: "Run") -> None:
    """What the guard of this run found and did: nothing has to be supposed here."""
    from steadystep.runs.diagnosis import incident_rows

    for acted, title in ((True, "Interventions of the guard"), (False, "Observed by the guard")):
        rows = [row for row in incident_rows(run) if row["intervention"] is acted]
        if not rows or (not acted and run.num_interventions and not any(row["severity"] != "warn" for row in rows)):
            continue
        line("", "")
        line(f"{title} ({sum(row['count'] for row in rows)}):", "bold")
        for row in rows[:_MOST_PLANS]:
            times = f", {row['count']} times" if row["count"] > 1 else ""
            line(f"   {_when(row['steps'])}: {row['cause']}{times}", "")
            line(f"     {row['evidence']}", "")
            for name, key in (("done", "done"), ("origin", "origin"), ("replay", "replay"), ("try", "advice")):
                if row[key]:
                    line(f"     {name + ':':<8}{row[key]}", "cyan" if name == "try" else "")
        if len(rows) > _MOST_PLANS:
            line(f"   and {len(rows) - _MOST_PLANS} more (steadystep report shows all)", "")


def _when(steps: list[list[int]]) -> str:
    """The steps of like incidents: the first three, and how many more."""
    named = [f"{first:,}" if first == last else f"{first:,}-{last:,}" for first, last in steps]
    more = f" and {len(named) - 3} more" if len(named) > 3 else ""
    return f"step{'s' * (len(named) > 1 or '-' in named[0])} {', '.join(named[:3])}{more}"


def as_json_dict(run: "Run", reading: "Reading", verdict: "Headline") -> dict[str, Any]:
    """Return what `diagnose --json` prints about one run; the schema is docs/diagnose.schema.json."""
    from steadystep._utils.numbers import with_words
    from steadystep.runs.diagnosis import incident_rows

    told: dict[str, Any] = with_words(
        {
            **reading.as_dict(),
            "outcome": "recovered" if verdict.healthy and reading.healthy is False else reading.outcome,
            "findings": [asdict(sign) for sign in verdict.signs],
            "path": str(run.path),
            "source": run.source,
            "verdict": verdict.said,
            "healthy": verdict.healthy,
            "cause": verdict.cause,
            "status": run.status(),
            "numbers": run.numbers(),
            "effective": run.effective().as_dict(),
            "incidents": list(incident_rows(run)),
            "hparams": dict(run.hparams),
        }
    )
    return told


def _numbers(run: "Run") -> str:
    """The numbers that every view shows, in one line."""
    from steadystep._utils.text import count, number

    said = [count(run.steps, run.step_unit), f"final loss {number(run.final_loss)}"]
    if run.best_validation is not None:
        said.append(f"best validation {number(run.best_validation)} at step {run.best_validation_step:,}")
    counts = (count(run.num_incidents, "incident"), count(run.num_interventions, "intervention"))
    return ", ".join((*said, *counts))
