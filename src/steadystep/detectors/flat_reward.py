"""A reward that says nothing."""

from typing import Any, final

from steadystep.detectors.metric_words import words
from steadystep.records import Finding, Severity, Signals

_SAME, _NO_SPREAD = 48, 16  # readings in a row


@final
class FlatReward:
    """Speaks once when a reward has been exactly the same for 48 readings, or its spread 0 for 16.

    A warning; a note when the reward is above its first value: then the task may be solved. The next different value
    arms it again.
    """

    name = "flat-reward"
    needs = "metrics"

    def __init__(self) -> None:
        self._seen: dict[str, list[float]] = {}
        """First value, last value, how often in a row."""

    def update(self, signals: Signals) -> tuple[Finding, ...]:
        """A finding for each reward that has just become flat."""
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
        severity: Severity = "info" if not spread and value > seen[0] else "warn"
        return Finding(
            detector=self.name,
            step=step,
            severity=severity,
            value=value,
            limit=float(needed),
            what=f"{name} has been {value:.3g} for {needed} steps",
        )

    def state_dict(self) -> dict[str, Any]:
        """JSON-ready state."""
        return {name: list(seen) for name, seen in self._seen.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        self._seen = {name: [float(number) for number in seen] for name, seen in state.items()}


def _is_reward(name: frozenset[str]) -> bool:
    return "reward" in name and name.isdisjoint(("frac", "fraction", "zero", "count"))  # shares of something about it
