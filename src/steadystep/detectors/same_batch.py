"""The same batch again and again: a loader that is stuck, an iterator that is made anew in every step.

The loss falls as if all were well; it is the held-out loss that pays.
"""

import math
from typing import Any, final

from steadystep.records import Finding, Signals

_ARMED_AFTER = 64  # batches that were all different
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
        if self._in_a_row != _IN_A_ROW or self._differed < _ARMED_AFTER:
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
