"""A policy against its own past: importance ratios, and sampler against learner.

Each reads the metrics by the names of `steadystep.rl`, whichever library logged them. One reading at a time may be
unusual in any healthy run, so warnings take several in a row; "act" is for single updates far beyond all before.
"""

import math
import sys
from collections.abc import Mapping, Set
from typing import Any, final

from steadystep.records import Finding, Severity, Signals
from steadystep.rl.vocabulary import translate
from steadystep.stats import Level

_RATIOS_REFUSED = 16  # updates in a row: the rest of a rollout; what stays for longer is the run's own level
NO_METRICS: Mapping[str, float] = {}
_POLICY = frozenset({"entropy", "kl_ref", "kl_old", "ratio_max", "clip_fraction"})
_last: tuple[Mapping[str, float], Mapping[str, float]] = (NO_METRICS, NO_METRICS)


def policy_metrics(signals: Signals) -> Mapping[str, float]:
    """The metrics by canonical name, finite ones only; kept for the detectors that ask next about the same step."""
    global _last
    if _last[0] is not signals.metrics:
        _last = signals.metrics, {n: v for n, v in translate(signals.metrics).items() if v - v == 0.0}
    return _last[1]


def is_greedy(names: Set[str]) -> bool:
    """Whether values are learned without a policy, as in DQN, by the metrics that were logged."""
    return "value_loss" in names and _POLICY.isdisjoint(names)


def finding(
    detector: str, step: int, severity: Severity, value: float, limit: float, what: str, **more: Any
) -> Finding:
    """A finding, with its fields in order."""
    return Finding(detector=detector, step=step, severity=severity, value=value, limit=limit, what=what, **more)


@final
class Extreme:
    """One metric, larger is worse: its level, its largest accepted value, and how long it has been outside."""

    def __init__(self, *, factor: float, floor: float, wild: float, wild_floor: float, most: int = sys.maxsize) -> None:
        self.factor, self.floor, self.wild, self.wild_floor = factor, floor, wild, wild_floor
        self.most = most
        self.level = Level(128, armed_after=32)
        self.largest = 0.0
        self.in_a_row = 0

    def judge(self, value: float) -> tuple[Severity, float]:
        """Return "info" for nothing, "warn" or "act", and the limit; learns from what is neither."""
        if not self.level.armed:
            self._accept(value)
            return "info", math.inf
        usual, spread = self.level.median, self.level.spread
        limit = max(self.floor, self.factor * usual, usual + 8.0 * spread, 1.5 * self.largest)
        far = max(self.wild_floor, self.wild * self.largest)
        if value <= limit:
            self._accept(value)
            return "info", limit
        self.in_a_row += 1
        if value > far and self.in_a_row <= self.most:
            return "act", far
        if self.in_a_row > self.most:  # it stays: from here on it is what is usual
            self.level.start_again([value])
            self.largest, self.in_a_row = value, 0
        elif value <= far and self.level.reject(value, agreement=abs(value)):
            self.largest = max(self.largest, value)
        return "warn" if self.in_a_row == 3 else "info", limit

    def _accept(self, value: float) -> None:
        self.level.accept(value)
        self.largest = max(value, self.largest * 0.998)  # why: forgets half in 350 readings, as policies do
        self.in_a_row = 0

    def state_dict(self) -> dict[str, Any]:
        """Return the state, ready for JSON."""
        return {"level": self.level.state_dict(), "largest": self.largest, "in_a_row": self.in_a_row}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        self.level.load_state_dict(state["level"])
        self.largest, self.in_a_row = float(state["largest"]), int(state["in_a_row"])


