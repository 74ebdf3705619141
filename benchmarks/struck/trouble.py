"""Seven faults, once each in a run, and the watcher that sees them."""

import logging
import math
from typing import final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import steadystep
from steadystep.watching import Watcher

FAULTS = ("NaN gradient", "gradient x1e4", "LR x100", "exponent bit", "NaN sample", "garbage labels", "zeroed layer")
_LASTS = {"LR x100": 20, "garbage labels": 10}


@final
class Trouble:
    """A fault at one step (some last longer), in a loop that is watched or not."""

    def __init__(self, fault: str | None, *, at: int, seed: int, watched: bool) -> None:
        self._fault, self._at, self._watched = fault, at, watched
        self._rng = torch.Generator().manual_seed(7919 * seed + 1)
        self.watcher: Watcher | None = None
        self.acts: list[tuple[int, tuple[str, ...], int]] = []
        self._asked: list[float] = []

    def begin(self, model: nn.Module, optimizer: Optimizer) -> None:
        """The one line."""
        self._model = model
        if self._watched:
            logging.getLogger("steadystep").setLevel(logging.CRITICAL)
            self.watcher = steadystep.watch(model, optimizer)

    def batch(self, step: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Labels of other samples, or one sample that holds NaN."""
        if self._strikes("garbage labels", step):
            y = y[torch.randperm(len(y), generator=self._rng)] if y.ndim == 1 else y.flip(0).roll(1, 1)
        if self._strikes("NaN sample", step) and x.is_floating_point():
            x = x.clone()
            x[0] = math.nan
        return x, y

    def loss(self, step: int, loss: Tensor) -> Tensor:
        """Token ids cannot be NaN: there the sample's loss is."""
        if self._strikes("NaN sample", step) and bool(loss.isfinite()):
            return loss * math.nan
        return loss

    def gradients(self, step: int) -> None:
        """Between backward and clipping."""
        grads = [p.grad for p in self._model.parameters() if p.grad is not None]
        if self._strikes("NaN gradient", step):
            grads[len(grads) // 2].view(-1)[0] = math.nan
        if self._strikes("gradient x1e4", step):
            torch._foreach_mul_(grads, 1e4)

    def rate(self, step: int, optimizer: Optimizer) -> None:
        """Before a step: the learning rate, and what happens to weights between two of them."""
        self._note()
        weights = [p for p in self._model.parameters() if p.ndim > 1]
        if self._asked:  # a scheduler may have moved it meanwhile
            for group in optimizer.param_groups:
                group["lr"] = group["lr"] / 100.0 if group["lr"] > 10 * self._asked[0] else group["lr"]
            self._asked = []
        if self._strikes("LR x100", step):
            self._asked = [group["lr"] for group in optimizer.param_groups]
            for group in optimizer.param_groups:
                group["lr"] = group["lr"] * 100.0
        with torch.no_grad():
            if self._strikes("zeroed layer", step):
                weights[len(weights) // 2].zero_()
            if self._strikes("exponent bit", step):
                flat = weights[len(weights) // 2].view(-1).view(torch.int32)
                flat[int(torch.randint(len(flat), (), generator=self._rng))] ^= 1 << 30

    def close(self) -> None:
        """Take the watcher out."""
        self._note()
        if self.watcher is not None:
            self.watcher.remove()

    def _note(self) -> None:
        outcome = None if self.watcher is None else self.watcher.outcome
        if outcome is not None and outcome.plan.actions and (not self.acts or self.acts[-1][0] != outcome.step):
            self.acts.append((outcome.step, outcome.plan.actions, outcome.replayed))

    def _strikes(self, fault: str, step: int) -> bool:
        return fault == self._fault and self._at <= step < self._at + _LASTS.get(fault, 1)
