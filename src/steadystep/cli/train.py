"""`steadystep train`: a run from a YAML file, with progress, and a word about how it went."""

import json
import sys
import time
from pathlib import Path
from typing import final

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from steadystep.errors import TrainingHalted
from steadystep.guard import Guard
from steadystep.records import Outcome
from steadystep.train import RunPlan, Summary, train
from steadystep.train.crew import Crew
from steadystep.train.loop import prepare_folder
from steadystep.train.template import write

_LINE_EVERY_S = 10.0  # where there is no terminal


def new(name: str) -> None:
    """Write a template."""
    program, settings = write(name, Path.cwd())
    Console().print(f"wrote {program.name} and {settings.name}; start it with: steadystep train {settings.name}")


def run(config: Path, *, run_dir: str, resume: bool, as_json: bool) -> int:
    """Train; 0 when it finished, 1 when the guard had to stop it, 130 after Ctrl-C."""
    plan = RunPlan.load(config)
    crew = Crew.join(plan.run.distributed)
    folder = Path(run_dir) if run_dir else Path("runs") / config.stem
    crew.first(lambda: prepare_folder(folder, config, resume=resume or (crew.restarted and folder.exists())))
    console = Console(stderr=as_json, highlight=False, quiet=crew.rank > 0)
    screen = _Screen(console, plan.guard.training.total_steps)
    try:
        with screen:
            summary = train(plan, folder, watch=screen.watch, crew=crew)
    except TrainingHalted as halt:
        console.print(f"[red]{halt}[/red]", soft_wrap=True)
        return 1
    except KeyboardInterrupt:
        console.print(f"stopped; go on with: steadystep train {config} --run-dir {folder} --resume", soft_wrap=True)
        return 130
    crew.leave()
    if as_json and crew.rank == 0:
        sys.stdout.write(json.dumps(summary.as_dict()) + "\n")
    elif not as_json:
        console.print(_table(summary))
    return 0


@final
class _Screen:
    """Progress with what one wants to know at a glance: a bar on a terminal, else a line now and then."""

    def __init__(self, console: Console, total: int) -> None:
        self._console, self._total = console, total
        self._bar = Progress(
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TextColumn("{task.fields[said]}"),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("", total=total, said="")
        self._count = 0
        self._began: tuple[int, float] | None = None
        self._last = 0.0

    def __enter__(self) -> None:
        self._bar.start()

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def watch(self, outcome: Outcome, guard: Guard) -> None:
        """One step more."""
        now, self._count = time.perf_counter(), self._count + (not outcome.plan.proceeds)
        first, since = self._began = self._began or (outcome.step, now)
        if self._console.is_terminal:
            said = _said(outcome, speed=(outcome.step - first) / max(now - since, 1e-9), count=self._count)
            self._bar.update(self._task, completed=guard.attempts, said=said)
        elif now - self._last >= _LINE_EVERY_S or guard.attempts == self._total:
            self._last = now
            said = _said(outcome, speed=(outcome.step - first) / max(now - since, 1e-9), count=self._count)
            self._console.print(f"step {guard.attempts}/{self._total}  {said}", soft_wrap=True)


def _said(outcome: Outcome, *, speed: float, count: int) -> str:
    signals = outcome.signals
    norm = "" if signals is None else f"  norm {signals.grad_norm:.3g}  lr {signals.lr:.2e}"
    return f"loss {outcome.loss:.4f}{norm}  {speed:.0f} steps/s" + (f"  {count} interventions" if count else "")


def _table(summary: Summary) -> Table:
    table = Table.grid(padding=(0, 2))
    for name, value in (
        ("steps", f"{summary.steps:,} tried, {summary.updates:,} updates in the weights"),
        ("last loss", f"{summary.final_loss:.4f}" if summary.trained else "nothing was left to do"),
        ("validation", "none" if summary.validation is None else f"{summary.validation:.4f}"),
        ("best", "" if summary.best_validation is None else f"{summary.best_validation:.4f}"),
        ("interventions", str(summary.incidents)),
        ("time", f"{summary.seconds:.1f} s"),
        ("folder", summary.run_dir),
    ):
        if value:
            table.add_row(name, value)
    if summary.stopped_early:
        table.add_row("", "stopped early: validation no longer improved")
    for diagnosis in summary.diagnosis:
        table.add_row("diagnosis", diagnosis)
    return table