class _Extremes:
    """Several metrics of one kind; each is judged by itself."""

    name = ""
    needs = "metrics"

    def __init__(self) -> None:
        self._parts = self._made()

    def _made(self) -> dict[str, Extreme]:
        raise NotImplementedError

    def _value(self, name: str, metrics: Mapping[str, float]) -> float | None:
        return metrics.get(name)

    def update(self, signals: Signals) -> tuple[Finding, ...]:
        """Return a finding for each metric that is far beyond its own past."""
        metrics = policy_metrics(signals) if signals.metrics else NO_METRICS
        found = []
        for name, part in self._parts.items():
            value = self._value(name, metrics)
            if value is None:
                continue
            severity, limit = part.judge(value)
            if severity != "info":
                found.append(self._said(name, value, limit, severity, part, signals.step))
        return tuple(found)

    def _said(self, name: str, value: float, limit: float, severity: Severity, part: Extreme, step: int) -> Finding:
        usual, since = part.level.median, step - part.in_a_row + 1
        what = f"{self._words(name)} is {self._shown(name, value):.3g}, its baseline is {self._shown(name, usual):.3g}"
        return finding(self.name, step, severity, value, limit, what, where=(name,), baseline=usual, since=since)

    def _words(self, name: str) -> str:
        return name

    def _shown(self, name: str, value: float) -> float:
        return value

    def state_dict(self) -> dict[str, Any]:
        """Return the state, ready for JSON."""
        return {name: part.state_dict() for name, part in self._parts.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        for name, part in self._parts.items():
            part.load_state_dict(state[name])


@final
class RatioExplosion(_Extremes):
    """Warns when importance ratios are far beyond their baseline for three updates; asks to refuse extreme updates.

    Ratios are compared as logarithms: 3 times the largest so far and above 100 is refused, at most 16 times in a row.
    """

    name = "ratio-explosion"

    def _made(self) -> dict[str, Extreme]:
        return {
            "ratio_max": Extreme(
                factor=2.0, floor=math.log(5.0), wild=3.0, wild_floor=math.log(100.0), most=_RATIOS_REFUSED
            ),
            "kl_old": Extreme(factor=10.0, floor=0.1, wild=20.0, wild_floor=1.0, most=_RATIOS_REFUSED),
            "clip_fraction": Extreme(factor=4.0, floor=0.5, wild=math.inf, wild_floor=math.inf),
        }

    def _value(self, name: str, metrics: Mapping[str, float]) -> float | None:
        value = metrics.get(name)
        if value is None or name != "ratio_max":
            return value
        return math.log(max(value, 1.0))

    def _shown(self, name: str, value: float) -> float:
        return math.exp(min(value, 50.0)) if name == "ratio_max" else value

    def _words(self, name: str) -> str:
        return {"ratio_max": "the largest importance ratio", "kl_old": "the KL to the old policy"}.get(name, name)


_MISMATCHED = {"mismatch": 0.1, "lost_samples": 0.5}  # medians that are too much from the start: nats, 1 - ess


@final
class PolicyMismatch(_Extremes):
    """Warns when sampler and learner disagree: beyond the run's own level, or by 0.1 nats or half of the samples.

    An update with ten times the largest disagreement so far (and 0.5 nats) is refused: they are not its samples.
    """

    name = "policy-mismatch"

    def __init__(self) -> None:
        super().__init__()
        self._told: list[str] = []

    def _made(self) -> dict[str, Extreme]:
        return {
            "mismatch": Extreme(factor=4.0, floor=0.05, wild=10.0, wild_floor=0.5),
            "mismatch_tail": Extreme(factor=6.0, floor=0.5, wild=math.inf, wild_floor=math.inf),
            "mismatch_kl": Extreme(factor=10.0, floor=0.02, wild=50.0, wild_floor=1.0),
            "lost_samples": Extreme(factor=4.0, floor=0.3, wild=math.inf, wild_floor=math.inf),
        }

    def _value(self, name: str, metrics: Mapping[str, float]) -> float | None:
        if name != "lost_samples":
            return metrics.get(name)
        ess = metrics.get("ess")
        return None if ess is None else 1.0 - ess

    def _words(self, name: str) -> str:
        return {
            "mismatch": "the mean difference of log-probabilities between sampler and learner",
            "mismatch_tail": "its 99th percentile between sampler and learner",
            "mismatch_kl": "the KL between sampler and learner",
            "lost_samples": "the share of samples lost to the mismatch of sampler and learner",
        }[name]

    def update(self, signals: Signals) -> tuple[Finding, ...]:
        """Return a finding for each metric that is beyond its past or beyond what any run can bear."""
        found = super().update(signals)
        for name, most in _MISMATCHED.items():
            level = self._parts[name].level
            if level.armed and level.median > most and name not in self._told:
                self._told.append(name)
                what = f"{self._words(name)} is {level.median:.3g} in most updates"
                found += (finding(self.name, signals.step, "warn", level.median, most, what, where=(name,)),)
            elif level.armed and level.median < 0.5 * most and name in self._told:
                self._told.remove(name)
        return found

    def state_dict(self) -> dict[str, Any]:
        """Return the state, ready for JSON."""
        return {"parts": super().state_dict(), "told": list(self._told)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        super().load_state_dict(state["parts"])
        self._told = [str(name) for name in state["told"]]
