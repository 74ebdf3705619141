"""Running statistics that one batch has thrown far off: training goes on as before, evaluation does not.

BatchNorm divides by the statistics of the batch while it trains, so neither loss nor gradient shows what one batch of
another scale has done to the running ones; it takes hundreds of steps to fade.
"""

import math
from typing import Any, final

from steadystep.records import Finding, Signals
from steadystep.stats.absurd import is_absurd

_FACTOR = 1000.0  # at a momentum of 0.1 the batch's own variance is ten thousand times the usual one
_ARMED_AFTER = 32
_PATIENCE = 3  # findings in a row, after which it is the data's new scale


@final
class BufferJump:
    """Asks for the step to be refused when a buffer's largest value leaps to a thousand times what it ever was."""

    name = "buffer-jump"
    needs = "buffer_peaks"

    def __init__(self) -> None:
        self._largest: dict[str, float] = {}
        self._seen: dict[str, int] = {}
        self._in_a_row = 0

    def update(self, signals: Signals) -> tuple[Finding, ...]:
        """One finding for all buffers that leapt."""
        if not signals.buffer_peaks:
            return ()
        leaps: dict[str, float] = {}
        for name, peak in zip(signals.buffers, signals.buffer_peaks, strict=False):
            largest = self._largest.get(name, 0.0)
            if not 0.0 < peak < math.inf:
                continue
            armed = largest and (self._seen[name] >= _ARMED_AFTER or (is_absurd(peak) and not is_absurd(largest)))
            if armed and peak > _FACTOR * largest:
                leaps[name] = peak / largest
            else:
                self._largest[name] = max(largest, peak)
                self._seen[name] = self._seen.get(name, 0) + 1
        if not leaps:
            self._in_a_row = 0
            return ()
        self._in_a_row += 1
        if self._in_a_row > _PATIENCE:
            peaks = dict(zip(signals.buffers, signals.buffer_peaks, strict=False))
            self._largest |= {name: peaks[name] for name in leaps}
            return ()
        worst = max(leaps, key=leaps.__getitem__)
        return (
            Finding(
                detector=self.name,
                step=signals.step,
                severity="act",
                value=leaps[worst] * self._largest[worst],
                limit=_FACTOR * self._largest[worst],
                usual=self._largest[worst],
                what=f"this batch would make {worst} {leaps[worst]:.1e} times as large as it ever was",
                where=tuple(leaps),
            ),
        )

    def state_dict(self) -> dict[str, Any]:
        """JSON-ready state."""
        return {"largest": dict(self._largest), "seen": dict(self._seen), "in_a_row": self._in_a_row}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        self._largest = {str(name): float(value) for name, value in state["largest"].items()}
        self._seen = {str(name): int(count) for name, count in state["seen"].items()}
        self._in_a_row = int(state["in_a_row"])
