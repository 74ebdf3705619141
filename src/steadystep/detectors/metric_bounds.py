"""A metric where it must not be."""

import math
from collections.abc import Mapping
from typing import Any, final

from steadystep.records import Finding, Signals


@final
class MetricBounds:
    """Warns once when a metric is NaN or infinite, or leaves the bounds given for it; again after it has come back.

    >>> guard_detectors = [MetricBounds({"kl": (0.0, 0.5), "clip_fraction": (0.0, 0.4)})]
    """

    name = "metric-bounds"
    needs = "metrics"

    def __init__(self, bounds: Mapping[str, tuple[float, float]] | None = None) -> None:
        self._bounds = dict(bounds or {})
        self._outside: list[str] = []

    def update(self, signals: Signals) -> tuple[Finding, ...]:
        """A finding for each metric that has just left."""
        if not signals.metrics:
            return ()
        found = []
        for name, value in signals.metrics.items():
            low, high = self._bounds.get(name, (-math.inf, math.inf))
            if math.isfinite(value) and low <= value <= high:
                if name in self._outside:
                    self._outside.remove(name)
            elif name not in self._outside:
                self._outside.append(name)
                found.append(self._finding(name, value, low, high, signals.step))
        return tuple(found)

    def _finding(self, name: str, value: float, low: float, high: float, step: int) -> Finding:
        finite = math.isfinite(value)
        what = f"{name} is {value:.3g}, outside {low:g} to {high:g}" if finite else f"{name} is {value}"
        limit = low if value < low else high
        return Finding(detector=self.name, step=step, severity="warn", value=value, limit=limit, what=what)

    def state_dict(self) -> dict[str, Any]:
        """JSON-ready state."""
        return {"outside": list(self._outside)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        self._outside = [str(name) for name in state["outside"]]
