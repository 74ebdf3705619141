"""What a loss asks of the outputs: they are changed in place of the weights, with the model left out of it."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn

from steadystep._utils.tree import mapped, tensors_in
from steadystep.examination.parameters import restart
from steadystep.examination.passes import Pass, num_rows, recorded_calls
from steadystep.examination.workbench import Workbench

_STEPS, _RATE = 120, 0.1
_FELL, _FELT, _KEPT = 0.5, 0.01, 0.1  # of the first loss; of it; of what was gained


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
