"""Adam's second moment below what it can decay to: it was cleared or replaced by something else than updates.

v_t = beta2 v_(t-1) + (1 - beta2) g² never falls by more than beta2 in one update, whatever the gradients are
(Kingma & Ba 2015), so this is arithmetic and no threshold.
"""

import math
from typing import Any, final

from steadystep.records import Finding, Signals

_SECOND = "exp_avg_sq of "
_ROUNDING = 0.5  # of the lowest it can have come to
_MOST = 0.75  # of the tensors


@final
class LostMoments:
    """Warns once when most second moments have fallen further between two looks than `beta2` allows.

    A state that was not loaded after a restart, an optimizer made anew, `optimizer.state.clear()`: updates are the
    wrong size until it is learned again. Nothing is undone, because it may be meant.
    """

    name = "lost-moments"

    def __init__(self, *, beta2: float) -> None:
        self._beta2 = beta2
        self._at = 0
        self._peaks: dict[str, float] = {}
        self._before: dict[str, float] = {}
        """One look earlier: what was restored after poison is compared with that."""

    def update(self, signals: Signals) -> tuple[Finding, ...]:
        """One finding for all tensors concerned."""
        if not signals.state_peaks:
            return ()
        peaks = dict(zip(signals.state, signals.state_peaks, strict=True))
        finite = {name: peak for name, peak in peaks.items() if name.startswith(_SECOND) and peak < math.inf}
        known = [name for name in self._peaks if name in self._before and self._peaks[name] > 0.0]
        lowest = _ROUNDING * self._beta2 ** (signals.step - self._at)
        lost = [n for n in known if peaks.get(n, 0.0) < lowest * min(self._peaks[n], self._before[n])]
        since, self._at = self._at, signals.step
        self._before, self._peaks = self._peaks, finite
        if not lost or len(lost) < _MOST * len(known):
            return ()
        self._before = {}  # what comes next is learned from here
        worst = lost[0]
        return (
            Finding(
                detector=self.name,
                step=signals.step,
                severity="warn",
                value=peaks.get(worst, 0.0),
                limit=lowest,
                what="the optimizer's second moments fell further than beta2 lets them: cleared or replaced",
                where=tuple(lost),
                since=since,
            ),
        )

    def state_dict(self) -> dict[str, Any]:
        """JSON-ready state."""
        return {"at": self._at, "peaks": dict(self._peaks), "before": dict(self._before)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        self._at = int(state["at"])
        self._peaks = {str(name): float(peak) for name, peak in state["peaks"].items()}
        self._before = {str(name): float(peak) for name, peak in state["before"].items()}
