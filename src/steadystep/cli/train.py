"""`steadystep train`: a run from a YAML file, with progress, and a word about how it went."""

import json
import logging
import math
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any, final

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import Tensor

from steadystep._utils.numbers import with_words
from steadystep._utils.text import count, number
from steadystep.cli.diagnose import printable
from steadystep.diagnosis import Cause
from steadystep.errors import ConfigError, TrainingHalted
from steadystep.guard import Guard
from steadystep.incidents import Replay, load_factory, replay
from steadystep.incidents.without_guard import WithoutGuard, without_guard
from steadystep.lab.tasks import FACTORIES
from steadystep.lr_finder import find_lr
from steadystep.tracking import Terminal
from steadystep.train import RunPlan, RunSettings, Summary, train
from steadystep.train.job import make
from steadystep.train.loop import Crew, prepare_folder


def run(plan: RunPlan, config: Path, *, run_dir: str, resume: bool, force: bool, as_json: bool) -> int:
    """Train; 0 when it finished, 1 when the guard had to stop it, 130 after Ctrl-C."""
    plan = _without_console(plan)
    crew = Crew.join(plan.run.distributed)
    folder = Path(run_dir) if run_dir else Path("runs") / config.stem
    crew.first(lambda: prepare_folder(folder, config, resume=resume or (crew.restarted and folder.exists())))
    console = Console(stderr=as_json, highlight=False, quiet=crew.rank > 0)
    screen = Terminal(console, total=plan.guard.training.total_steps)
    try:
        with _messages_on(console):
            summary = train(plan, folder, sinks=[screen], crew=crew, force=force, tasks=FACTORIES)
    except TrainingHalted as halt:
        console.print(f"[red]{halt}[/red]", soft_wrap=True)
        return 1
    except KeyboardInterrupt:
        console.print(f"stopped; continue with: steadystep train {config} --run-dir {folder} --resume", soft_wrap=True)
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
        ("steps", f"{summary.steps:,}, of which {summary.updates:,} applied"),
        ("", "" if summary.trained else "no steps left to run"),
        ("final loss", f"{number(summary.final_loss)}, median of the last tenth"),
        ("validation", "none" if summary.validation is None else number(summary.validation)),
        ("best", "" if summary.best_validation is None else number(summary.best_validation)),
        ("incidents", f"{summary.incidents}, {count(summary.interventions, 'intervention')}"),
        ("time", f"{summary.seconds:.1f} s"),
        ("folder", summary.run_dir),
    ):
        if value:
            table.add_row(name, value)
    if summary.stopped_early:
        table.add_row("", "stopped early: validation no longer improved")
    table.add_row("verdict", Text(summary.verdict))
    for diagnosis in summary.diagnosis:
        if diagnosis != "healthy":
            table.add_row("diagnosis", Text(diagnosis))
    return table


def run_find_lr(settings: RunSettings, *, seed: int, steps: int, as_json: bool) -> None:
    """Sweep, and print the curve with what it says."""
    if settings.task in FACTORIES:
        torch.set_num_threads(1)  # why: matrices this small are slower on two threads
    job = make(settings.task, seed, FACTORIES)
    job.prepare(settings)
    batches = _endless(job.batches)

    def loss() -> Tensor:
        try:
            return job.loss(next(batches))
        except StopIteration:
            raise ConfigError(f"task {settings.task!r}: its batches are empty") from None

    curve = find_lr(job.model, job.optimizer, loss, num_steps=steps)
    console = Console(soft_wrap=True, highlight=False)
    console.print(curve.to_json() if as_json else str(curve), markup=False)


REPRODUCED = 1


def run_replay(
    bundle: str, *, factory: str, precision: str | None, device: str | None, without: int = 0, as_json: bool
) -> int:
    """Load, run, print; returns the exit code: 0 all is finite this time, 1 it happened again."""
    console = Console(soft_wrap=True, highlight=False)
    make_parts = load_factory(factory)
    done = replay(Path(bundle), make_parts, precision=precision, device=device)
    unguarded = without_guard(Path(bundle), make_parts, steps=without) if without else None
    if unguarded is not None:
        unguarded.write(Path(bundle))
    said = _as_json(done, unguarded) if as_json else "\n".join(map(printable, _as_text(done, unguarded).split("\n")))
    console.print(said, markup=False)
    return REPRODUCED if done.reproduces else 0


