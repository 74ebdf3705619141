"""Sigmoids and tanhs stuck in their flat parts, where next to no gradient passes."""

import math
from typing import Any, final

from steadystep.detectors.runs import Runs
from steadystep.records import Finding, Signals

_LIMIT = 0.7
_LEARNT = 0.5  # of the first loss: below it, a classifier is sure of itself and saturates rightly
_QUIET_STEPS = 4


@final
class SaturatedUnits:
    """Warns once for each activation with over 70 % saturated values in three probes in a row and a loss still high.

    A loss that started at zero or below counts as high while it has not come down at all.
    """

    name = "saturated-units"

    def __init__(self) -> None:
        self._runs = Runs(3)
        self._first: float | None = None

    def update(self, signals: Signals) -> tuple[Finding, ...]:
        """One finding for all activations that have just proved saturated."""
        if self._first is None and math.isfinite(signals.loss):
            self._first = signals.loss
        probe = signals.probe
        if probe is None or not probe.saturated or probe.step <= _QUIET_STEPS:
            return ()
        high = self._is_high(signals.loss)
        shares = dict(zip(probe.modules, probe.saturated, strict=False))
        where = self._runs.add({name: high and share > _LIMIT for name, share in shares.items()})
        if not where:
            return ()
        worst = max(shares[name] for name in where)
        return (
            Finding(
                detector=self.name,
                step=signals.step,
                severity="warn",
                value=worst,
                limit=_LIMIT,
                what=f"up to {worst:.0%} of the values of a sigmoid or tanh are in its flat part",
                where=where,
            ),
        )

    def _is_high(self, loss: float) -> bool:
        if self._first is None:
            return False
        return loss > _LEARNT * self._first if self._first > 0.0 else loss >= self._first

    def state_dict(self) -> dict[str, Any]:
        """JSON-ready state."""
        return {"runs": self._runs.state_dict(), "first": self._first}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        self._runs.load_state_dict(state["runs"])
        self._first = None if state["first"] is None else float(state["first"])
