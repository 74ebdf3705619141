"""One loss far above the others. Real pre-training is full of them and nearly all heal: a note, never an alarm."""

import math
from typing import Any, final

from steadystep.detectors.learning_rate_jump import PlannedRise
from steadystep.records import Finding, Severity, Signals
from steadystep.stats import Level


@final
class LossSpike:
    """Notes a loss more than `deviations` sigma above its median.

    Args:
        deviations: standard deviations above the median.
        history: number of past losses to compare with.
    """

    name = "loss-spike"

    def __init__(self, *, deviations: float = 8.0, history: int = 128) -> None:
        self._deviations = deviations
        self._level = Level(history)

    def update(self, signals: Signals) -> tuple[Finding, ...]:
        """Return a note when this loss is an outlier."""
        loss, level = signals.loss, self._level
        if loss - loss != 0.0:
            return ()
        if not level.armed or loss <= level.median:
            level.accept(loss)
            return ()
        floor = signals.loss_eps * 4.0 * abs(level.median)
        limit = level.median + self._deviations * max(level.spread, floor)
        if loss <= limit:
            level.accept(loss)
            return ()
        baseline = level.median
        if level.reject(loss, agreement=limit - baseline):
            return ()
        what = f"the loss jumped to {loss:.4g} from {baseline:.4g}"
        return (
            Finding(
                detector=self.name,
                step=signals.step,
                severity="info",
                value=loss,
                limit=limit,
                baseline=baseline,
                what=what,
            ),
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the state, ready for JSON."""
        return self._level.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        self._level.load_state_dict(state)


_MATERIAL = 0.02  # of the loss itself and of the progress made: less is not worth an intervention
_NOTE_AT = 6  # raised losses in a row, less those in between that were not
_WARN_AT, _WARN_AT_LOST = 36, 18  # so many for a warning; the second where half of what was learned is lost
_LOST, _GRAVE = 0.5, 0.25  # of the progress made; the second is worth a rollback
_AGAIN = 2.0  # times the longest such stretch of this run that healed by itself: one like it is no news
_EDGE = 6  # losses at either end of a stretch, for its trend
_HEALING = 0.7  # of where it began: what is on its way down needs no help
_PATIENCE = 64  # of them in agreement are the new level of this run
_SIGNED = 128  # losses for which a negative one is remembered


@final
class NotHealing:
    """Notes six losses in a row that are `deviations` sigma up, by an amount that matters; warns if they last.

    It warns at 36, or at 18 where half of the progress is lost, and not before twice the longest stretch that has
    healed by itself; nor where the loss is falling again, nor where it has been negative, as with policy gradients,
    whose level means little. Instead of a warning it asks for action where a quarter of the progress is lost. Harder
    data does the same, so it is a reason to compare weights (diagnosis/counterfactual.py).

    Args:
        deviations: standard deviations above the level.
        history: number of past losses to compare with.
    """

    name = "not-healing"

    def __init__(self, *, deviations: float = 8.0, history: int = 128) -> None:
        self._deviations = deviations
        self._level = Level(history, patience=_PATIENCE)
        self._rise = PlannedRise()
        self._first = math.nan
        self._count = 0
        self._since = 0
        self._raised: list[float] = []
        """Losses of the present stretch: the first few and the last few."""
        self._warned = False
        self._peak = 0
        """The highest count of the present stretch."""
        self._healed = 0
        """The highest count of a stretch that healed."""
        self._signed = 0

    def update(self, signals: Signals) -> tuple[Finding, ...]:
        """Return a finding at the sixth raised loss in a row, and again when it lasts."""
        loss, level = signals.loss, self._level
        if loss - loss != 0.0:
            return ()
        self._signed = _SIGNED if loss < 0.0 else self._signed - (self._signed > 0)
        if self._rise.update(signals.lr, signals.announced_lr):
            level.start_again()
            self._end()
        if not level.armed or loss <= level.median or loss <= self._limit(signals):
            level.accept(loss)
            if self._first != self._first:
                self._first = loss
            if self._count:
                self._count -= 1
                if not self._count:
                    self._healed = max(self._healed, self._peak)
                    self._end()
            return ()
        self._since = self._since if self._count else signals.step
        baseline, limit = level.median, self._limit(signals)
        self._count += 1
        self._peak = max(self._peak, self._count)
        self._raised.append(loss)
        del self._raised[_EDGE:-_EDGE]
        if level.reject(loss, agreement=2.0 * (limit - baseline)):
            self._end()
        return self._said(signals, baseline, limit)

    def _said(self, signals: Signals, baseline: float, limit: float) -> tuple[Finding, ...]:
        if self._count < _NOTE_AT:
            return ()
        begun, now = (sum(part) / len(part) - baseline for part in (self._raised[:_EDGE], self._raised[-_EDGE:]))
        lost = now >= _LOST * (self._first - baseline)
        grave = max(_WARN_AT_LOST if lost else _WARN_AT, int(_AGAIN * self._healed))
        loud = self._count >= grave and not self._warned and not self._signed and not now < _HEALING * begun
        self._warned = self._warned or loud
        if not loud and self._count != _NOTE_AT:
            return ()
        severity: Severity = "act" if now >= _GRAVE * (self._first - baseline) else "warn"
        return (self._finding(signals, baseline, limit, severity if loud else "info"),)

    def _limit(self, signals: Signals) -> float:
        baseline = self._level.median
        material = _MATERIAL * max(abs(baseline), self._first - baseline)
        noise = self._deviations * max(self._level.spread, 4.0 * signals.loss_eps * abs(baseline))
        return baseline + max(noise, material)

    def _end(self) -> None:
        self._count = self._peak = 0
        self._raised, self._warned = [], False

    def _finding(self, signals: Signals, baseline: float, limit: float, severity: Severity) -> Finding:
        return Finding(
            detector=self.name,
            step=signals.step,
            severity=severity,
            value=signals.loss,
            limit=limit,
            baseline=baseline,
            since=self._since,
            what=f"the loss rose from {baseline:.4g} to {signals.loss:.4g} at step {self._since} and has not recovered",
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the state, ready for JSON."""
        return {
            "level": self._level.state_dict(),
            "rise": self._rise.state_dict(),
            "first": None if self._first != self._first else self._first,
            "count": self._count,
            "since": self._since,
            "raised": list(self._raised),
            "stretch": [self._peak, self._healed, self._signed, self._warned],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        self._level.load_state_dict(state["level"])
        self._rise.load_state_dict(state["rise"])
        self._first = math.nan if state["first"] is None else float(state["first"])
        self._count, self._since = int(state["count"]), int(state["since"])
        self._raised = [float(loss) for loss in state["raised"]]
        self._peak, self._healed, self._signed = (int(value) for value in state["stretch"][:3])
        self._warned = bool(state["stretch"][3])
