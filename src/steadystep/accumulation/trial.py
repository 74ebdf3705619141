"""One micro-batch once more, to see what it would have been under other weights."""

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, device
from torch.nn import Parameter

from steadystep.accumulation.recipe import Closure
from steadystep.buffers import Buffers
from steadystep.dist import Ranks
from steadystep.norms import layout_of, measure
from steadystep.precision import Precision
from steadystep.rng import random_numbers_kept


@final
@dataclass(frozen=True, slots=True)
class Trial:
    """The closure and what has to be put back after each time it is run."""

    work: Closure
    batch: Any
    precision: Precision
    buffers: Buffers
    parameters: Sequence[Parameter]
    device: device
    ranks: Ranks

    def losses(self, others: Sequence[AbstractContextManager[None]], *, backward: bool) -> list[float] | None:
        """As things are, then inside each of `others`; None when it cannot be told.

        In a distributed run all ranks try equally often, and the losses are means over them.
        """
        grads = [p.grad for p in self.parameters]
        try:
            first = self._tried(nullcontext(), backward=backward)
            # why: where parameters are spread over ranks, the others would wait for this one
            goes_on = first is not None or self.ranks.sharded
            again = self._tried(nullcontext(), backward=backward) if goes_on else None
            repeats = first is not None and (first == again or not math.isfinite(first))
            if not self.ranks.all(repeats and again is not None):
                return None
            tried = [first, *(self._tried(other, backward=backward) for other in others)]
            known = [loss for loss in tried if loss is not None]
            return self.ranks.mean(known) if self.ranks.all(len(known) == len(tried)) else None
        finally:
            for parameter, grad in zip(self.parameters, grads, strict=True):
                parameter.grad = grad

    def _tried(self, where: AbstractContextManager[None], *, backward: bool) -> float | None:
        try:
            return self._loss(where, backward=backward)
        except Exception:  # the user's code, run at a time they did not expect: whatever it raises means "cannot be"
            return None

    def _loss(self, where: AbstractContextManager[None], *, backward: bool) -> float:
        for parameter in self.parameters:
            parameter.grad = None  # out of reach of a closure that clears gradients
        with self.buffers.untouched(), random_numbers_kept(self.device), where, self.ranks.quiet():
            self.buffers.put_back()
            with self.precision.autocast():
                loss = self.work() if self.batch is None else self.work(self.batch)
            if backward and not self.ranks.sharded and not (self._has_finite_gradient(loss) and self.buffers.finite):
                return math.inf
            return float(loss.detach())  # sync: only in trouble

    def _has_finite_gradient(self, loss: Tensor) -> bool:
        wanted = [p for p in self.parameters if p.requires_grad]
        grads = [g for g in torch.autograd.grad(loss, wanted, allow_unused=True) if g is not None]
        norms = measure(grads, layout_of(grads))
        return all(math.isfinite(float(norm)) for norm in norms)  # sync: only in trouble
