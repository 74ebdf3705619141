"""What each tensor's number usually is, from the last few probes."""

import math
from typing import Any, final

from steadystep.stats import Window


@final
class TensorHistory:
    """The last `size` values of each name. What is not finite is not learned."""

    def __init__(self, size: int = 8, *, armed_after: int = 4) -> None:
        self._size = size
        self._armed_after = armed_after
        self._windows: dict[str, Window] = {}

    def median(self, name: str) -> float:
        """The usual value; NaN until enough were seen."""
        window = self._windows.get(name)
        return window.median if window is not None and len(window) >= self._armed_after else math.nan

    def last(self, name: str) -> float:
        """The newest value; NaN where there is none."""
        window = self._windows.get(name)
        return window.values()[-1] if window is not None and len(window) else math.nan

    def learn(self, name: str, value: float) -> None:
        """One more value."""
        if math.isfinite(value):
            self._windows.setdefault(name, Window(self._size)).push(value)

    def forget(self, name: str) -> None:
        """Begin again with this one."""
        self._windows.pop(name, None)

    def state_dict(self) -> dict[str, Any]:
        """JSON-ready state."""
        return {name: window.state_dict() for name, window in self._windows.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        self._windows = {name: Window(self._size, map(float, values)) for name, values in state.items()}
