"""Runs batches again: under the weights of earlier states, or the micro-batches of one group without the bad ones.

Counterfactuals measure what the judge asks for: the only part of the engine that runs the model for the sake of a
question. Nothing stays changed by it.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor

from steadystep._utils.rng import random_numbers_kept
from steadystep._utils.tensors import layout_of, measure
from steadystep._utils.text import warn
from steadystep.engine.closures import RepeatableClosure
from steadystep.engine.verdict import Ask
from steadystep.errors import MisuseError
from steadystep.optimizers import Trained
from steadystep.parallel import Ranks
from steadystep.precision import Precision
from steadystep.signals import Measurer
from steadystep.signals.gradients import GradientView
from steadystep.snapshots import Snapshot
from steadystep.snapshots.buffers import Buffers
from steadystep.snapshots.recovery import Recovery
from steadystep.snapshots.replay_buffer import RecordedMicroBatch

if TYPE_CHECKING:
    from steadystep.engine.microbatches import MicroBatchRunner
    from steadystep.engine.replay import Rollouts

_SAME = 1e-3  # of a loss: the same batch under the same weights, at any precision


@final
@dataclass(frozen=True, slots=True)
class Counterfactuals:
    """Answers one question after the other."""

    recovery: Recovery
    runner: "MicroBatchRunner"
    measurer: Measurer
    reruns: "BatchReruns"
    rollouts: "Rollouts"

    def measure(self, ask: Ask, view: GradientView) -> Any:
        """The answer to `ask` about the step that `view` shows; None where it cannot be told."""
        recovery = self.recovery
        if ask.what == "weight-norms":
            return self.measurer.with_weights(view.signals)
        if ask.what == "norm-now":
            return math.hypot(*(float(norm) for norm in measure(view.grads, view.layout)))  # sync: only after a spike
        if ask.what in ("states", "finite-states"):
            return (recovery.states if ask.what == "states" else recovery.finite_states()), recovery.lr_mult
        states: list[Any] = list(ask.states)
        if ask.what == "losses":
            return self._at_hand(states, backward=ask.backward)
        if ask.what in ("scores", "pin"):
            return self.rollouts.answer(ask)
        if ask.what == "gradients":
            return self.rollouts.gradient_factor(self.reruns, states, since=ask.count)
        if ask.what == "remembered-losses":
            return self._remembered(states[0], ask.count)
        return self._repeats(states[0])

    def _at_hand(self, states: Sequence[Snapshot], *, backward: bool) -> list[float] | None:
        """Of the last micro-batch; with `backward` a gradient or a buffer that is not finite is an infinite loss."""
        at_hand = self.runner.at_hand
        if not self.reruns.ranks.all(at_hand is not None) or at_hand is None:  # a loop may give it on one rank alone
            return None
        work, batch = at_hand
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
            goes_on = first is not None or self.ranks.size > 1  # the others would wait for this one
            again = self._tried(work, nullcontext(), backward=backward) if goes_on else None
            repeats = first is not None and (first == again or not math.isfinite(first))
            if not self.ranks.all(repeats and again is not None):
                return None
            tried = [first, *(self._tried(work, other, backward=backward) for other in others)]
            known = [loss for loss in tried if loss is not None]
            return self.ranks.mean_loss(known) if self.ranks.all(len(known) == len(tried)) else None
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
                loss = self.ranks.together(work)()
            if backward and not self.ranks.sharded and not (self._has_finite_gradient(loss) and self.buffers.finite):
                return math.inf
            return float(loss.detach())  # sync: only in trouble

    def _has_finite_gradient(self, loss: Tensor) -> bool:
        wanted = [p for p in self.trained.parameters if p.requires_grad]
        grads = [g for g in torch.autograd.grad(loss, wanted, allow_unused=True) if g is not None]
        norms = measure(grads, layout_of(grads))
        return all(math.isfinite(float(norm)) for norm in norms)  # sync: only in trouble


# The same batch with the same random numbers gives the same loss; off the host up to kernels that add in any order.
_SAME_ON_HOST, _SAME_ON_DEVICE = 1e-6, 1e-4


class _NotRepeatableError(Exception):
    """A closure gave another loss when it was run again."""


@final
class GroupReruns:
    """Works on the group that a runner is collecting."""

    def __init__(self, runner: "MicroBatchRunner", device: torch.device, ranks: Ranks) -> None:
        self._runner, self._device, self._ranks = runner, device, ranks

    def refresh(self) -> bool:
        """Compute the gradients again if an interruption spoiled them. False: they could not be."""
        if not self._runner.group.stale:
            return True
        losses = self._losses()
        with random_numbers_kept(self._device):
            try:
                self._run_again(range(len(losses)), losses)
            except _NotRepeatableError:
                return False
        return True

    def compute_again(self, *, without: Sequence[int], finite: Callable[[Sequence[int]], bool]) -> tuple[int, ...]:
        """Gradients of the group without its bad members; returns the positions of those that were kept.

        `finite` looks at the gradients of some positions once they are in place. Members known to be bad (`without`)
        are left out at once. If what remains is still not finite, each member is tried alone. Returns () when nothing
        usable remains or a closure turns out not to repeat.
        """
        losses = self._losses()
        kept: Sequence[int] = [i for i in range(len(self._runner.group.members)) if i not in without]
        try:
            with random_numbers_kept(self._device):
                if without and self._usable(kept, losses, finite):
                    return tuple(kept)
                kept = [i for i in kept if self._usable([i], losses, finite)]
                return tuple(kept) if self._usable(kept, losses, finite) else ()
        except _NotRepeatableError:
            return ()

    def without_bad(
        self, view: GradientView, look: Callable[[Sequence[int]], GradientView]
    ) -> tuple[tuple[int, ...], GradientView]:
        """The group without its bad micro-batches: which are left, and their gradients."""
        seen = [view]

        def finite(kept: Sequence[int]) -> bool:
            seen.append(look(kept))
            return seen[-1].signals.all_finite

        # why no generator: what a closure raises when it is run again reaches the loop as it is, StopIteration too
        kept = self.compute_again(without=view.signals.bad_micro_batches, finite=finite)
        return kept, seen[-1]

    def repeat(self, undo: Callable[[], None]) -> bool:
        """Run the whole group at hand once more, after `undo`; False where it cannot be."""
        works = self._runner.passes()
        if not self._ranks.all(bool(works)):
            return False
        with random_numbers_kept(self._device):
            undo()
            for work in works:
                closure, batch = work.recipe.again()
                self._runner.add(self._ranks.together(closure), batch=batch, weight=work.weight)
        return True

    def undo(self, after: Sequence[int], recipe: RepeatableClosure | None) -> None:
        """As if the present micro-batch had not begun. Gradients of earlier ones are computed again."""
        if not after:
            self._runner.drop_traces()
        elif not self._runner.group.repeatable:
            raise MisuseError(
                "out of memory, and earlier micro-batches of this update cannot be recomputed: pass all of them as "
                "closures with batch="
            )
        else:
            try:
                self._run_again(after, self._losses())
            except _NotRepeatableError:
                raise MisuseError(
                    "out of memory, and re-running an earlier micro-batch of this update gave a different loss"
                ) from None
        if recipe is not None:
            recipe.rng.restore()

    def _usable(
        self, positions: Sequence[int], losses: Sequence[float], finite: Callable[[Sequence[int]], bool]
    ) -> bool:
        if not self._runner.group.total(positions) > 0:
            return False
        self._runner.group.shared_by = len(positions)
        self._run_again(positions, losses)
        return finite(positions)

    def _run_again(self, positions: Sequence[int], losses: Sequence[float]) -> None:
        self._runner.drop_traces()
        seen = []
        for number, i in enumerate(positions):
            member = self._runner.group.members[i]
            assert member.recipe is not None
            work, batch = member.recipe.again()
            loss = self._runner.run(work, batch, member.weight, member.recipe, after=positions[:number])
            seen.append(loss.detach().reshape(()))
        self._runner.group.stale = False
        tolerance = _SAME_ON_HOST if self._device.type == "cpu" else _SAME_ON_DEVICE
        values = torch.stack(seen).tolist()  # sync: only after trouble
        same = all(_same(value, losses[i], tolerance) for i, value in zip(positions, values, strict=True))
        if not self._ranks.all(same):
            warn(
                "re-running a closure gave a different loss, so this whole group of micro-batches is dropped. To "
                "make it repeatable, pass the data as step(closure, batch=...) and keep iterators and other side "
                "effects out of the closure."
            )
            raise _NotRepeatableError

    def _losses(self) -> list[float]:
        """Of this rank's own micro-batches."""
        losses = torch.stack([m.loss for m in self._runner.group.members])
        found: list[float] = losses.tolist()  # sync: only after trouble
        return found


def _same(value: float, expected: float, tolerance: float) -> bool:
    if not math.isfinite(expected):
        return not math.isfinite(value)
    return abs(value - expected) <= tolerance * abs(expected)
