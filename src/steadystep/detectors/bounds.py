"""A learning rate outside the bounds its owner gave."""

import math
from collections.abc import Mapping
from typing import Any, final

from steadystep.errors import ConfigError
from steadystep.records import Finding, Signals

_NOTHING: tuple[Finding, ...] = ()
_ABRUPT = 2.0
_PATIENCE = 100


@final
class LearningRateBounds:
    """Warns once above `lr_max`, and once below `lr_min` where no plan leads there.

    A warm-up begins below `lr_min` and a decay ends there: neither is worth a word. What counts is a fall through
    `lr_min` to half or less in one step that the fall before it did not announce, or a run that began below and has not
    moved in 100 steps.
    """

    name = "learning-rate-bounds"

    def __init__(self, lr_min: float | None = None, lr_max: float | None = None) -> None:
        self._low = 0.0 if lr_min is None else lr_min
        self._high = math.inf if lr_max is None else lr_max
        if not 0.0 <= self._low <= self._high:
            raise ConfigError(f"lr_min = {lr_min} and lr_max = {lr_max} leave no room between them")
        self._lr: float | None = None
        self._before: float | None = None
        self._same = 0  # steps since the start, while the rate has never moved; then -1
        self._told = {"above": False, "below": False}

    def update(self, signals: Signals) -> tuple[Finding, ...]:
        """At most one finding; rates that are not finite do not count."""
        lr = signals.lr
        if lr == self._lr:
            self._before = lr
            if self._same < 0:
                return _NOTHING
            self._same += 1
            return self._stuck(signals) if self._same == _PATIENCE else _NOTHING
        if lr - lr != 0.0:
            return _NOTHING
        before, last = self._before, self._lr
        self._before, self._lr = last, lr
        if last is None:
            self._same = 1
        else:
            self._same = -1
        if self._low <= lr <= self._high:
            return _NOTHING
        return self._outside(signals, last, before)

    def _outside(self, signals: Signals, last: float | None, before: float | None) -> tuple[Finding, ...]:
        lr = signals.lr
        if lr > self._high:
            return self._say(signals, "above", self._high, f"the learning rate {lr:g} is above lr_max = {self._high:g}")
        if last is None or last < self._low or lr * _ABRUPT > last:
            return _NOTHING
        # why: a straight line to zero halves at its end as well, in a step no longer than the one before
        if before is not None and last - lr <= _ABRUPT * (before - last):
            return _NOTHING
        return self._say(
            signals, "below", self._low, f"the learning rate fell from {last:g} to {lr:g}, below lr_min = {self._low:g}"
        )

    def _stuck(self, signals: Signals) -> tuple[Finding, ...]:
        self._same = -1
        if signals.lr >= self._low:
            return _NOTHING
        what = f"the learning rate has been {signals.lr:g} from the start, below lr_min = {self._low:g}"
        return self._say(signals, "below", self._low, what)

    def _say(self, signals: Signals, side: str, limit: float, what: str) -> tuple[Finding, ...]:
        if self._told[side]:
            return _NOTHING
        self._told[side] = True
        return (
            Finding(detector=self.name, step=signals.step, severity="warn", value=signals.lr, limit=limit, what=what),
        )

    def state_dict(self) -> dict[str, Any]:
        """JSON-ready state."""
        return {"lr": self._lr, "before": self._before, "same": self._same, "told": dict(self._told)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        self._lr = None if state["lr"] is None else float(state["lr"])
        self._before = None if state["before"] is None else float(state["before"])
        self._same = int(state["same"])
        self._told = {side: bool(told) for side, told in state["told"].items()}


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
