"""Sizes that leave their beginnings far behind and do not stop."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

from steadystep.detectors.runs import Runs
from steadystep.detectors.tensor_history import TensorHistory
from steadystep.records import Finding

_FACTOR = 4.0
_PROBES = 4
_PATIENCE = 3


@final
class Growth:
    """Follows one size per name, from probe to probe.

    A size is of concern above `floor`, above four times the median of its first four probes, and while it is still
    rising: above the median of its last four. Each name is told once, after three such probes in a row. What is not
    finite is passed over: it is another detector's.

    Args:
        detector: who speaks.
        floor: below this no size is of concern.
        say: one clause from the size and what it was at first.
    """

    def __init__(self, detector: str, *, floor: float, say: Callable[[float, float], str]) -> None:
        self._detector = detector
        self._floor = floor
        self._say = say
        self._first = TensorHistory(_PROBES, armed_after=_PROBES)
        self._last = TensorHistory(_PROBES, armed_after=_PROBES)
        self._runs = Runs(_PATIENCE)

    def findings(self, step: int, names: Sequence[str], values: Sequence[float]) -> tuple[Finding, ...]:
        """One for all names that have just proved to grow; the largest size is its value."""
        sizes = dict(zip(names, values, strict=False))
        where = self._add(sizes)
        if not where:
            return ()
        worst = max(where, key=sizes.__getitem__)
        began = self._began(worst)
        return (
            Finding(
                detector=self._detector,
                step=step,
                severity="warn",
                value=sizes[worst],
                limit=self._limit(worst),
                what=self._say(sizes[worst], began),
                where=where,
                usual=began,
            ),
        )

    def _add(self, sizes: Mapping[str, float]) -> tuple[str, ...]:
        concerns = {}
        for name, size in sizes.items():
            if not math.isfinite(size):
                continue
            if math.isnan(self._began(name)):
                self._first.learn(name, size)
            else:
                concerns[name] = size > self._limit(name) and size > self._last.median(name)
            self._last.learn(name, size)
        return self._runs.add(concerns)

    def _began(self, name: str) -> float:
        """NaN until enough was seen."""
        return self._first.median(name)

    def _limit(self, name: str) -> float:
        return max(self._floor, _FACTOR * self._began(name))

    def state_dict(self) -> dict[str, Any]:
        """JSON-ready state."""
        return {"first": self._first.state_dict(), "last": self._last.state_dict(), "runs": self._runs.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        self._first.load_state_dict(state["first"])
        self._last.load_state_dict(state["last"])
        self._runs.load_state_dict(state["runs"])
