"""Runs the micro-batches of one group again: after an interruption, out of memory, or without the bad ones."""

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, final

import torch

from steadystep._utils.rng import random_numbers_kept
from steadystep._utils.text import warn
from steadystep.engine.closures import RepeatableClosure
from steadystep.errors import MisuseError
from steadystep.parallel import Ranks

if TYPE_CHECKING:
    from steadystep.engine.microbatches import MicroBatchRunner

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
        losses: list[float] = torch.stack(
            [m.loss for m in self._runner.group.members]
        ).tolist()  # sync: only after trouble
        return losses


def _same(value: float, expected: float, tolerance: float) -> bool:
    if not math.isfinite(expected):
        return not math.isfinite(value)
    return abs(value - expected) <= tolerance * abs(expected)
