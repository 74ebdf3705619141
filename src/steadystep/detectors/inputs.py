"""What a step is given: its batch, and its learning rate.

A batch of another scale: pixels that were not divided by 255, a corrupt file, a unit that was mixed up. Units that
saturate (tanh, sigmoid) hide it from loss and gradient, and it is learned all the same.
"""

import math
from typing import Any, final

from steadystep.errors import ConfigError
from steadystep.records import Finding, Signals

_FACTOR = 1000.0
_ARMED_AFTER = 32
_PATIENCE = 3  # findings in a row, after which it is the data's new scale


@final
class InputScale:
    """Asks for action when a batch is a thousand times as large as any before."""

    name = "input-scale"
    needs = "batch_rms"

    def __init__(self) -> None:
        self._largest = 0.0
        self._seen = 0
        self._in_a_row = 0

    def update(self, signals: Signals) -> tuple[Finding, ...]:
        """Return a finding at such a batch; needs `batch=`."""
        size = signals.batch_rms
        if size is None or not size > 0.0:
            return ()
        limit = _FACTOR * self._largest
        if self._seen < _ARMED_AFTER or size <= limit or self._in_a_row >= _PATIENCE:
            if size < math.inf:  # why: the square of 1e20 is infinite in fp32, and nothing is larger than that
                self._largest = max(self._largest, size)
            self._seen += 1
            self._in_a_row = 0
            return ()
        self._in_a_row += 1
        what = f"this batch has an unusual scale: root mean square {size:.3g}, at most {self._largest:.3g} before"
        return (
            Finding(
                detector=self.name,
                step=signals.step,
                severity="act",
                value=size,
                limit=limit,
                baseline=self._largest,
                what=what,
            ),
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the state, ready for JSON."""
        return {"largest": self._largest, "seen": self._seen, "in_a_row": self._in_a_row}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        self._largest, self._seen = float(state["largest"]), int(state["seen"])
        self._in_a_row = int(state["in_a_row"])


_DISTINCT_BATCHES = 64  # batches that were all different
_IN_A_ROW = 4


@final
class SameBatch:
    """Warns once when four batches in a row are the same, in a run whose batches had always differed.

    When it is over it asks for action: a reason to compare weights (diagnosis/counterfactual.py), because those from
    before may be better.

    Batches are recognized by their root mean square, to the last bit. Data that repeats by design (one batch to
    overfit, one-hot rows) does so from the beginning and is never reported.
    """

    name = "same-batch"
    needs = "batch_rms"

    def __init__(self) -> None:
        self._last: float | None = None
        self._differed = 0
        self._in_a_row = 1

    def update(self, signals: Signals) -> tuple[Finding, ...]:
        """Return a finding at the fourth equal batch; needs `batch=`."""
        size, last = signals.batch_rms, self._last
        if size is None or not math.isfinite(size):
            return ()
        self._last = size
        if size != last:
            # why: after a repetition it has to show anew that repeating is not its way
            repeated, differed = self._in_a_row, self._differed
            self._differed = differed + 1 if repeated == 1 else 0
            self._in_a_row = 1
            return self._over(signals, repeated) if repeated >= _IN_A_ROW and differed >= _DISTINCT_BATCHES else ()
        self._in_a_row += 1
        if self._in_a_row != _IN_A_ROW or self._differed < _DISTINCT_BATCHES:
            return ()
        what = f"the last {_IN_A_ROW} batches are identical; the {self._differed} before them all differed"
        return (
            Finding(
                detector=self.name,
                step=signals.step,
                severity="warn",
                value=float(_IN_A_ROW),
                limit=float(_IN_A_ROW - 1),
                what=what,
                since=signals.step - _IN_A_ROW + 1,
            ),
        )

    def _over(self, signals: Signals, repeated: int) -> tuple[Finding, ...]:
        return (
            Finding(
                detector=self.name,
                step=signals.step,
                severity="act",
                value=float(repeated),
                limit=float(_IN_A_ROW - 1),
                what=f"{repeated} batches were identical, up to the step before this one",
                since=signals.step - repeated,
            ),
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the state, ready for JSON."""
        return {"last": self._last, "differed": self._differed, "in_a_row": self._in_a_row}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        self._last = None if state["last"] is None else float(state["last"])
        self._differed, self._in_a_row = int(state["differed"]), int(state["in_a_row"])


_NOTHING: tuple[Finding, ...] = ()
_ABRUPT = 2.0
_STUCK = 100  # steps


@final
class LearningRateBounds:
    """Warns once above `lr_max`, and once below `lr_min` where no schedule leads there.

    A warmup begins below `lr_min` and a decay ends there: neither counts. What counts is a fall through `lr_min` to
    half or less in one step that the fall before it did not announce, or a run that began below and has not moved in
    100 steps.

    Args:
        lr_min: the lowest learning rate; None for no limit.
        lr_max: the highest learning rate; None for no limit.
    """

    name = "learning-rate-bounds"

    def __init__(self, lr_min: float | None = None, lr_max: float | None = None) -> None:
        self._low = 0.0 if lr_min is None else lr_min
        self._high = math.inf if lr_max is None else lr_max
        if not 0.0 <= self._low <= self._high:
            raise ConfigError(f"lr_min = {lr_min} must be below lr_max = {lr_max}")
        self._lr: float | None = None
        self._before: float | None = None
        self._same = 0  # steps since the start, while the rate has never moved; then -1
        self._told = {"above": False, "below": False}

    def update(self, signals: Signals) -> tuple[Finding, ...]:
        """Return at most one finding; non-finite rates do not count."""
        lr = signals.lr
        if lr == self._lr:
            self._before = lr
            if self._same < 0:
                return _NOTHING
            self._same += 1
            return self._stuck(signals) if self._same == _STUCK else _NOTHING
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
        """Return the state, ready for JSON."""
        return {"lr": self._lr, "before": self._before, "same": self._same, "told": dict(self._told)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        self._lr = None if state["lr"] is None else float(state["lr"])
        self._before = None if state["before"] is None else float(state["before"])
        self._same = int(state["same"])
        self._told = {side: bool(told) for side, told in state["told"].items()}
