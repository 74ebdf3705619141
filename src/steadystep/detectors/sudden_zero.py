"""A gradient that is exactly zero for the first time in a while: a reason to look at the weights, and no finding."""

from typing import Any, final

from steadystep.records import Signals

_STEPS = 64  # without a zero: experts that are not chosen and losses that reach zero come back sooner


@final
class SuddenZero:
    """A layer whose weights became zero passes nothing on, so its neighbours get a gradient of exactly zero at once.

    A few updates later neither the gradients nor the norm of the layer show it.
    """

    def __init__(self) -> None:
        self._without = 0

    def update(self, signals: Signals) -> bool:
        """True at the first step with a zero after 64 without one."""
        if 0.0 not in signals.norms:
            self._without += 1
            return False
        sudden = self._without >= _STEPS
        self._without = 0
        return sudden

    def state_dict(self) -> dict[str, Any]:
        """JSON-ready state."""
        return {"without": self._without}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        self._without = int(state["without"])