def _as_text(done: Replay, unguarded: WithoutGuard | None) -> str:
    now, origin = done.now, done.now.origin
    lines = [
        f"incident    step {done.step}: {done.what}",
        f"then        loss {done.seen_loss:.6g}, gradient norm {done.seen_norm:.6g} ({done.recorded_precision})",
        f"now         loss {now.loss:.6g}, gradient norm {now.grad_norm:.6g} ({done.precision})",
    ]
    if not now.finite:
        lines += [f"origin      {origin.place}, {origin.phase}", f"            {origin.what}"]
        if origin.tensor and origin.tensor not in origin.what:
            lines.append(f"            {origin.tensor}")
    elif done.then.phase != "none":
        lines.append(f"origin      then {done.then.place}, {done.then.phase}; now everything is finite")
    if unguarded is not None:
        lost = f"loss not finite from step {unguarded.lost_at}"
        came_to = lost if unguarded.lost_at is not None else f"loss {unguarded.losses[-1]:.6g}"
        on = ", each with this batch" if unguarded.same_batch else ""
        lines.append(f"without it  {came_to}, {count(len(unguarded.losses), 'step')} without the guard{on}")
    return "\n".join([*lines, f"verdict     {_verdict(done)}"])


def _verdict(done: Replay) -> str:
    if done.reproduces:
        return "reproduced"
    if done.precision != done.recorded_precision:
        return f"not reproduced in {done.precision}: the step is finite there"
    if not math.isfinite(done.seen_loss + done.seen_norm):
        return "not reproduced: a transient fault, or it depends on something outside the bundle"
    return "not reproduced: loss or gradient norm differ"


def _as_json(done: Replay, unguarded: WithoutGuard | None) -> str:
    told = {} if unguarded is None else {"without_guard": with_words(asdict(unguarded))}
    return json.dumps(
        {
            "bundle": str(done.bundle),
            "step": done.step,
            "what": done.what,
            "reproduces": done.reproduces,
            "precision": done.precision,
            "recorded_precision": done.recorded_precision,
            "then": json.loads(done.then.to_json()),
            "now": json.loads(done.now.to_json()),
            "verdict": _verdict(done),
            **told,
        },
        indent=2,
    )


_FAULTY = 1


def run_examine(
    factory: str,
    *,
    after: int,
    steps: int,
    seconds: float,
    max_grad_norm: float | None,
    seed: int,
    as_json: bool,
) -> int:
    """Build, train a little if asked to, experiment, print; returns the exit code: 0 healthy, 1 a fault was found."""
    job = make(factory, seed, FACTORIES)
    if factory in FACTORIES:
        torch.set_num_threads(1)  # why: matrices this small are slower on two threads
    console = Console(soft_wrap=True, highlight=False)
    training = {} if max_grad_norm is None else {"max_grad_norm": max_grad_norm}
    with (
        Guard(job.model, job.optimizer, config={"mode": "observe", "training": training}) as guard,
        _status() as status,
    ):
        try:
            for number, batch in enumerate(islice(_endless(job.batches), after)):
                guard.step(job.loss, batch=batch)
                status(f"training first: step {number + 1} of {after}")
                if job.after_step is not None:
                    job.after_step()
        except TrainingHalted as error:
            console.print(f"halted while training first: {error}", markup=False)
        done = guard.examine(
            job.batches, loss=job.loss, num_steps=steps, max_seconds=seconds, seed=seed, progress=status
        )
    said = json.dumps(done.to_json()) if as_json else "\n".join(map(printable, str(done).split("\n")))
    console.print(said, markup=False)
    return 0 if all(found.cause == Cause.HEALTHY for found in done.causes) else _FAULTY


@contextmanager
def _status() -> Iterator[Callable[[str], None]]:
    """One line on the error stream that is replaced by the next."""
    with Console(stderr=True).status("building the job ...") as status:
        yield lambda line: status.update(f"{line} ...")


def _endless(batches: Iterable[Any]) -> Iterator[Any]:
    while True:
        empty = True
        for batch in batches:
            empty = False
            yield batch
        if empty:
            return
