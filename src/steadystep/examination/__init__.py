"""Diagnosis by experiment: `examine` makes short trials, names the cause and the repair that worked."""

import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, final

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from steadystep._utils.numbers import as_json
from steadystep._utils.rng import HostRandom, RngState, generator_back
from steadystep._utils.tree import tensors_in
from steadystep.errors import ConfigError
from steadystep.examination.experiments import Experiments
from steadystep.examination.passes import num_rows
from steadystep.examination.workbench import BatchLoss, Trial, Workbench
from steadystep.lr_finder import generators_of
from steadystep.records import Diagnosis

__all__ = ["Examination", "Trial", "examine"]

_MOST_BATCHES = 128
_FURTHER = 8
_FEWEST_SAMPLES = 512
_MOST_BYTES = 1 << 24
_AGAIN = 0.9  # of the samples of a batch that have been seen before: the data begins anew
_FEWEST_BATCHES = 9  # with fewer, a pass over the data is too little to hold some of it back
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
        _taken(batches, num_batches, most=_MOST_BATCHES if num_updates else 0),
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


def _taken(batches: Iterable[Any], number: int, *, most: int) -> list[Any]:
    """Batches of a loader, whose random numbers are put back."""
    with _random_numbers_back(batches):
        return one_pass(_kept(iter(batches), number, most=most))


def one_pass(batches: list[Any]) -> list[Any]:
    """The batches before the data begins anew, where there are enough of them."""
    seen: set[float] = set()
    for number, batch in enumerate(batches):
        rows = _marks(batch)
        if rows and sum(mark in seen for mark in rows) >= _AGAIN * len(rows):
            # why all of them: a whole batch in every step, or a handful of samples, is never held back
            return batches[:number] if number >= _FEWEST_BATCHES else batches
        seen.update(rows)
    return batches


def _marks(batch: Any) -> list[float]:
    """One number for each sample, the same where all of it is the same; none where samples cannot be told apart."""
    held = [t for _, t in tensors_in(batch) if t.layout is torch.strided and not t.is_nested and not t.is_complex()]
    size = max((num_rows(t) for t in held), default=0)
    if size < 2:
        return []
    marks = torch.zeros(size, dtype=torch.float64)
    for place, tensor in enumerate(t for t in held if num_rows(t) == size):
        flat = tensor.detach().reshape(size, -1).to("cpu", torch.float64)
        marks += flat @ torch.sin(1.0 + place + torch.arange(flat.shape[1], dtype=torch.float64))
    return marks.tolist() if bool(marks.isfinite().all()) else []  # sync: examined


@contextmanager
def _random_numbers_back(batches: object) -> Iterator[None]:
    """A loader draws random numbers to shuffle: those of the process, and those of its own generators."""
    states: list[HostRandom | RngState] = [HostRandom(), RngState(torch.device("cpu"))]
    own = [back for generator in generators_of(batches) if (back := generator_back(generator)) is not None]
    try:
        yield
    finally:
        for state in states:
            state.restore()
        for back in own:
            back()


def _kept(batches: Iterator[Any], number: int, most: int = 0) -> list[Any]:
    """The first batches; some from farther on where these have a single target, as with sorted data."""
    first = list(islice(batches, number))
    size = max((num_rows(t) for batch in first[:1] for _, t in tensors_in(batch)), default=0)
    if size and len(first) == number:
        first += islice(batches, max(min(_FEWEST_SAMPLES // size, 512) - number, 0))
        first += _small(batches, most - len(first))
        number = len(first)
    if len(first) < number or not _have_one_target(first):
        return first
    further = [batch for place, batch in enumerate(islice(batches, _FURTHER * number)) if place % _FURTHER == 0]
    return (first[: number // 2] + further)[: max(number, 4)] if further else first


def _small(batches: Iterator[Any], number: int) -> Iterator[Any]:
    """More of them, while they take little memory: a trial then sees about as much data as the run."""
    room = _MOST_BYTES
    for batch in islice(batches, max(number, 0)):
        room -= sum(t.numel() * t.element_size() for _, t in tensors_in(batch))
        yield batch
        if room < 0:
            return


def _have_one_target(batches: list[Any]) -> bool:
    last = [[t for _, t in tensors_in(batch)][-1:] for batch in batches]
    targets = [t for part in last for t in part if t.dim() == 1 and not t.is_floating_point()]
    return bool(targets) and len({value for t in targets for value in torch.unique(t).tolist()}) == 1  # sync: examined
