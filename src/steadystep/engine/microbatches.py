"""Forward and backward passes of one group of micro-batches: the first time, and again without the bad ones."""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, Literal, final

import torch
from torch import Tensor
from torch.optim import Optimizer

from steadystep._utils.rng import RngState, random_numbers_kept
from steadystep._utils.tensors import layout_of, local_part
from steadystep._utils.text import warn
from steadystep.clip.global_norm import multiply_
from steadystep.engine.closures import BatchClosure, Closure, RankShortage, RepeatableClosure
from steadystep.engine.microbatch_group import Draws, Group, MicroBatch, OnlyTheLoss, called, checked_loss, refuse_loss
from steadystep.engine.reruns import GroupReruns
from steadystep.errors import MisuseError
from steadystep.memory.retry import OutOfMemoryRetry, is_out_of_memory, weighted_mean
from steadystep.optimizers import Trained
from steadystep.parallel import Ranks, SingleProcess
from steadystep.precision import Precision
from steadystep.snapshots.buffers import Buffers
from steadystep.snapshots.replay_buffer import RecordedMicroBatch

_TWICE = "backward through the graph a second time"  # as torch says it
_NOTHING = nullcontext()


@final
class MicroBatchRunner:
    """Collects gradients for one update. Touches gradients, buffers and random state, never weights.

    idle → collecting (inside `add`) → collected → … → idle again by `close`. Used as a context around each call of the
    guard: an exception while collecting costs only the micro-batch it happened in, any later one the whole group.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        precision: Precision,
        buffers: Buffers,
        trained: Trained,
        *,
        size: int,
        device: torch.device,
        retry: bool,
        memory: OutOfMemoryRetry | None = None,
        draws: Draws | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        self._ranks = ranks or SingleProcess()
        self.group = Group(size, self._ranks.mean)
        self._optimizer, self._precision, self._buffers, self._trained = optimizer, precision, buffers, trained
        self.reruns = GroupReruns(self, device, self._ranks)
        self._only_loss = OnlyTheLoss(optimizer, trained, backward=self._ranks.stages is not None)
        self._device, self._draws = device, draws
        several = memory is not None and self._ranks.stand_in is not None
        self._memory, self._shortage = None if several else memory, RankShortage.of(memory, self._ranks, device)
        # A group of one has nothing to leave out, so nothing is kept for it.
        self._keep_recipes = retry and size > 1
        self._state: Literal["idle", "collecting", "collected"] = "idle"
        self.busy = self._warned = False
        """Inside a call of the guard."""
        self._unreduced = False
        """The gradients of this rank have not been averaged with those of the others."""
        self.at_hand: tuple[Closure, Any] | None = None
        """The closure and batch of the last micro-batch, where it can be run again."""
        self._batch: Any = None
        self._rng: RngState | None = None
        self.failed_collecting = False
        """The last call ended with an exception of the closure, before anything was decided."""
        self._offered: tuple[RecordedMicroBatch, ...] = ()
        self.given_losses = False
        """The loop computes its losses itself."""
        self.began_clear = False
        """The gradients of the last update were gone when this group began."""

    def __enter__(self) -> None:
        if self.busy:
            raise MisuseError("step() was called inside step(): the closure may only compute the loss")
        self.busy = True

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.busy = False
        self.failed_collecting = kind is not None and self._state == "collecting"
        if kind is not None and self._state != "idle":
            self.drop_traces()
            if self._state == "collecting" and self._rng is not None:
                self._rng.restore()  # the same micro-batch, given rightly, draws what it would have drawn
            if self._state == "collecting" and self.group.repeatable:
                self.group.stale = True
                self._state = "collected"
            else:
                self.close()

    def add(self, work: Closure | Tensor, *, batch: Any, weight: float | None) -> MicroBatch:
        """Run one micro-batch into the group."""
        if self._ranks.stages is not None:
            refuse_loss(work, weight)
        number = self.group.check_weight(weight)
        first = not self.group.members
        self._rng = None
        # why: a loop of two models leaves gradients of one in the other; a plain loop clears them before backward
        if first:
            for parameter in self._trained.parameters:
                if parameter.grad is not None:
                    self._optimizer.zero_grad()
                    self.began_clear = False
                    break
            else:
                self.began_clear = True
        self._state = "collecting"
        recipe = None
        if isinstance(work, Tensor):
            self._warn_about_autocast()
            self.given_losses = True
            self._unreduced = False
            loss = checked_loss(work)
            self._backward(loss, number)
        else:
            self.given_losses = False
            if first and self._buffers.modules:
                self._buffers.remember()
            self._rng = None if self._draws is None else self._draws.before()
            if self._keep_recipes:
                recipe = RepeatableClosure(work, batch, self._rng or RngState(self._device))
            self.at_hand = (work, batch)
            loss = self.run(work, batch, number, recipe, after=range(len(self.group.members)))
            if self._draws is not None and self._draws.looked_at is not None:
                self._draws.after()
        seen = loss.detach()
        member = MicroBatch(loss=seen.reshape(()) if seen.dim() else seen, weight=number, recipe=recipe, batch=batch)
        self.group.add(member)
        self._state = "collected"
        return member

    def close(self) -> None:
        """The fate of this update is sealed; the next call of `add` starts another."""
        if self._draws is not None and self._draws.looked_at is not None:
            self._draws.after(last=True)
        if self._buffers.modules:
            self._buffers.remember()  # a loss given as a tensor is computed before we are called again
        self.at_hand = self._batch = None
        self._offered = ()
        self.group.clear()
        self._state = "idle"

    def micro_batches(self) -> tuple[RecordedMicroBatch, ...]:
        """What it takes to replay this update, later; nothing if a micro-batch came without `batch=`."""
        members, weighted = self.group.members, self.group.weighted
        if self._offered:
            return self._offered
        if self.at_hand is None or any(member.batch is None for member in members):
            return ()
        closure = self.at_hand[0]
        return tuple(
            RecordedMicroBatch(
                member.recipe or BatchClosure(closure, member.batch, self._rng), member.weight if weighted else None
            )
            for member in members
        )

    def passes(self) -> tuple[RecordedMicroBatch, ...]:
        """What it takes to run the group at hand once more, now; nothing for losses that were given."""
        members, weighted = self.group.members, self.group.weighted
        if self._offered or self.given_losses or self.at_hand is None:
            return ()
        closure = self.at_hand[0]
        recipes = [member.recipe or BatchClosure(closure, member.batch, self._rng) for member in members]
        if len(members) > 1 and any(member.recipe is None for member in members):
            return ()
        weights = [member.weight if weighted else None for member in members]
        return tuple(map(RecordedMicroBatch, recipes, weights))

    def reset(self) -> int:
        """Forget an open group and its gradients; returns how many micro-batches it had."""
        dropped = len(self.group.members)
        if self._state != "idle":
            self.drop_traces()
        self.close()
        return dropped

    def finish(self, kept: Sequence[int]) -> None:
        """Turn what was collected into the gradients of the weighted mean over `kept`."""
        if self._unreduced:
            self._unreduced = False
            self._ranks.average_(self._trained.parameters)
        if self._precision.scales:
            self._precision.unscale_(self._optimizer)
        correction = self.group.correction(kept)
        if correction != 1.0:
            grads = [p.grad for p in self._trained.parameters if p.grad is not None]
            if self._ranks.sharded:
                grads = [local_part(grad) for grad in grads]
            multiply_(grads, layout_of(grads), correction)

    def present(self, work: Closure | None, batch: Any, rng: RngState | None = None) -> None:
        """The micro-batch at hand of a loop that runs its passes itself; without `work` it cannot be run again."""
        self.at_hand = None if work is None else (work, batch)
        self._rng, self._batch = rng, batch

    def offer(self, micro_batches: tuple[RecordedMicroBatch, ...]) -> None:
        """What it takes to replay the update at hand, of a loop that runs its passes itself."""
        self._offered = micro_batches

    def suspect(self, bad: Sequence[int]) -> tuple[Closure | None, Any, RngState | None]:
        """A micro-batch to look at again: the first bad one that can be run again, else the last one."""
        recipes = [self.group.members[i].recipe for i in bad if i < len(self.group.members)]
        recipe = next((recipe for recipe in recipes if recipe is not None), None)
        if recipe is not None:
            return (*recipe.bound(), recipe.rng)
        if self.at_hand is not None:
            return (*self.at_hand, self._rng)
        return None, self.group.members[-1].batch if self.group.members else self._batch, None

    def run(
        self, work: Closure, batch: Any, weight: float, recipe: RepeatableClosure | None, *, after: Sequence[int]
    ) -> Tensor:
        """Forward and backward of one micro-batch; in parts once memory has not sufficed for a whole one.

        `after`: the members whose gradients are there already and must stay.
        """
        memory = self._memory
        self._unreduced = self._ranks.adds_up and len(after) + 1 < self.group.shared_by
        if (shortage := self._shortage) is not None:
            return shortage.attempt(
                lambda part, share: self._pass(work, part, weight * share), batch, unreduced=self._unreduced
            )
        if memory is None or memory.size is None or batch is None:
            try:
                with self._ranks.unreduced() if self._unreduced else _NOTHING:
                    return self._pass(work, batch, weight)
            except (RuntimeError, MemoryError) as error:
                if memory is None or not is_out_of_memory(error):
                    raise
                if batch is None:
                    error.add_note("steadystep: with step(closure, batch=...) the batch would now be split")
                    raise
            self.reruns.undo(after, recipe)  # out here, where the error and what its frames held are gone
        return weighted_mean(
            memory.run(
                lambda part, share: self._pass(work, part, weight * share).detach(),
                batch,
                undo=lambda: self.reruns.undo(after, recipe),
            )
        )

    def _pass(self, work: Closure, batch: Any, weight: float) -> Tensor:
        stages = self._ranks.stages
        with self._precision.autocast() if self._precision.casts else _NOTHING, self._only_loss:
            if stages is not None:  # its schedule has run backward
                return stages.loss(called(work, batch))
            loss = checked_loss(called(work, batch))
        self._backward(loss, weight)
        return loss

    def in_parts(self, kept: Sequence[int], *, step: int) -> bool:
        """Compute these micro-batches again, on all ranks, where one of them ran out of memory; else return False."""
        shortage = self._shortage
        if shortage is None or not shortage.seen():
            return False
        works = self.passes()
        shortage.split([self.group.members[i].batch for i in kept] if works else [None], step=step)
        with random_numbers_kept(self._device):
            self.drop_traces()
            for number, i in enumerate(kept):
                member, (closure, batch) = self.group.members[i], works[i].recipe.again()
                loss = self.run(closure, batch, member.weight, member.recipe, after=kept[:number])
                member.loss = loss.detach().reshape(())
        return True

    def drop_traces(self) -> None:
        """Clear the gradients and put the buffers back: no pass of this group has left anything."""
        self._precision.refuse(overflow=False)
        self._optimizer.zero_grad()
        self._buffers.put_back()

    def _backward(self, loss: Tensor, weight: float) -> None:
        if weight > 0 or self._ranks.size > 1:  # the other ranks wait for this one's backward pass
            try:
                self._precision.backward(self.group.scaled(loss, weight))
            except RuntimeError as error:
                if _TWICE not in str(error):
                    raise
                raise MisuseError(
                    "backward was already called on this loss: pass the loss only; the guard calls backward"
                ) from error

    def _warn_about_autocast(self) -> None:
        if self._precision.casts and not self._warned:
            self._warned = True
            warn(
                f"mixed_precision is {self._precision.setting}, but a loss given as a tensor was computed before "
                "the guard could autocast. Pass a closure, or autocast your forward pass yourself and set "
                "training.autocast: false."
            )
