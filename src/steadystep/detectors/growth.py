"""Sizes that leave their beginnings far behind and do not stop."""

import math
from collections.abc import Mapping
from typing import Any, final

from steadystep.detectors.runs import Runs
from steadystep.detectors.tensor_history import TensorHistory

_FACTOR = 4.0
_PROBES = 4
_PATIENCE = 3


@final
class Growth:
    """Follows one size per name, from probe to probe.

    A size is of concern above `floor`, above four times the median of its first four probes, and while it is still
    rising: above the median of its last four. Each name is told once, after three such probes in a row. What is not
    finite is passed over: it is another detector's.
    """

    def __init__(self, *, floor: float) -> None:
        self._floor = floor
        self._first = TensorHistory(_PROBES, armed_after=_PROBES)
        self._last = TensorHistory(_PROBES, armed_after=_PROBES)
        self._runs = Runs(_PATIENCE)

    def add(self, sizes: Mapping[str, float]) -> tuple[str, ...]:
        """The names that have just given cause for concern often enough."""
        concerns = {}
        for name, size in sizes.items():
            if not math.isfinite(size):
                continue
            if math.isnan(self.began(name)):
                self._first.learn(name, size)
            else:
                concerns[name] = size > self.limit(name) and size > self._last.median(name)
            self._last.learn(name, size)
        return self._runs.add(concerns)

    def began(self, name: str) -> float:
        """What the size was at first; NaN until enough was seen."""
        return self._first.median(name)

    def limit(self, name: str) -> float:
        """What the size is measured by."""
        return max(self._floor, _FACTOR * self.began(name))

    def state_dict(self) -> dict[str, Any]:
        """JSON-ready state."""
        return {"first": self._first.state_dict(), "last": self._last.state_dict(), "runs": self._runs.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        self._first.load_state_dict(state["first"])
        self._last.load_state_dict(state["last"])
        self._runs.load_state_dict(state["runs"])
