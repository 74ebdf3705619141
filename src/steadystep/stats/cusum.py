"""One-sided cumulative sum (Page 1954): small shifts that no single value shows."""

from typing import Any, final


@final
class Cusum:
    """S = max(0, S + min(z, cap) - slack). `since` is how many values ago S last was zero: where the shift began.

    The cap keeps one wild value from raising the alarm alone.

    >>> sum_ = Cusum(slack=0.5, cap=4.0)
    >>> [sum_.add(z) for z in (0.0, 2.0, 2.0, 100.0, -9.0)]
    [0.0, 1.5, 3.0, 6.5, 0.0]
    """

    __slots__ = ("cap", "since", "slack", "value")

    def __init__(self, *, slack: float, cap: float) -> None:
        self.slack = slack
        self.cap = cap
        self.value = 0.0
        self.since = 0

    def add(self, z: float) -> float:
        """One standardised value; returns the sum. NaN counts as no evidence."""
        step = min(z, self.cap) - self.slack if z == z else 0.0
        self.value += step
        if self.value > 0.0:
            self.since += 1
        else:
            self.reset()
        return self.value

    def reset(self) -> None:
        """Back to zero."""
        self.value = 0.0
        self.since = 0

    def state_dict(self) -> dict[str, Any]:
        """JSON-ready state."""
        return {"value": self.value, "since": self.since}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        self.value, self.since = float(state["value"]), int(state["since"])
