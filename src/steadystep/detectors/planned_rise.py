"""Telling a learning rate that comes back from one that climbs to where it has never been."""

from typing import Any, final

_RISE = 1.5


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

    __slots__ = ("_announced", "_largest", "_low", "_peak")

    def __init__(self) -> None:
        self._low = float("inf")
        self._peak = 0.0
        self._largest = 0.0
        self._announced = 0.0

    def update(self, lr: float, announced: float = 0.0) -> bool:
        """The learning rate of this step, and the largest one that was announced."""
        if lr == self._low or lr - lr != 0.0:
            return False
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

    @property
    def climbing(self) -> bool:
        """The learning rate has risen 1.5 times and lies beyond its old peak."""
        return self._largest > _RISE * max(self._low, self._peak, self._announced)

    def state_dict(self) -> dict[str, Any]:
        """JSON-ready state."""
        low = self._low if self._low != float("inf") else None
        return {"low": low, "peak": self._peak, "largest": self._largest, "announced": self._announced}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        self._low = float("inf") if state["low"] is None else float(state["low"])
        self._peak, self._largest, self._announced = (float(state[k]) for k in ("peak", "largest", "announced"))
