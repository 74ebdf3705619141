"""A batch of another scale: pixels that were not divided by 255, a corrupt file, a unit that was mixed up.

Units that saturate (tanh, sigmoid) hide it from loss and gradient, and it is learned all the same.
"""

import math
from typing import Any, final

from steadystep.records import Finding, Signals

_FACTOR = 1000.0
_ARMED_AFTER = 32
_PATIENCE = 3  # findings in a row, after which it is the data's new scale


@final
class InputScale:
    """Asks for the step to be refused when a batch is a thousand times as large as any before."""

    name = "input-scale"
    needs = "batch_rms"

    def __init__(self) -> None:
        self._largest = 0.0
        self._seen = 0
        self._in_a_row = 0

    def update(self, signals: Signals) -> tuple[Finding, ...]:
        """A finding at such a batch; needs `batch=`."""
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
        what = f"this batch has a root mean square of {size:.3g}, and none before had more than {self._largest:.3g}"
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
        """JSON-ready state."""
        return {"largest": self._largest, "seen": self._seen, "in_a_row": self._in_a_row}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        self._largest, self._seen = float(state["largest"]), int(state["seen"])
        self._in_a_row = int(state["in_a_row"])


_DISTINCT_BATCHES = 64  # batches that were all different
_IN_A_ROW = 4


@final
class SameBatch:
    """Warns once when the fourth batch in a row is the same, in a run whose batches had always differed.

    Batches are known by their root mean square, to the last bit. Data that repeats by design (one batch to overfit,
    one-hot rows) does so from the beginning and is never mentioned.
    """

    name = "same-batch"
    needs = "batch_rms"

    def __init__(self) -> None:
        self._last: float | None = None
        self._differed = 0
        self._in_a_row = 1

    def update(self, signals: Signals) -> tuple[Finding, ...]:
        """A finding at the fourth; needs `batch=`."""
        size, last = signals.batch_rms, self._last
        if size is None or not math.isfinite(size):
            return ()
        self._last = size
        if size != last:
            # why: after a repetition it has to show anew that repeating is not its way
            self._differed = self._differed + 1 if self._in_a_row == 1 else 0
            self._in_a_row = 1
            return ()
        self._in_a_row += 1
        if self._in_a_row != _IN_A_ROW or self._differed < _DISTINCT_BATCHES:
            return ()
        what = f"the last {_IN_A_ROW} batches are the same, and the {self._differed} before were all different"
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

    def state_dict(self) -> dict[str, Any]:
        """JSON-ready state."""
        return {"last": self._last, "differed": self._differed, "in_a_row": self._in_a_row}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        self._last = None if state["last"] is None else float(state["last"])
        self._differed, self._in_a_row = int(state["differed"]), int(state["in_a_row"])
