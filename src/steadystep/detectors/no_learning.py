"""A loss that is still where it began."""

import math
from statistics import median
from typing import Any, final

from steadystep.records import Finding, Signals

_NOTHING: tuple[Finding, ...] = ()
_PATIENCE = 300
_FIRST = 16
_LAST = 64
_LEAST_GAIN = 0.01
_SIGMAS = 2.0
# One sigma of the difference of two medians in units of one loss's sigma; 1.4826 makes a MAD a sigma.
_DIFFERENCE = 1.4826 * 1.2533 * math.sqrt(1 / _FIRST + 1 / _LAST)
_MOST_CLASSES = 1000
_ABOUT = 0.02


@final
class NoLearning:
    """Compares, once, after 300 losses, the median of the last 64 with that of the first 16.

    Only a note: a fine-tune may begin at its floor. Waits while the learning rate is still warming up, and says nothing
    about losses that are not positive, whose level means nothing. Names the number of classes whose guessing costs as
    much, where there is one.
    """

    name = "no-learning"

    def __init__(self) -> None:
        self._first: list[float] = []
        self._last: list[float] = []
        self._seen = 0
        self._lr = 0.0
        self._done = False

    def update(self, signals: Signals) -> tuple[Finding, ...]:
        """At most one finding in a run; losses that are not finite do not count."""
        if self._done:
            return _NOTHING
        loss = signals.loss
        if loss - loss == 0.0:
            self._last.append(loss)
            if len(self._last) == _LAST:
                return self._judge(signals)
        return _NOTHING

    def _judge(self, signals: Signals) -> tuple[Finding, ...]:
        last, self._last = self._last, []
        if not self._first:
            self._first = last[:_FIRST]
        self._seen += _LAST
        warming_up = signals.lr > self._lr
        if math.isfinite(signals.lr):
            self._lr = signals.lr
        self._done = min(last) <= 0.0
        if self._done or self._seen < _PATIENCE or warming_up:
            return _NOTHING
        self._done = True
        before, level = median(self._first), median(last)
        noise = median(abs(loss - level) for loss in last)
        needed = max(_LEAST_GAIN * before, _SIGMAS * _DIFFERENCE * noise)
        if before - level > needed:
            return _NOTHING
        what = f"after {self._seen} steps the loss is {level:.4g}; it began at {before:.4g}{_guessing(level)}"
        return (
            Finding(
                detector=self.name, step=signals.step, severity="info", value=level, limit=before - needed, what=what
            ),
        )

    def state_dict(self) -> dict[str, Any]:
        """JSON-ready state."""
        return {
            "first": list(self._first),
            "last": list(self._last),
            "seen": self._seen,
            "lr": self._lr,
            "done": self._done,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        self._first = [float(x) for x in state["first"]]
        self._last = [float(x) for x in state["last"]]
        self._seen, self._lr, self._done = int(state["seen"]), float(state["lr"]), bool(state["done"])


def _guessing(level: float) -> str:
    """What the level would be worth as the cross-entropy of a guess."""
    if level > math.log(_MOST_CLASSES) * (1.0 + _ABOUT):
        return ""
    classes = round(math.exp(level))
    if abs(level - math.log(classes)) > _ABOUT * math.log(classes):
        return ""
    return f", about ln({classes}): what guessing among {classes} classes costs"
