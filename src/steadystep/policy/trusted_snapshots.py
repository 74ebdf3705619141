"""When the present trouble began, and which snapshots may be trusted: old enough, compared with its first sign."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, final

from steadystep.records import DetectorName, Finding

if TYPE_CHECKING:
    from steadystep.policy.budget import Budget, Limits

_APART_STEPS = 50  # signs further apart than this belong to different troubles


_LONGEST_STEPS = 300  # and so do a first and a last one this far apart: bad batches may come for ever


_CALM_STEPS = 10


_CREEPING = (DetectorName.SLOW_DIVERGENCE, DetectorName.NOT_HEALING, DetectorName.REWARD_COLLAPSE)
"""They say since when; a state from before is worth keeping."""
_AT_ONCE = (DetectorName.NON_FINITE, DetectorName.DAMAGED_STATE)  # they foretell nothing: this is it


@final
class Episode:
    """Signs of trouble that belong together. A state to roll back to must be older than the *first* of them."""

    def __init__(self) -> None:
        self.first_sign: int | None = None
        self._last_sign = 0
        self._suspected: int | None = None
        self._suspected_at = 0
        self._foretold_at: int | None = None

    def note(self, findings: tuple[Finding, ...]) -> None:
        """Take in what was found at one step; a sign is what asks for action."""
        for finding in findings:
            if finding.detector in _CREEPING:
                self._suspected, self._suspected_at = finding.since, finding.step
            if finding.severity != "info" and finding.detector not in _AT_ONCE and math.isfinite(finding.value):
                self._foretold_at = finding.step
        signs = [f for f in findings if f.severity in ("act", "critical")]
        if not signs:
            return
        step = signs[0].step
        self.first_sign = self.began(step, min(step if f.since is None else f.since for f in signs))
        self._last_sign = step

    def began(self, step: int, sign: int) -> int:
        """When a trouble began that shows at `step` and has a sign at `sign`: there, or with the one under way."""
        if self.first_sign is None or step - self._last_sign > _APART_STEPS or step - self.first_sign > _LONGEST_STEPS:
            return sign
        return min(self.first_sign, sign)

    def calm(self, step: int) -> bool:
        """Whether the last sign was a while ago, so that it is worth remembering the present state."""
        return self.first_sign is None or step - self._last_sign > _CALM_STEPS

    @property
    def sudden(self) -> bool:
        """From healthy to NaN with nothing before: no learning rate does that, a failing memory cell does."""
        if self.first_sign is None:
            return False
        return self._foretold_at is None or self.first_sign - self._foretold_at > _APART_STEPS

    def suspected_since(self, step: int) -> int | None:
        """When a suspicion began that may yet turn out to be true: a state from before is worth keeping."""
        return self._suspected if step - self._suspected_at <= _APART_STEPS else None

    def close(self) -> None:
        """The trouble was dealt with."""
        self.first_sign = self._suspected = self._foretold_at = None

    def state_dict(self) -> dict[str, Any]:
        """Return the state, ready for JSON."""
        return {
            "first_sign": self.first_sign,
            "last_sign": self._last_sign,
            "suspected": [self._suspected, self._suspected_at],
            "foretold": self._foretold_at,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        self.first_sign, self._last_sign = state["first_sign"], int(state["last_sign"])
        self._suspected, self._suspected_at = state["suspected"]
        self._foretold_at = state["foretold"]


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
    states: Sequence[_Remembered], *, before: int, step: int, budget: "Budget", limits: "Limits", retreats: bool = True
) -> list[_Remembered]:
    """States that were trusted when the trouble began at `before`, oldest first; after a rollback only older ones.

    Without `retreats` the one that was restored last may be so again.

    The untrained state is one of them only while hardly anything can have been learned.
    """
    young = step < _UNTRAINED
    good = [s for s in states if (s.step >= 0 and s.step + limits.trust_steps <= before) or (s.step < 0 and young)]
    again = budget.last_target(step) if retreats else None
    return good if again is None else [s for s in good if s.step < again] or good[:1]
