"""The arithmetic of one update over several micro-batches.

With weights w_i (token counts; 1 without) the update is the gradient of sum(w_i * loss_i) / sum(w_i). The sum of
weights is known only at the end, so each backward pass uses factor_i = w_i / (w_0 * N) and the gradients are corrected
once, by N * w_0 / sum(w_i). For equal weights and a full group the correction is exactly 1 and factor_i is a plain
division by N: the arithmetic of the loop everybody writes, bit for bit.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

from torch import Tensor

from steadystep.accumulation.recipe import Recipe
from steadystep.errors import MisuseError


@final
@dataclass(slots=True, kw_only=True)
class MicroBatch:
    """One call of `step` inside a group."""

    loss: Tensor
    """Detached; its value is read with everything else at the end of the group."""
    weight: float = 1.0
    recipe: Recipe | None = None
    batch: Any = None


@final
class Group:
    """The micro-batches of the update that is being collected."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.members: list[MicroBatch] = []
        self.repeatable = False
        """Every member can be run again."""
        self.stale = False
        """An interrupted pass left the gradients unusable: they must be computed again."""
        self._first_weight: float | None = None
        self._weighted: bool | None = None

    @property
    def full(self) -> bool:
        """Time for the update."""
        return len(self.members) >= self.size

    def add(self, member: MicroBatch) -> None:
        """One more."""
        self.repeatable = member.recipe is not None and (self.repeatable or not self.members)
        self.members.append(member)

    def clear(self) -> None:
        """Start the next update."""
        self.members = []
        self.repeatable = self.stale = False
        self._first_weight = self._weighted = None

    def check_weight(self, weight: float | None) -> float:
        """The weight as a number; weights for some micro-batches and not for others have no meaning."""
        weighted = weight is not None
        if self._weighted not in (None, weighted):
            raise MisuseError("weight= was given for some micro-batches of one update and not for others")
        value = 1.0 if weight is None else float(weight)
        if not (math.isfinite(value) and value >= 0):
            raise MisuseError(f"weight = {weight!r}: must be a finite number of at least 0 (a count of tokens, say)")
        self._weighted = weighted
        if self._first_weight is None and value > 0:
            self._first_weight = value
        return value

    def scaled(self, loss: Tensor, weight: float) -> Tensor:
        """The loss as it goes into backward."""
        if weight == self._first_weight:
            return loss if self.size == 1 else loss / self.size
        assert self._first_weight is not None
        return loss * (weight / self._first_weight / self.size)

    def correction(self, kept: Sequence[int]) -> float:
        """The factor that turns the collected gradients into those of the weighted mean over `kept`."""
        if not self._weighted and len(kept) == self.size:
            return 1.0
        total = sum(self.members[i].weight for i in kept)
        return self.size * self._first_weight / total if self._first_weight and total else 1.0
