"""Metrics that the loop gives: bounds of any of them, and what entropy, reward and KL say about a policy."""

import math
import re
from collections.abc import Mapping
from functools import cache
from typing import Any, final

from steadystep.records import Finding, Severity, Signals
from steadystep.rl import CeilingFit
from steadystep.rl.vocabulary import canonical, conversion
from steadystep.stats import Level


@cache
def words(name: str) -> frozenset[str]:
    """The words of a metric's name, in lower case."""
    return frozenset(re.findall(r"[a-z]+", name.lower()))


_SETTINGS = frozenset(("coef", "coefficient", "target", "beta", "weight"))  # somebody sets them


@cache
def _is_about(name: str, word: str) -> bool:
    """Whether a metric measures this, and is no setting of it, nor a comparison of sampler and learner."""
    apart = words(name)
    return word in apart and apart.isdisjoint(_SETTINGS) and not (canonical(name) or "").startswith("mismatch")


_FIRST, _RECENT = 16, 8  # readings
_COLLAPSED, _BACK = 0.05, 0.2  # of the entropy at the beginning


@final
class EntropyCollapse:
    """Warns when a metric with "entropy" in its name has fallen to a twentieth of its initial value.

    A note where a reward has risen by more than rewards still differ: the policy may have converged. Where readings
    follow R = -a e^H + b, the reward at zero entropy is forecast.
    """

    name = "entropy-collapse"
    needs = "metrics"

    def __init__(self) -> None:
        self._first: dict[str, list[float]] = {}
        self._recent: dict[str, list[float]] = {}
        self._told: list[str] = []
        self._fit = CeilingFit()

    def update(self, signals: Signals) -> tuple[Finding, ...]:
        """Return a finding for each entropy that has just collapsed."""
        if not signals.metrics:
            return ()
        entropies = [name for name in signals.metrics if _is_about(name, "entropy")]
        for name in signals.metrics:
            if name in entropies or "reward" in words(name):
                self._learn(name, signals.metrics[name] * conversion(name)[0])
        reward = next((value for name, value in signals.metrics.items() if canonical(name) == "reward"), None)
        if reward is not None and len(entropies) == 1:
            self._fit.add(entropy=signals.metrics[entropies[0]] * conversion(entropies[0])[0], reward=reward)
        return tuple(found for name in entropies if (found := self._look(name, signals.step)) is not None)

    def _learn(self, name: str, value: float) -> None:
        if value - value != 0.0:
            return
        first = self._first.setdefault(name, [])
        if len(first) < _FIRST:
            first.append(value)
        else:
            recent = self._recent.setdefault(name, [])
            recent.append(value)
            del recent[:-_RECENT]

    def _look(self, name: str, step: int) -> Finding | None:
        recent = self._recent.get(name, [])
        if len(recent) < _RECENT:
            return None
        before, now = _median(self._first[name]), _median(recent)
        if now > _BACK * before and name in self._told:
            self._told.remove(name)
        if not (before > 0.0 and now <= _COLLAPSED * before) or name in self._told:
            return None
        self._told.append(name)
        what, ceiling = f"{name} fell from {before:.3g} to {now:.3g}", self._fit.ceiling
        what += "" if ceiling is None else f"; at zero entropy the reward would end at {ceiling:.3g}"
        return Finding(
            detector=self.name,
            step=step,
            severity="info" if self._better() else "warn",
            value=now,
            limit=_COLLAPSED * before,
            baseline=before,
            what=what,
        )

    def _better(self) -> bool:
        """Whether a reward has risen by more than rewards still differ: who has solved the task is certain."""
        known = [(name, "std" in words(name)) for name in self._recent if "reward" in words(name)]
        spread = max((_median(self._recent[name]) for name, is_spread in known if is_spread), default=0.0)
        ends = ((self._first[name], _median(self._recent[name])) for name, is_spread in known if not is_spread)
        return any(now > max(first) and now - _median(first) > spread for first, now in ends)

    def state_dict(self) -> dict[str, Any]:
        """Return the state, ready for JSON."""
        return {
            "first": {name: list(values) for name, values in self._first.items()},
            "recent": {name: list(values) for name, values in self._recent.items()},
            "told": list(self._told),
            "fit": self._fit.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        self._fit = CeilingFit()
        if "fit" in state:  # not in states of earlier versions
            self._fit.load_state_dict(state["fit"])
        self._first = {name: [float(v) for v in values] for name, values in state["first"].items()}
        self._recent = {name: [float(v) for v in values] for name, values in state["recent"].items()}
        self._told = [str(name) for name in state["told"]]


def _median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


_SAME, _NO_SPREAD = 48, 16  # readings in a row


@final
class FlatReward:
    """Warns once when a reward has been exactly the same for 48 readings, or its spread 0 for 16.

    A note when a reward is above its first value: the task may be solved. The next different value arms it again.
    """

    name = "flat-reward"
    needs = "metrics"

    def __init__(self) -> None:
        self._seen: dict[str, list[float]] = {}
        """First value, last value, how often in a row."""

    def update(self, signals: Signals) -> tuple[Finding, ...]:
        """Return a finding for each reward that has just become flat."""
        if not signals.metrics:
            return ()
        watched = [(name, value) for name, value in signals.metrics.items() if _is_reward(words(name))]
        found = [self._look(name, value, signals.step) for name, value in watched]
        return tuple(finding for finding in found if finding is not None)

    def _look(self, name: str, value: float, step: int) -> Finding | None:
        if value - value != 0.0:
            return None
        seen = self._seen.setdefault(name, [value, value, 0.0])
        seen[2] = seen[2] + 1.0 if value == seen[1] else 1.0
        seen[1] = value
        spread = "std" in words(name)
        needed = _NO_SPREAD if spread else _SAME
        if seen[2] != needed or (spread and value != 0.0):
            return None
        severity: Severity = "info" if (self._risen() if spread else value > seen[0]) else "warn"
        return Finding(
            detector=self.name,
            step=step,
            severity=severity,
            value=value,
            limit=float(needed),
            what=f"{name} has been {value:.3g} for {needed} steps",
        )

    def _risen(self) -> bool:
        """Whether a reward is above its first value: equal rewards are what is left when a task is solved."""
        return any(seen[1] > seen[0] for name, seen in self._seen.items() if "std" not in words(name))

    def state_dict(self) -> dict[str, Any]:
        """Return the state, ready for JSON."""
        return {name: list(seen) for name, seen in self._seen.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        self._seen = {name: [float(number) for number in seen] for name, seen in state.items()}


def _is_reward(name: frozenset[str]) -> bool:
    return "reward" in name and name.isdisjoint(("frac", "fraction", "zero", "count"))  # shares of something about it


_FACTOR = 10.0  # times the usual; a KL that is allowed to grow doubles within a window, it does not grow tenfold
_DEVIATIONS = 8.0
_FLOOR = 0.1  # nats: below, ten times as much is still close
_IN_A_ROW = 3


@final
class KlBlowUp:
    """Warns when a metric with "kl" in its name is far above its baseline for three steps in a row.

    Twelve such values that agree with each other become the new baseline.
    """

    name = "kl-blow-up"
    needs = "metrics"

    def __init__(self) -> None:
        self._levels: dict[str, Level] = {}

    def update(self, signals: Signals) -> tuple[Finding, ...]:
        """Return a finding for each KL that has just left its baseline."""
        if not signals.metrics:
            return ()
        watched = [(name, value) for name, value in signals.metrics.items() if _is_about(name, "kl")]
        found = [self._look(name, value, signals.step) for name, value in watched]
        return tuple(finding for finding in found if finding is not None)

    def _look(self, name: str, value: float, step: int) -> Finding | None:
        level = self._levels.setdefault(name, Level(64, armed_after=16))
        if value - value != 0.0:
            return None
        if not level.armed:
            level.accept(value)
            return None
        baseline = level.median
        limit = max(_FLOOR, _FACTOR * baseline, baseline + _DEVIATIONS * level.spread)
        if value <= limit:
            level.accept(value)
            return None
        moved = level.reject(value, agreement=abs(value))
        if moved or level.rejected_in_a_row != _IN_A_ROW:
            return None
        what = f"{name} is {value:.3g}, its baseline is {baseline:.3g}"
        return Finding(
            detector=self.name,
            step=step,
            severity="warn",
            value=value,
            limit=limit,
            baseline=baseline,
            what=what,
            since=step - _IN_A_ROW + 1,
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the state, ready for JSON."""
        return {name: level.state_dict() for name, level in self._levels.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        self._levels = {}
        for name, saved in state.items():
            self._levels[name] = Level(64, armed_after=16)
            self._levels[name].load_state_dict(saved)


@final
class MetricBounds:
    """Warns once when a metric is NaN or infinite, or leaves its bounds; again after it has come back.

    Args:
        bounds: lowest and highest allowed value by metric name.

    >>> guard_detectors = [MetricBounds({"kl": (0.0, 0.5), "clip_fraction": (0.0, 0.4)})]
    """

    name = "metric-bounds"
    needs = "metrics"

    def __init__(self, bounds: Mapping[str, tuple[float, float]] | None = None) -> None:
        self._bounds = dict(bounds or {})
        self._outside: list[str] = []

    def update(self, signals: Signals) -> tuple[Finding, ...]:
        """Return a finding for each metric that has just left its bounds."""
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
        """Return the state, ready for JSON."""
        return {"outside": list(self._outside)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        self._outside = [str(name) for name in state["outside"]]
