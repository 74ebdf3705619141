"""A policy that has stopped exploring."""

from typing import Any, final

from steadystep.detectors.metric_words import words
from steadystep.records import Finding, Severity, Signals

_FIRST, _RECENT = 16, 8  # readings
_COLLAPSED, _BACK = 0.05, 0.2  # of the entropy at the beginning


@final
class EntropyCollapse:
    """Speaks when a metric with "entropy" in its name has come down to a twentieth of what it was at the beginning.

    A warning; a note when a reward has risen since: then the policy may simply know what to do.
    """

    name = "entropy-collapse"
    needs = "metrics"

    def __init__(self) -> None:
        self._first: dict[str, list[float]] = {}
        self._recent: dict[str, list[float]] = {}
        self._told: list[str] = []

    def update(self, signals: Signals) -> tuple[Finding, ...]:
        """A finding for each entropy that has just collapsed."""
        if not signals.metrics:
            return ()
        watched = [name for name in signals.metrics if words(name) & {"entropy", "reward"}]
        for name in watched:
            self._learn(name, signals.metrics[name])
        found = [self._look(name, signals.step) for name in watched if "entropy" in words(name)]
        return tuple(finding for finding in found if finding is not None)

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
        what = f"{name} has come down from {before:.3g} to {now:.3g}"
        limit = _COLLAPSED * before
        severity: Severity = "info" if self._better() else "warn"
        return Finding(
            detector=self.name,
            step=step,
            severity=severity,
            value=now,
            limit=limit,
            usual=before,
            what=what,
        )

    def _better(self) -> bool:
        rewards = [name for name in self._recent if "reward" in words(name) and "std" not in words(name)]
        return any(_median(self._recent[name]) > max(self._first[name]) for name in rewards)

    def state_dict(self) -> dict[str, Any]:
        """JSON-ready state."""
        return {
            "first": {name: list(values) for name, values in self._first.items()},
            "recent": {name: list(values) for name, values in self._recent.items()},
            "told": list(self._told),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        self._first = {name: [float(v) for v in values] for name, values in state["first"].items()}
        self._recent = {name: [float(v) for v in values] for name, values in state["recent"].items()}
        self._told = [str(name) for name in state["told"]]


def _median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]
