"""Measures what the judge asks for: the norms of weights, and batches under the weights of earlier states.

The only part of the engine that runs the model for the sake of a question. Nothing stays changed by it.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from steadystep._utils.rng import random_numbers_kept
from steadystep._utils.tensors import layout_of, measure
from steadystep.engine.microbatches import MicroBatchRunner
from steadystep.engine.verdict import Ask
from steadystep.optimizers import Trained
from steadystep.parallel import Ranks
from steadystep.precision import Precision
from steadystep.signals import Measurer
from steadystep.signals.gradients import GradientView
from steadystep.snapshots.buffers import Buffers
from steadystep.snapshots.recovery import Recovery
from steadystep.snapshots.replay_buffer import RecordedMicroBatch
from steadystep.snapshots.snapshots import Snapshot

_SAME = 1e-3  # of a loss: the same batch under the same weights, at any precision


@final
@dataclass(frozen=True, slots=True)
class Counterfactuals:
    """Answers one question after the other."""

    recovery: Recovery
    runner: MicroBatchRunner
    measurer: Measurer
    reruns: "BatchReruns"

    def measure(self, ask: Ask, view: GradientView) -> Any:
        """The answer to `ask` about the step that `view` shows; None where it cannot be told."""
        recovery = self.recovery
        if ask.what == "weight-norms":
            return self.measurer.with_weights(view.signals)
        if ask.what == "norm-now":
            return math.hypot(*(float(norm) for norm in measure(view.grads, view.layout)))  # sync: only after a spike
        if ask.what == "states":
            return recovery.states, recovery.lr_mult
        if ask.what == "finite-states":
            return recovery.finite_states(), recovery.lr_mult
        states: list[Any] = list(ask.states)
        if ask.what == "losses":
            return self._at_hand(states, backward=ask.backward)
        if ask.what == "remembered-losses":
            return self._remembered(states[0], ask.count)
        assert ask.what == "repeats", ask
        return self._repeats(states[0])

    def _at_hand(self, states: Sequence[Snapshot], *, backward: bool) -> list[float] | None:
        """Of the last micro-batch; with `backward` a gradient or a buffer that is not finite is an infinite loss."""
        if self.runner.at_hand is None:
            return None
        work, batch = self.runner.at_hand
        old = [self.recovery.weights_of(state) for state in states]
        return self.reruns.losses(lambda: work() if batch is None else work(batch), old, backward=backward)

    def _of(self, work: RecordedMicroBatch, state: Snapshot) -> tuple[float, float] | None:
        """The old and the current loss of a remembered micro-batch."""

        def again() -> Tensor:
            closure, batch = work.recipe.again()
            loss: Tensor = closure() if batch is None else closure(batch)
            return loss

        losses = self.reruns.losses(again, [self.recovery.weights_of(state)], backward=False)
        return None if losses is None else (losses[1], losses[0])

    def _remembered(self, state: Snapshot, count: int) -> list[tuple[float, float]]:
        """The newest remembered batches. The present weights have learned from them, so a doubt is in their favour."""
        first = [done.micro_batches[0] for done in self.recovery.missed(state.updates)[-count:]]
        tried = [self._of(work, state) for work in first]
        return [losses for losses in tried if losses is not None]

    def _repeats(self, state: Snapshot) -> bool | None:
        """Another loss than then means another target network, adversary or environment."""
        missed = self.recovery.missed(state.updates)
        if not missed:
            return None
        first = missed[0]
        old = first.signals.losses[0] if first.signals.losses else first.signals.loss
        losses = self._of(first.micro_batches[0], state)
        return losses is not None and math.isclose(losses[0], old, rel_tol=_SAME, abs_tol=1e-9)


@final
@dataclass(frozen=True, slots=True)
class BatchReruns:
    """Runs a closure again under other weights, and puts back what each run changes."""

    precision: Precision
    buffers: Buffers
    trained: Trained
    device: torch.device
    ranks: Ranks

    def losses(
        self,
        work: Callable[[], Tensor],
        others: Sequence[AbstractContextManager[None]],
        *,
        backward: bool,
    ) -> list[float] | None:
        """As things are, then inside each of `others`; None when it cannot be told.

        In a distributed run all ranks try equally often, and the losses are means over them.
        """
        grads = [p.grad for p in self.trained.parameters]
        try:
            first = self._tried(work, nullcontext(), backward=backward)
            # why: where parameters are spread over ranks, the others would wait for this one
            goes_on = first is not None or self.ranks.sharded
            again = self._tried(work, nullcontext(), backward=backward) if goes_on else None
            repeats = first is not None and (first == again or not math.isfinite(first))
            if not self.ranks.all(repeats and again is not None):
                return None
            tried = [first, *(self._tried(work, other, backward=backward) for other in others)]
            known = [loss for loss in tried if loss is not None]
            return self.ranks.mean(known) if self.ranks.all(len(known) == len(tried)) else None
        finally:
            for parameter, grad in zip(self.trained.parameters, grads, strict=True):
                parameter.grad = grad

    def _tried(
        self, work: Callable[[], Tensor], where: AbstractContextManager[None], *, backward: bool
    ) -> float | None:
        try:
            return self._loss(work, where, backward=backward)
        except Exception:  # the user's code, run at a time they did not expect: whatever it raises means "cannot be"
            return None

    def _loss(self, work: Callable[[], Tensor], where: AbstractContextManager[None], *, backward: bool) -> float:
        for parameter in self.trained.parameters:
            parameter.grad = None  # out of reach of a closure that clears gradients
        with self.buffers.untouched(), random_numbers_kept(self.device), where, self.ranks.no_sync():
            self.buffers.put_back()
            with self.precision.autocast():
                loss = work()
            if backward and not self.ranks.sharded and not (self._has_finite_gradient(loss) and self.buffers.finite):
                return math.inf
            return float(loss.detach())  # sync: only in trouble

    def _has_finite_gradient(self, loss: Tensor) -> bool:
        wanted = [p for p in self.trained.parameters if p.requires_grad]
        grads = [g for g in torch.autograd.grad(loss, wanted, allow_unused=True) if g is not None]
        norms = measure(grads, layout_of(grads))
        return all(math.isfinite(float(norm)) for norm in norms)  # sync: only in trouble
