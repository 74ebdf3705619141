"""Diagnosis by experiment: `examine` makes short trials, names the cause and the repair that worked."""

import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from steadystep._utils.numbers import as_json
from steadystep.errors import ConfigError
from steadystep.examination.experiments import Experiments
from steadystep.examination.kept import MOST_BATCHES, taken
from steadystep.examination.workbench import BatchLoss, Trial, Workbench
from steadystep.records import Diagnosis

__all__ = ["Examination", "Trial", "examine"]

_NOT_REPEATABLE = (
    "the same trial twice gave other losses: own random numbers in the loss, nondeterministic kernels, or hardware"
)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Examination:
    """What was found, by which trials, and at what cost."""

    causes: tuple[Diagnosis, ...]
    """The likeliest first; one "healthy" when nothing is wrong."""
    trials: tuple[Trial, ...]
    """In the order they were made."""
    repeatable: bool
    """The same trial twice gave the same losses, to the bit."""
    num_updates: int
    """Taken by all trials together, and undone."""
    seconds: float
    """What it took."""
    skipped: tuple[str, ...] = ()
    """What could not be measured with this job, and the error."""

    def to_json(self) -> dict[str, Any]:
        """Plain values for a program."""
        return {
            "causes": [json.loads(cause.to_json()) for cause in self.causes],
            "trials": [_plain(trial) for trial in self.trials],
            "repeatable": self.repeatable,
            "num_updates": self.num_updates,
            "seconds": round(self.seconds, 3),
            "skipped": list(self.skipped),
        }

    def __str__(self) -> str:
        odd = [] if self.repeatable else [_NOT_REPEATABLE]
        odd += [f"not measured: {what}" for what in self.skipped]
        return "\n".join([*_told(self.causes), "", *_table(self.trials), "", *odd, self._cost])

    @property
    def _cost(self) -> str:
        return f"trials: {len(self.trials)}, updates: {self.num_updates}, {self.seconds:.1f} s; everything is put back"


def _plain(trial: Trial) -> dict[str, Any]:
    """With numbers that JSON has no word for as "nan" and "inf"."""
    held = {name: [as_json(loss) for loss in getattr(trial, name)] for name in ("before", "after", "losses")}
    return {"name": trial.name, "what": trial.what, "start": as_json(trial.start), "end": as_json(trial.end), **held}


def _told(causes: Sequence[Diagnosis]) -> Iterator[str]:
    for number, found in enumerate(causes):
        if number:
            yield ""
        yield f"cause       {found.cause}" + (f" ({found.fault})" if found.fault else "")
        yield f"evidence    {found.evidence}"
        if found.advice:
            yield f"try         {found.advice}"


def _table(trials: Sequence[Trial]) -> Iterator[str]:
    width = max((len(trial.what) for trial in trials), default=0)
    yield f"{'trial':{width}}  {'updates':>7}  {'loss before':>11}  {'after':>10}"
    for trial in trials:
        after = f"{trial.end:10.4g}" if math.isfinite(trial.end) else "not finite"
        yield f"{trial.what:{width}}  {len(trial.losses):7}  {trial.start:11.4g}  {after}"


def examine(
    model: nn.Module,
    optimizer: Optimizer,
    loss: BatchLoss,
    batches: Iterable[Any],
    *,
    num_steps: int = 40,
    num_batches: int = 24,
    max_grad_norm: float | None = None,
    scheduler: LRScheduler | None = None,
    max_seconds: float = 60.0,
    seed: int = 0,
    num_updates: int = 0,
    largest_rate: float = math.inf,
    progress: Callable[[str], None] | None = None,
) -> Examination:
    """Run short experiments from the present state and return the likeliest cause with a repair that was tried.

    Everything is restored afterwards, bit for bit: weights, gradients, buffers, modes, the optimizer and its state, and
    the random numbers of torch, Python and NumPy. Batches are kept in memory while it runs.

    Args:
        model: what is trained.
        optimizer: as it is used in training.
        loss: computes the loss of a batch; the same batch gives the same loss apart from dropout.
        batches: training batches; the first `num_batches` are used, a third of them, at most 8, for evaluation only.
        num_steps: updates per trial.
        num_batches: how many batches to keep.
        max_grad_norm: the limit your loop clips gradients to, if it does.
        scheduler: your schedule, if it has one: its next steps are looked at.
        max_seconds: no further trial begins after this time.
        seed: of dropout and the like inside the trials.
        num_updates: that the job has made already. Of one that has made some, its present loss counts.
        largest_rate: the largest learning rate of those updates, where it is known: trials begin from it at most.
        progress: called with a line before each trial.

    >>> _ = torch.manual_seed(0)
    >>> model = nn.Linear(4, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=1e-7)
    >>> x = [torch.randn(16, 4) for _ in range(12)]
    >>> examine(model, optimizer, lambda x: (model(x) - x.sum(1, keepdim=True)).square().mean(), x).causes[0].cause
    'learning-rate-too-low'
    """
    if num_steps < 10 or num_batches < 1:
        raise ConfigError(f"num_steps = {num_steps}, num_batches = {num_batches}: at least 10 steps and 1 batch")
    began = time.monotonic()  # why a clock: it bounds the cost, and decides nothing about a run
    bench = Workbench(
        model,
        optimizer,
        loss,
        taken(batches, num_batches, most=MOST_BATCHES if num_updates else 0),
        num_steps=num_steps,
        max_grad_norm=max_grad_norm,
        seed=seed,
        in_time=lambda: time.monotonic() - began < max_seconds,
        updated=num_updates,
        largest_rate=largest_rate,
    )
    experiments = Experiments(bench, scheduler, progress or (lambda line: None))
    return Examination(
        causes=tuple(replace(found, cause=str(found.cause), fault=str(found.fault)) for found in experiments.run()),
        trials=tuple(experiments.trials),
        repeatable=bench.repeats(),
        num_updates=bench.num_updates,
        seconds=time.monotonic() - began,
        skipped=tuple(f"{what} ({error})" for what, error in experiments.attempt.failed.items()),
    )
