"""Adam's second moment below what it can decay to: it was cleared or replaced by something else than updates.

v_t = beta2 v_(t-1) + (1 - beta2) g² never falls by more than beta2 in one update, whatever the gradients are
(Kingma & Ba 2015), so this is arithmetic and no threshold.
"""

import math
from collections import deque
from typing import Any, final

from steadystep.records import Finding, Signals

_SECOND = "exp_avg_sq of "
_ROUNDING = 0.5  # of the lowest it can have come to
_MOST = 0.75  # of the tensors
_LOOKS = 2  # both must say so: a single one may have met a moment that was poisoned


@final
class LostMoments:
    """Warns once when most second moments have fallen further between two looks than `beta2` allows.

    A state that was not loaded after a restart, an optimizer made anew, `optimizer.state.clear()`: updates are the
    wrong size until it is learned again. Nothing is undone, because it may be meant.
    """

    name = "lost-moments"

    def __init__(self, *, beta2: float) -> None:
        self._beta2 = beta2
        self._looks: deque[tuple[int, dict[str, float]]] = deque(maxlen=_LOOKS)
        """Step and finite peaks of the last ones."""

    def update(self, signals: Signals) -> tuple[Finding, ...]:
        """One finding for all tensors concerned."""
        if not signals.state_peaks:
            return ()
        peaks = dict(zip(signals.state, signals.state_peaks, strict=True))
        lowest = self._lowest(signals.step)
        lost = [name for name, least in lowest.items() if peaks.get(name, 0.0) < _ROUNDING * least]
        since = self._looks[-1][0] if self._looks else 0
        if lost and len(lost) >= _MOST * len(lowest):
            self._looks.clear()  # what comes next is learned from here
        else:
            lost = []
        finite = {name: peak for name, peak in peaks.items() if name.startswith(_SECOND) and peak < math.inf}
        self._looks.append((signals.step, finite))
        return (self._finding(signals.step, since, lost, lowest[lost[0]]),) if lost else ()

    def _lowest(self, step: int) -> dict[str, float]:
        """What each can have come to by now, from all looks."""
        if len(self._looks) < _LOOKS:
            return {}
        known = set.intersection(*(set(peaks) for _, peaks in self._looks))
        found = {n: min(self._beta2 ** (step - at) * peaks[n] for at, peaks in self._looks) for n in sorted(known)}
        return {name: least for name, least in found.items() if least > 0.0}

    def _finding(self, step: int, since: int, lost: list[str], least: float) -> Finding:
        what = "the optimizer's second moments fell further than beta2 lets them: cleared or replaced"
        return Finding(
            detector=self.name,
            step=step,
            severity="warn",
            value=0.0,
            limit=least,
            what=what,
            where=tuple(lost),
            since=since,
        )

    def state_dict(self) -> dict[str, Any]:
        """JSON-ready state."""
        return {"looks": [[step, dict(peaks)] for step, peaks in self._looks]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        self._looks.clear()
        for step, peaks in state["looks"]:
            self._looks.append((int(step), {str(name): float(peak) for name, peak in peaks.items()}))
