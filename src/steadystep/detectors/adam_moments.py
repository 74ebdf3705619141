"""Adam's second moment below what it can decay to: it was cleared or replaced by something else than updates.

v_t = beta2 v_(t-1) + (1 - beta2) g² never falls by more than beta2 in one update, whatever the gradients are
(Kingma & Ba 2015), so this is arithmetic and no threshold.
"""

import math
from collections import deque
from typing import Any, final

from steadystep.detectors.layers import TensorHistory
from steadystep.records import Finding, Probe, Signals

_SECOND = "exp_avg_sq of "
_ROUNDING = 0.5  # of the lowest it can have come to
_MOST = 0.75  # of the tensors
_LOOKS = 2  # both must say so: a single one may have met a moment that was poisoned


@final
class LostMoments:
    """Warns once when most second moments fell further between two measurements than `beta2` allows.

    Causes: an optimizer state that was not loaded after a restart, an optimizer made anew, `optimizer.state.clear()`.
    Updates have the wrong size until the moments are learned again. Nothing is undone, because it may be intended.

    Args:
        beta2: decay of the second moment.
    """

    name = "lost-moments"

    def __init__(self, *, beta2: float) -> None:
        self._beta2 = beta2
        self._looks: deque[tuple[int, dict[str, float]]] = deque(maxlen=_LOOKS)
        """Step and finite peaks of the last ones."""

    def update(self, signals: Signals) -> tuple[Finding, ...]:
        """Return one finding for all tensors concerned."""
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
        what = "the optimizer's second moments fell faster than beta2 allows: they were cleared or replaced"
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
        """Return the state, ready for JSON."""
        return {"looks": [[step, dict(peaks)] for step, peaks in self._looks]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        self._looks.clear()
        for step, peaks in state["looks"]:
            self._looks.append((int(step), {str(name): float(peak) for name, peak in peaks.items()}))


_JUMP = 100.0
_SUDDEN = 30.0  # times the last probe: targets that grow make v grow from probe to probe, poison does it in one step
_SHARE = 0.25
_UNEXPLAINED = 3.0  # sqrt(v) rose this many times more than the gradient did
_QUIET_STEPS = 2  # the first gradients are of any size
_PATIENCE = 4  # probes after which a jump is the new level
_INTERVALS = 8
_TOTAL = ""  # the global norm, beside those of the tensors
_HABIT = 2  # earlier intervals with a gradient as large: then it is this run's way
_RECENT, _STILL = 8, 3  # of so many last steps: then they are not over. One batch of a noisy run may look normal
_LARGE = 24  # steps with a large gradient between two probes: more is a level, not an accident


@final
class PoisonedMoments:
    """Asks for action when v of a quarter of the tensors is a hundred times its median and the gradients are not.

    The rise must have come between two probes: v that has grown for long belongs to gradients that have. A run whose
    gradients are always spiky (rare rewards under a small beta2) is left alone: the largest gradient norm between two
    probes must be new to it, unless no large one was seen at all. So is one whose gradients have become larger for
    good (hard examples are mined, a term is switched on): v is right there.
    """

    name = "poisoned-moments"

    def __init__(self) -> None:
        self._moments = TensorHistory()
        self._norms = TensorHistory()
        self._peak = 0.0
        self._peaks: list[float] = []
        self._recent: deque[float] = deque(maxlen=_RECENT)
        self._limit = math.inf
        """A global norm above it is large enough to explain a jump of the moments."""
        self._num_large = 0
        self._jumped_in_a_row = 0
        self._clean: int | None = None

    def update(self, signals: Signals) -> tuple[Finding, ...]:
        """Return at most one finding for each probe; after four in a row the new level becomes the baseline."""
        probe, norm = signals.probe, signals.grad_norm
        if 0.0 <= norm < math.inf:  # NaN fails the comparison
            self._recent.append(norm)
            self._num_large += norm > self._limit
        if probe is None:
            if self._peak < norm < math.inf:
                self._peak = norm
            return ()
        if not probe.second_moments or probe.step <= _QUIET_STEPS:
            return ()
        norms = dict(zip(signals.names, signals.norms, strict=False))
        judged, jumps = self._jumps(probe, norms)
        poisoned = bool(jumps) and len(jumps) >= _SHARE * judged and not self._is_habit() and not self._is_level()
        since, baseline = self._clean, self._usual(probe)
        self._learn(signals, probe, norms, jumps if poisoned else {})
        if not poisoned:
            return ()
        worst = max(jumps.values())
        return (
            Finding(
                detector=self.name,
                step=signals.step,
                severity="act",
                value=worst,
                limit=_JUMP,
                baseline=baseline,
                what=f"Adam's second moment is up to {worst:.0e} times its baseline, while the gradients are normal",
                where=tuple(jumps),
                since=since,
            ),
        )

    def _jumps(self, probe: Probe, norms: dict[str, float]) -> tuple[int, dict[str, float]]:
        judged = 0
        jumps = {}
        for name, moment in zip(probe.names, probe.second_moments, strict=False):
            baseline, usual_norm = self._moments.median(name), self._norms.median(name)
            norm = norms.get(name, math.nan)
            if not (baseline > 0.0 and usual_norm > 0.0 and norm < math.inf) or math.isnan(moment):
                continue
            judged += 1
            jump = moment / baseline
            sudden = moment > _SUDDEN * self._moments.last(name)
            if jump > _JUMP and sudden and math.sqrt(jump) > _UNEXPLAINED * norm / usual_norm:
                jumps[name] = jump
        return judged, jumps

    def _usual(self, probe: Probe) -> float:
        """The second moments that these tensors usually have, added up."""
        baseline = [self._moments.median(name) for name in probe.names]
        return sum(moment for moment in baseline if moment > 0.0)

    def _is_habit(self) -> bool:
        """A gradient large enough to do this came by, and others as large did before."""
        if not self._peak > math.sqrt(_JUMP) * self._norms.median(_TOTAL):
            return False
        return sum(2.0 * peak > self._peak for peak in self._peaks) >= _HABIT

    def _is_level(self) -> bool:
        """Gradients large enough to do this are not over, or were no accident."""
        return self._num_large > _LARGE or sum(norm > self._limit for norm in self._recent) >= _STILL

    def _learn(self, signals: Signals, probe: Probe, norms: dict[str, float], jumps: dict[str, float]) -> None:
        self._jumped_in_a_row = self._jumped_in_a_row + 1 if jumps else 0
        moved = self._jumped_in_a_row >= _PATIENCE
        for name, moment in zip(probe.names, probe.second_moments, strict=False):
            if name in jumps and not moved:
                continue
            if name in jumps:
                self._moments.forget(name)
            self._moments.learn(name, moment)
            self._norms.learn(name, norms.get(name, math.nan))
        self._norms.learn(_TOTAL, signals.grad_norm)
        usual = self._norms.median(_TOTAL)
        self._limit = math.sqrt(_JUMP) / _UNEXPLAINED * usual if usual > 0.0 else math.inf
        self._num_large = 0
        self._peaks = [*self._peaks, self._peak][-_INTERVALS:]
        self._peak = signals.grad_norm if 0.0 <= signals.grad_norm < math.inf else 0.0
        if not jumps:
            self._clean = probe.step

    def state_dict(self) -> dict[str, Any]:
        """Return the state, ready for JSON."""
        return {
            "moments": self._moments.state_dict(),
            "norms": self._norms.state_dict(),
            "peak": self._peak,
            "peaks": list(self._peaks),
            "recent": list(self._recent),
            "limit": self._limit if self._limit < math.inf else None,
            "num_large": self._num_large,
            "jumped_in_a_row": self._jumped_in_a_row,
            "clean": self._clean,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        self._moments.load_state_dict(state["moments"])
        self._norms.load_state_dict(state["norms"])
        self._peak, self._peaks = float(state["peak"]), [float(peak) for peak in state["peaks"]]
        self._recent.clear()
        self._recent.extend(float(norm) for norm in state.get("recent") or ())  # older states do not have these three
        limit = state.get("limit")
        self._limit, self._num_large = math.inf if limit is None else float(limit), int(state.get("num_large", 0))
        self._jumped_in_a_row = int(state["jumped_in_a_row"])
        self._clean = None if state["clean"] is None else int(state["clean"])


_LIMIT = 6.0
_FLOOR = 2.3  # StableAdamW's own mark; once the data is learnt, gradients are tiny and any wrong example is a surprise

_SURPRISE_QUIET_STEPS = 32


@final
class RmsSurprise:
    """Notes when RMS_t of a quarter of the tensors is six times its usual value."""

    name = "rms-surprise"
    only_probes = True

    def __init__(self) -> None:
        self._usual = TensorHistory()

    def update(self, signals: Signals) -> tuple[Finding, ...]:
        """Return at most one note for each probe."""
        probe = signals.probe
        if probe is None or not probe.surprises or probe.step <= _SURPRISE_QUIET_STEPS:
            return ()
        judged, where, largest = 0, [], 0.0
        for name, value in zip(probe.names, probe.surprises, strict=False):
            baseline = self._usual.median(name)
            if baseline > 0.0 and not math.isnan(value):
                judged += 1
                if value > max(_LIMIT * baseline, _FLOOR):
                    where.append(name)
                    largest = max(largest, value / baseline)
            self._usual.learn(name, value)  # a median of eight bears three outliers
        if not where or len(where) < _SHARE * judged:
            return ()
        what = f"gradients are up to {largest:.0f} times what Adam's second moment predicts, relative to the baseline"
        return (
            Finding(
                detector=self.name,
                step=signals.step,
                severity="info",
                value=largest,
                limit=_LIMIT,
                what=what,
                where=tuple(where),
                since=probe.step,
            ),
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the state, ready for JSON."""
        return self._usual.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        self._usual.load_state_dict(state)
