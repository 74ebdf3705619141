"""`steadystep train`: a run from a YAML file, with progress, and a word about how it went."""

import json
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import final

from rich.console import Console
from rich.table import Table

from steadystep.errors import TrainingHalted
from steadystep.track import Terminal
from steadystep.train import RunPlan, Summary, train
from steadystep.train.crew import Crew
from steadystep.train.loop import prepare_folder
from steadystep.train.template import write


def new(name: str) -> None:
    """Write a template."""
    program, settings = write(name, Path.cwd())
    Console().print(f"wrote {program.name} and {settings.name}; start it with: steadystep train {settings.name}")


def run(config: Path, *, run_dir: str, resume: bool, force: bool, as_json: bool) -> int:
    """Train; 0 when it finished, 1 when the guard had to stop it, 130 after Ctrl-C."""
    plan = _without_console(RunPlan.load(config))
    crew = Crew.join(plan.run.distributed)
    folder = Path(run_dir) if run_dir else Path("runs") / config.stem
    crew.first(lambda: prepare_folder(folder, config, resume=resume or (crew.restarted and folder.exists())))
    console = Console(stderr=as_json, highlight=False, quiet=crew.rank > 0)
    screen = Terminal(console, total=plan.guard.training.total_steps)
    try:
        with _messages_on(console):
            summary = train(plan, folder, sinks=[screen], crew=crew, force=force)
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
class _Messages(logging.Handler):
    """What the guard has to say, on the same screen; incidents have cards there."""

    def __init__(self, console: Console) -> None:
        super().__init__(logging.WARNING)
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        """One message."""
        if not getattr(record, "incident", False):
            self._console.print(record.getMessage(), markup=False, soft_wrap=True)


@contextmanager
def _messages_on(console: Console) -> Iterator[None]:
    logger, handler = logging.getLogger("steadystep"), _Messages(console)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


def _without_console(plan: RunPlan) -> RunPlan:
    """The screen is there anyway."""
    sinks = plan.guard.monitoring.sinks
    if not sinks or "console" not in sinks:
        return plan
    others = {"sinks": tuple(name for name in sinks if name != "console")}
    monitoring = plan.guard.monitoring.model_copy(update=others)
    return plan.model_copy(update={"guard": plan.guard.model_copy(update={"monitoring": monitoring})})


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
