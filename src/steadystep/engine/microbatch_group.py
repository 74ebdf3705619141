"""The arithmetic of one update over several micro-batches.

With weights w_i (token counts; 1 without) the update is the gradient of sum(w_i * loss_i) / sum(w_i). The sum of
weights is known only at the end, so each backward pass uses factor_i = w_i / (r * N) and the gradients are corrected
once, by N * r / sum(w_i). The reference r is the largest weight seen before, so that scaled fp16 losses stay in range.
For equal weights and a full group the correction is exactly 1 and factor_i is a plain division by N: the arithmetic of
the loop everybody writes, bit for bit. A group that is run again without some of its members is divided by how many are
left (`shared_by`), so that it has the bits of a group that never had the others.

Several ranks share r and the correction: their gradients have been averaged, so sum(w_i) is a mean over ranks too.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

from torch import Tensor

from steadystep.engine.arguments import number
from steadystep.engine.closures import RepeatableClosure
from steadystep.errors import MisuseError


@final
@dataclass(slots=True, kw_only=True)
class MicroBatch:
    """One call of `step` inside a group."""

    loss: Tensor
    """Detached; its value is read with everything else at the end of the group."""
    weight: float = 1.0
    recipe: RepeatableClosure | None = None
    batch: Any = None


@final
class Group:
    """The micro-batches of the update that is being collected."""

    def __init__(self, size: int, mean: Callable[[Sequence[float]], list[float]] = list) -> None:
        self.size = self.shared_by = size
        self._mean = mean
        """Of numbers over all ranks."""
        self.members: list[MicroBatch] = []
        self.repeatable = False
        """Every member can be run again."""
        self.stale = False
        """An interrupted pass left the gradients unusable: they must be computed again."""
        self.largest_weight = 0.0
        self._reference = 1.0
        self._weighted: bool | None = None

    @property
    def full(self) -> bool:
        """Time for the update."""
        return len(self.members) >= self.size

    @property
    def weighted(self) -> bool:
        """Whether weights were given."""
        return bool(self._weighted)

    def add(self, member: MicroBatch) -> None:
        """One more."""
        self.repeatable = member.recipe is not None and (self.repeatable or not self.members)
        self.members.append(member)

    def clear(self) -> None:
        """Start the next update."""
        self.members = []
        self.repeatable = self.stale = False
        self._weighted = None
        self.shared_by = self.size

    def weight_of(self, weight: float | None) -> float | None:
        """The weight as a number; changes nothing. Some micro-batches with one and some without have no meaning."""
        if self._weighted is not None and self._weighted != (weight is not None):
            raise MisuseError(
                "weight= was given for some micro-batches of one update and not for others: give it for all or none"
            )
        if weight is None:
            return None
        value = number("weight", weight)
        if not (math.isfinite(value) and value >= 0):
            raise MisuseError(f"weight = {weight!r}: must be a finite number of at least 0 (a count of tokens, say)")
        return value

    def check_weight(self, weight: float | None) -> float:
        """The weight as a number, from now on one of this group."""
        value = self.weight_of(weight)
        if value is None:
            if self._weighted is None:
                self._weighted, self._reference = False, 1.0
            return 1.0
        if self._weighted is None:
            (self._reference,) = self._mean([self.largest_weight or value or 1.0])
        self._weighted = True
        self.largest_weight = max(self.largest_weight, value)
        return value

    def scaled(self, loss: Tensor, weight: float) -> Tensor:
        """The loss as it goes into backward."""
        if weight == self._reference:
            return loss if self.shared_by == 1 else loss / self.shared_by
        return loss * (weight / self._reference / self.shared_by)

    def correction(self, kept: Sequence[int]) -> float:
        """The factor that turns the collected gradients into those of the weighted mean over `kept`."""
        if not self._weighted and len(kept) == self.shared_by:
            return 1.0
        total = self.total(kept)
        return self.shared_by * self._reference / total if total else 1.0

    def state_dict(self) -> dict[str, Any]:
        """JSON-ready state; it decides how later losses are scaled before they are added up."""
        return {"largest_weight": self.largest_weight}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        self.largest_weight = float(state["largest_weight"])

    def total(self, kept: Sequence[int]) -> float:
        """What these members count together, as a mean over ranks; zero: there is nothing to learn from."""
        own = sum(self.members[i].weight for i in kept)
        if not self._weighted:
            return own
        # why both: the largest is saved by one rank only, so it has to be the same on all when a group is over
        total, self.largest_weight = self._mean([own, self.largest_weight])
        return total
