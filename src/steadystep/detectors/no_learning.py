"""A loss that is still where it began."""

import math
from statistics import median
from typing import Any, final

from steadystep.records import Finding, Signals
from steadystep.stats import SIGMA_PER_MAD

_NOTHING: tuple[Finding, ...] = ()
_PATIENCE = 300
_FIRST = 16
_LAST = 64
_LEAST_GAIN = 0.01
_SIGMAS = 2.0
# One sigma of the difference of two medians, in units of the MAD of the losses.
_DIFFERENCE = SIGMA_PER_MAD * 1.2533 * math.sqrt(1 / _FIRST + 1 / _LAST)
_MOST_CLASSES = 1000
_ABOUT = 0.02


@final
class NoLearning:
    """Notes once, after 300 losses, that the median of the last 64 is no better than that of the first 16.

    Only a note: a fine-tune may begin at its floor. Waits while the learning rate is still warming up, and ignores
    losses that are not positive, whose level means nothing. Names the number of classes C whose ln(C) fits the loss, if
    any.
    """

    name = "no-learning"

    def __init__(self) -> None:
        self._first: list[float] = []
        self._last: list[float] = []
        self._seen = 0
        self._lr = 0.0
        self._done = False

    def update(self, signals: Signals) -> tuple[Finding, ...]:
        """Return at most one finding in a run; non-finite losses do not count."""
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
        what = f"after {self._seen} steps the loss is {level:.4g}, from {before:.4g} at the start{_guessing(level)}"
        return (
            Finding(
                detector=self.name, step=signals.step, severity="info", value=level, limit=before - needed, what=what
            ),
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the state, ready for JSON."""
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
    return f", about ln({classes}): the loss of guessing among {classes} classes"


_BLOCK = 64
_EARLY = 64  # steps in which it leaps
_RUN = 5  # losses in a row, of which the median counts
_LEAP = 1.5  # times the first loss, and times the largest of the last 64: noise does not do that five times in a row
_NOTHING_LEARNED = 0.7  # of the first loss; guessing letters by their frequency gives 0.8 of guessing them evenly
_FLAT = 0.01  # of the first loss, between blocks
_FLAT_BLOCKS = 3
_GIVE_UP_STEPS = 512  # steps: a run that is not back at its start by then is something else


@final
class ConstantPrediction:
    """Warns once: the loss jumped in the first 64 steps and settled near the first loss for three windows of 64."""

    name = "constant-prediction"

    def __init__(self) -> None:
        self._first: float | None = None
        self._losses: list[float] = []
        self._peak = 0.0
        """The largest median of five losses in a row among the first ones."""
        self._levels: list[float] = []
        self._seen = 0
        self._done = False

    def update(self, signals: Signals) -> tuple[Finding, ...]:
        """Return at most one finding in a run; non-finite losses do not count."""
        if self._done:
            return _NOTHING
        loss = signals.loss
        if not math.isfinite(loss):
            return _NOTHING
        if self._first is None:
            self._first = loss
        self._seen += 1
        self._losses.append(loss)
        if self._seen <= _EARLY and len(self._losses) >= _RUN:
            self._peak = max(self._peak, median(self._losses[-_RUN:]))
        return self._judge(signals) if self._seen % _BLOCK == 0 else _NOTHING

    def _judge(self, signals: Signals) -> tuple[Finding, ...]:
        last, self._losses = self._losses, []
        first = self._first
        assert first is not None
        self._levels = [*self._levels[1 - _FLAT_BLOCKS :], median(last)]
        self._done = not first > 0.0 or self._peak <= _LEAP * first or self._seen >= _GIVE_UP_STEPS
        if self._done or len(self._levels) < _FLAT_BLOCKS or self._seen <= _EARLY:
            return _NOTHING
        level = self._levels[-1]
        rests = max(self._levels) - min(self._levels) <= _FLAT * first
        if not rests or level < _NOTHING_LEARNED * first or self._peak <= _LEAP * max(last):
            return _NOTHING
        self._done = True
        what = f"the loss rose from {first:.4g} to {self._peak:.4g} in the first steps and has settled at"
        what += f" {level:.4g}: the model predicts the same for every input"
        return (
            Finding(
                detector=self.name,
                step=signals.step,
                severity="warn",
                value=level,
                limit=_NOTHING_LEARNED * first,
                baseline=first,
                what=what,
            ),
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the state, ready for JSON."""
        return {
            "first": self._first,
            "losses": list(self._losses),
            "peak": self._peak,
            "levels": list(self._levels),
            "seen": self._seen,
            "done": self._done,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        self._first = None if state["first"] is None else float(state["first"])
        self._losses = [float(loss) for loss in state["losses"]]
        self._levels = [float(level) for level in state["levels"]]
        self._peak, self._seen, self._done = float(state["peak"]), int(state["seen"]), bool(state["done"])


_TINY = 1e-12
_IN_A_ROW = 16
_REAL = 1e-3  # a loss that began above this was measuring something


@final
class SuspiciousPerfection:
    """Notes once that 16 losses in a row are exactly 0, or below 1e-12 in a run that began above 1e-3.

    Usual causes: the target leaks into the input, every target is masked, or the loss is detached from the prediction.
    """

    name = "suspicious-perfection"

    def __init__(self) -> None:
        self._first: float | None = None
        self._zeros = 0
        self._tiny = 0
        self._done = False

    def update(self, signals: Signals) -> tuple[Finding, ...]:
        """Return at most one finding in a run; non-finite losses do not count."""
        if signals.loss > _TINY and self._first is not None:
            if signals.loss - signals.loss == 0.0:
                self._zeros = self._tiny = 0
            return _NOTHING
        return self._look_closer(signals)

    def _look_closer(self, signals: Signals) -> tuple[Finding, ...]:
        loss = signals.loss
        if loss - loss != 0.0:
            return _NOTHING
        if self._first is None:
            self._first = loss
        self._zeros = self._zeros + 1 if loss == 0.0 else 0
        self._tiny = self._tiny + 1 if abs(loss) <= _TINY and self._first > _REAL else 0
        if self._done or max(self._zeros, self._tiny) < _IN_A_ROW:
            return _NOTHING
        self._done = True
        what = (
            f"the loss has been {'exactly 0' if self._zeros >= _IN_A_ROW else f'below {_TINY:g}'} for {_IN_A_ROW} steps"
        )
        return (Finding(detector=self.name, step=signals.step, severity="info", value=loss, limit=_TINY, what=what),)

    def state_dict(self) -> dict[str, Any]:
        """Return the state, ready for JSON."""
        return {"first": self._first, "zeros": self._zeros, "tiny": self._tiny, "done": self._done}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        self._first = None if state["first"] is None else float(state["first"])
        self._zeros, self._tiny, self._done = int(state["zeros"]), int(state["tiny"]), bool(state["done"])
