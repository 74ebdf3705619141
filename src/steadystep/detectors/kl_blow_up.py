"""A policy that runs away from its reference."""

from typing import Any, final

from steadystep.detectors.metric_words import words
from steadystep.records import Finding, Signals
from steadystep.stats import Level

_FACTOR = 10.0  # times the usual; a KL that is allowed to grow doubles within a window, it does not grow tenfold
_DEVIATIONS = 8.0
_FLOOR = 0.1  # nats: below, ten times as much is still close
_IN_A_ROW = 3


@final
class KlBlowUp:
    """Warns when a metric with "kl" in its name is far above its own level for three steps in a row.

    Twelve such values that agree with each other are a new level.
    """

    name = "kl-blow-up"
    needs = "metrics"

    def __init__(self) -> None:
        self._levels: dict[str, Level] = {}

    def update(self, signals: Signals) -> tuple[Finding, ...]:
        """A finding for each KL that has just left its level."""
        if not signals.metrics:
            return ()
        watched = [(name, value) for name, value in signals.metrics.items() if "kl" in words(name)]
        found = [self._look(name, value, signals.step) for name, value in watched]
        return tuple(finding for finding in found if finding is not None)

    def _look(self, name: str, value: float, step: int) -> Finding | None:
        level = self._levels.setdefault(name, Level(64, armed_after=16))
        if value - value != 0.0:
            return None
        if not level.armed:
            level.accept(value)
            return None
        usual = level.median
        limit = max(_FLOOR, _FACTOR * usual, usual + _DEVIATIONS * level.spread)
        if value <= limit:
            level.accept(value)
            return None
        moved = level.reject(value, agreement=abs(value))
        if moved or level.rejected_in_a_row != _IN_A_ROW:
            return None
        what = f"{name} is {value:.3g}, it used to be {usual:.3g}"
        return Finding(
            detector=self.name,
            step=step,
            severity="warn",
            value=value,
            limit=limit,
            usual=usual,
            what=what,
            since=step - _IN_A_ROW + 1,
        )

    def state_dict(self) -> dict[str, Any]:
        """JSON-ready state."""
        return {name: level.state_dict() for name, level in self._levels.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        self._levels = {}
        for name, saved in state.items():
            self._levels[name] = Level(64, armed_after=16)
            self._levels[name].load_state_dict(saved)
