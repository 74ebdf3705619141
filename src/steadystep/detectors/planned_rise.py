"""Tell a learning rate that follows a plan from one that climbs unannounced."""

import math
from typing import Any, final

_RISE = 1.5
_RESTED = 64  # steps without a rise: a warm-up rises all the time, or by epochs
_FALL = 0.5  # in one step: what follows may be another warm-up
_LEAP = 2.5  # in one step, from rest; less is a decision, such as a warm-up by epochs
_RECENT = 100  # steps since the last rise in which a climb still counts


@final
class PlannedRise:
    """True once when the learning rate has risen 1.5 times from a low, to no more than was known before.

    Known is what it was before that low, and what a scheduler has announced.

    A warm restart makes the loss jump, and that was the plan: loss baselines then begin anew. A learning rate that
    creeps up beyond its old peak gets no such grace.

    >>> rise = PlannedRise()
    >>> [rise.update(lr) for lr in (1.0, 0.1, 0.9, 1.0, 2.0, 4.0)]
    [False, False, True, False, False, False]
    """

    __slots__ = ("_announced", "_before", "_largest", "_last", "_low", "_peak", "_rested")

    def __init__(self) -> None:
        self._low = math.inf
        self._peak = 0.0
        self._largest = 0.0
        self._announced = 0.0
        self._last = 0.0
        self._rested = 0
        self._before = math.inf
        """The largest when the present climb began; infinite in a warm-up, which is measured by nothing."""

    def update(self, lr: float, announced: float = 0.0) -> bool:
        """The learning rate of this step, and the largest one that was announced."""
        if lr == self._last:
            self._rested += 1
            return False
        if lr - lr != 0.0:
            return False
        self._follow(lr)
        if lr < self._low:
            self._low = lr
            self._peak = self._largest
        self._largest = max(self._largest, lr)
        self._announced = announced
        if self._low * _RISE < lr <= max(self._peak, announced) * 1.001:
            self._low = lr
            self._peak = self._largest
            return True
        return False

    def _follow(self, lr: float) -> None:
        """Where a climb begins."""
        last, self._last = self._last, lr
        if lr < last:
            self._rested += 1
            if lr <= _FALL * last:
                self._rested, self._before = 0, math.inf
            return
        if self._rested >= _RESTED:
            decided = _RISE * last < lr <= _LEAP * last
            self._before = math.inf if last <= 0.0 else max(self._largest, lr if decided else 0.0)
        self._rested = 0

    @property
    def climbing(self) -> bool:
        """An unannounced climb from rest, to 1.5 times what was known, is under way or ended within 100 steps.

        A rise from the first steps of a run on, or after a sudden fall, is a warm-up for as long as it lasts.
        """
        return self._rested <= _RECENT and self._largest > _RISE * max(self._before, self._announced)

    def state_dict(self) -> dict[str, Any]:
        """JSON-ready state."""
        low, before = (None if value == math.inf else value for value in (self._low, self._before))
        return {
            "low": low,
            "before": before,
            "rates": [self._peak, self._largest, self._announced, self._last],
            "rested": self._rested,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        self._low, self._before = (math.inf if state[k] is None else float(state[k]) for k in ("low", "before"))
        self._peak, self._largest, self._announced, self._last = (float(rate) for rate in state["rates"])
        self._rested = int(state["rested"])
