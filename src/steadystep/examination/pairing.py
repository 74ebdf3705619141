"""Whether samples keep their places, mean the same in evaluation, and are asked for by the loss."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import fmean
from typing import Any, final

import torch
from torch import Tensor, nn

from steadystep._utils.tree import mapped, tensors_in
from steadystep.examination.dependence import by_sample, first_outputs, is_changed
from steadystep.examination.parameters import restart
from steadystep.examination.passes import Pass, num_rows, recorded_calls
from steadystep.examination.workbench import Workbench

_SAME = 1e-4  # of the spread of the outputs
_NORMS = nn.modules.batchnorm._BatchNorm
_FEWEST = 4
_LEARNED, _LOST = 0.6, 0.9  # of the loss of a constant prediction


def rows_move(bench: Workbench, batch: Any, seen: Pass) -> bool | None:
    """Whether the output has the right rows in another order, when the samples of a batch are exchanged.

    None where outputs have no row for each sample, or where rows are the same or mixed with each other.
    """
    size = seen.num_samples
    other = seen.with_inputs(batch, lambda t: t.roll(1, 0))
    if size < _FEWEST or not seen.inputs or not is_changed(batch, other):
        return None
    plain, turned = (by_sample(output, size) for output in first_outputs(bench, batch, other))
    if plain is None or turned is None or plain.shape != turned.shape:
        return None
    expected, found = plain.reshape(size, -1).roll(1, 0), turned.reshape(size, -1)
    least = _SAME * float(expected.std(0).amax().clamp_min(1e-12))  # sync: examined
    if _apart(plain.reshape(size, -1), found) <= least and not _follows(bench, batch):
        return None  # why: made of something else, as a generator's noise
    if _apart(expected, found) <= least:
        return False
    return _apart(_in_order(expected), _in_order(found)) <= least or None


def _follows(bench: Workbench, batch: Any) -> bool:
    """Whether another batch gives another output."""
    plain, other = first_outputs(bench, batch, bench.every[-1])
    if plain is None or other is None or plain.shape != other.shape:
        return False
    return not torch.equal(plain, other)  # sync: examined


def _apart(one: Tensor, other: Tensor) -> float:
    return float((one - other).abs().max())  # sync: examined


def _in_order(rows: Tensor) -> Tensor:
    """Sorted by a mixture of all columns."""
    mixture = rows.double() @ torch.sin(1.0 + torch.arange(rows.shape[1], dtype=torch.float64, device=rows.device))
    return rows[mixture.argsort()]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Modes:
    """Losses of the held batches: in training mode, in evaluation mode, and there with statistics of these data."""

    training: float
    evaluating: float
    renewed: float

    def differ(self, level: float) -> bool:
        """Whether what was learned is gone in evaluation mode and comes back with new statistics."""
        return (
            self.training < _LEARNED * level
            and not self.evaluating < _LOST * level
            and self.renewed < 0.5 * (self.training + level)
        )


def loss_by_mode(bench: Workbench, seen: Pass) -> Modes | None:
    """See `Modes`; None without batch normalization in training mode that keeps running statistics."""
    norms = [m for m in bench.model.modules() if isinstance(m, _NORMS) and m.training and m.running_mean is not None]
    if not norms or seen.num_samples < _FEWEST:
        return None
    with bench.set_aside():
        training = fmean(bench.losses(bench.held))
    with bench.set_aside():
        bench.model.eval()
        evaluating = fmean(bench.losses(bench.held))
    momenta = [norm.momentum for norm in norms]
    with bench.set_aside():
        try:
            for norm in norms:
                norm.reset_running_stats()
                norm.momentum = None  # why: a plain mean
            bench.losses(bench.every)
            bench.model.eval()
            renewed = fmean(bench.losses(bench.held))
        finally:
            for norm, momentum in zip(norms, momenta, strict=True):
                norm.momentum = momentum
    found = Modes(training=training, evaluating=evaluating, renewed=renewed)
    return found if math.isfinite(training + renewed) else None


_STEPS, _RATE = 120, 0.1
_FELL, _FELT, _KEPT = 0.5, 0.01, 0.25  # of the first loss; of it; of what was gained


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """Losses of one batch, by its outputs and targets."""

    first: float
    """With outputs of newly drawn weights."""
    turned: float
    """The same outputs, with the targets of other samples."""
    best: float
    """With outputs that fit this batch as well as they can."""
    best_turned: float
    """Those outputs, with the targets of other samples."""

    @property
    def ignore_targets(self) -> bool:
        """The loss falls far with outputs that would do for any targets, though it is computed from them."""
        gain = self.first - self.best
        if not all(map(math.isfinite, (self.first, self.turned, self.best, self.best_turned))):
            return False
        is_felt = abs(self.turned - self.first) > _FELT * abs(self.first)
        return is_felt and gain > _FELL * abs(self.first) > 0.0 and self.best_turned - self.best < _KEPT * gain


def best_answers(bench: Workbench, batch: Any, seen: Pass) -> Answers | None:
    """Fit the outputs of one batch to its loss; None where it has no targets or the outputs cannot be put in."""
    rows = {num_rows(t) for t in seen.targets.values()}
    if not seen.targets or rows != {seen.num_samples} or seen.num_samples < 4 or len(seen.modules) != 1:
        return None
    other = seen.with_targets(batch, lambda t: t.roll(1, 0))
    with bench.set_aside():
        restart(bench.model, bench.optimizer)
        with torch.no_grad(), recorded_calls(bench.model) as calls:
            bench.loss(batch)
        made = [t for _, t in tensors_in(calls[0].output) if _is_free(t, seen.num_samples)]
        free = [t.detach().clone().requires_grad_() for t in made]
        if not free:
            return None
        with _put_in(calls[0].module, free):
            first, turned = bench.losses([batch])[0], bench.losses([other])[0]
            _fit(bench, batch, free)
            return Answers(
                first=first, turned=turned, best=bench.losses([batch])[0], best_turned=bench.losses([other])[0]
            )


def _is_free(tensor: Tensor, size: int) -> bool:
    return tensor.is_floating_point() and tensor.dim() > 0 and num_rows(tensor) == size


def _fit(bench: Workbench, batch: Any, free: list[Tensor]) -> None:
    size = max(float(t.detach().square().mean().sqrt()) for t in free)  # sync: examined
    optimizer = torch.optim.Adam(free, lr=_RATE * max(size, 1.0))
    for _ in range(_STEPS):
        optimizer.zero_grad()
        torch.autograd.backward(bench.loss(batch), inputs=free)
        optimizer.step()


@contextmanager
def _put_in(module: nn.Module, free: list[Tensor]) -> Iterator[None]:
    """The module returns these, whatever it computes."""
    size = num_rows(free[0])

    def replace(_: nn.Module, __: Any, output: Any) -> Any:
        given = iter(free)
        return mapped(output, lambda t: next(given) if _is_free(t, size) else t)

    handle = module.register_forward_hook(replace)
    try:
        yield
    finally:
        handle.remove()
