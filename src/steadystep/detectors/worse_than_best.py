"""The run was better once: the median of the last windows lies above the best one."""

import math
from typing import Any, final

from steadystep.detectors.planned_rise import PlannedRise
from steadystep.records import Finding, Signals

_WINDOW = 64
_SIGNED = 8  # windows for which a negative loss is remembered
_LASTS = 3  # windows in a row
_MATERIAL = 0.03  # of the best, and of the progress made


@final
class WorseThanBest:
    """Warns when three windows of 64 losses are all worse than the best one by more than the noise of a single loss."""

    name = "worse-than-best"

    def __init__(self) -> None:
        self._rise = PlannedRise()
        self._losses: list[float] = []
        self._first = self._best = math.nan
        self._best_step = 0
        self._worse = 0
        self._signed = 0

    def update(self, signals: Signals) -> tuple[Finding, ...]:
        """Judged once per window."""
        loss = signals.loss
        if loss - loss != 0.0:
            return ()
        if self._rise.update(signals.lr, signals.announced_lr):
            self._losses, self._best, self._worse = [], math.nan, 0
        self._losses.append(loss)
        return self._judge(signals) if len(self._losses) >= _WINDOW else ()

    def _judge(self, signals: Signals) -> tuple[Finding, ...]:
        ordered = sorted(self._losses)
        self._losses = []
        # A negative loss (policy gradients) may rise for good reasons: its level says nothing.
        self._signed = _SIGNED if ordered[0] < 0.0 else max(self._signed - 1, 0)
        median, noise = ordered[_WINDOW // 2], (ordered[54] - ordered[9]) / 2.0
        if math.isnan(self._first):
            self._first = median
        if not median > self._best:
            self._best, self._best_step, self._worse = median, signals.step, 0
            return ()
        if self._signed:
            return ()
        margin = max(noise, _MATERIAL * abs(self._best), _MATERIAL * (self._first - self._best))
        if median - self._best <= margin:
            self._worse = 0
            return ()
        self._worse += 1
        if self._worse < _LASTS:
            return ()
        found = Finding(
            detector=self.name,
            step=signals.step,
            severity="warn",
            value=median,
            limit=self._best + margin,
            usual=self._best,
            since=self._best_step,
            what=f"the loss is about {median:.4g}; around step {self._best_step} it was {self._best:.4g}",
        )
        # Said once; from here on the present level is what better and worse are measured by.
        self._best, self._best_step, self._worse = median, signals.step, 0
        return (found,)

    def state_dict(self) -> dict[str, Any]:
        """JSON-ready state."""
        levels = [None if math.isnan(v) else v for v in (self._first, self._best)]
        return {
            "rise": self._rise.state_dict(),
            "losses": list(self._losses),
            "levels": levels,
            "best_step": self._best_step,
            "worse": self._worse,
            "signed": self._signed,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        self._rise.load_state_dict(state["rise"])
        self._losses = [float(loss) for loss in state["losses"]]
        self._first, self._best = (math.nan if v is None else float(v) for v in state["levels"])
        self._best_step, self._worse, self._signed = (int(state[key]) for key in ("best_step", "worse", "signed"))
