"""Which snapshots may be trusted: old enough, compared with the first sign of trouble, to be free of it."""

from collections.abc import Sequence
from typing import Protocol, TypeVar

from steadystep.policy.budget import Budget, Limits

_UNTRAINED = 64  # updates: after so many, the state from before the first one is nothing to roll back to


class TrustedSnapshot(Protocol):
    """A state that a rollback could restore."""

    @property
    def step(self) -> int:
        """The step after which it was taken."""
        ...

    @property
    def lr(self) -> float:
        """The learning rate that was in use."""
        ...

    @property
    def second_moment(self) -> float | None:
        """Adam's v, added up; None when that is not known."""
        ...


_Remembered = TypeVar("_Remembered", bound=TrustedSnapshot)


def restorable(
    states: Sequence[_Remembered], *, before: int, step: int, budget: Budget, limits: Limits, retreats: bool = True
) -> list[_Remembered]:
    """States that were trusted when the trouble began at `before`, oldest first; after a rollback only older ones.

    Without `retreats` the one that was restored last may be so again.

    The untrained state is one of them only while hardly anything can have been learned.
    """
    young = step < _UNTRAINED
    good = [s for s in states if (s.step >= 0 and s.step + limits.trust_steps <= before) or (s.step < 0 and young)]
    again = budget.last_target(step) if retreats else None
    return good if again is None else [s for s in good if s.step < again] or good[:1]
