"""A jump of the loss that stays. One that heals is gone after a step or two; damaged weights keep it up."""

import math
from typing import Any, final

from steadystep.detectors.planned_rise import PlannedRise
from steadystep.records import Finding, Signals
from steadystep.stats import Level

_MATERIAL = 0.02  # of the loss itself and of the progress made: less is not worth an intervention
_LOST = 0.5  # of the progress made
_SPEAK_AT = (6, 18, 36)  # raised losses in a row, less those in between that were not
_PATIENCE = 48  # of them in agreement are the new level of this run


@final
class NotHealing:
    """Speaks after six losses that are all `deviations` sigma above the level, by an amount that matters.

    Harder data does that too, so by itself it is a warning, unless half of what was learned is lost. An old batch can
    make it more or less than that (diagnosis/testimony.py).
    """

    name = "not-healing"

    def __init__(self, *, deviations: float = 8.0, history: int = 128) -> None:
        self._deviations = deviations
        self._level = Level(history, patience=_PATIENCE)
        self._rise = PlannedRise()
        self._first = math.nan
        self._count = 0
        self._since = 0

    def update(self, signals: Signals) -> tuple[Finding, ...]:
        """A finding at the sixth raised loss in a row, and again when it lasts."""
        loss, level = signals.loss, self._level
        if loss - loss != 0.0:
            return ()
        if self._rise.update(signals.lr, signals.announced_lr):
            level.start_again()
            self._count = 0
        if not level.armed or loss <= level.median or loss <= self._limit(signals):
            level.accept(loss)
            if self._first != self._first:
                self._first = loss
            self._count -= self._count > 0
            return ()
        self._since = self._since if self._count else signals.step
        usual, limit = level.median, self._limit(signals)
        self._count += 1
        if level.reject(loss, agreement=2.0 * (limit - usual)):
            self._count = 0
        return (self._finding(signals, usual, limit),) if self._count in _SPEAK_AT else ()

    def _limit(self, signals: Signals) -> float:
        usual = self._level.median
        material = _MATERIAL * max(abs(usual), self._first - usual)
        noise = self._deviations * max(self._level.spread, 4.0 * signals.loss_eps * abs(usual))
        return usual + max(noise, material)

    def _finding(self, signals: Signals, usual: float, limit: float) -> Finding:
        return Finding(
            detector=self.name,
            step=signals.step,
            severity="act" if signals.loss - usual >= _LOST * (self._first - usual) else "warn",
            value=signals.loss,
            limit=limit,
            usual=usual,
            since=self._since,
            what=f"the loss rose from {usual:.4g} to {signals.loss:.4g} and has not come back since step {self._since}",
        )

    def state_dict(self) -> dict[str, Any]:
        """JSON-ready state."""
        return {
            "level": self._level.state_dict(),
            "rise": self._rise.state_dict(),
            "first": None if self._first != self._first else self._first,
            "count": self._count,
            "since": self._since,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        self._level.load_state_dict(state["level"])
        self._rise.load_state_dict(state["rise"])
        self._first = math.nan if state["first"] is None else float(state["first"])
        self._count, self._since = int(state["count"]), int(state["since"])
