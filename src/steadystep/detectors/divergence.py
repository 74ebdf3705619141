"""A loss that multiplies in the first steps, before anything was learned: the first updates were far too large.

Nothing is known yet about how this run's losses scatter, so they are compared with the very first one. In healthy runs
of 17 kinds the loss of the first 64 steps stayed below 8 times the first one; here it takes a hundred times. A value
function whose first targets are zero does that too, so what follows is for weights from before to decide
(`diagnosis/counterfactual.py`).
"""

import math
from typing import Any, final

from steadystep.detectors.learning_rate_jump import PlannedRise
from steadystep.records import Finding, Severity, Signals

_NOTHING: tuple[Finding, ...] = ()
_YOUNG = 64  # steps: later, states that have learned something are in memory, and other detectors are armed
_TIMES = 100.0
_AT_ONCE = 1e4  # times: no second loss is waited for
_RISEN = 3.0  # times: when it began
_AGAIN = 8  # losses in a row, after which it is asked once more: each time costs a few forward passes


@final
class EarlyDivergence:
    """Asks for action at the second loss in a row that is a hundred times the first one of the run."""

    name = "early-divergence"

    def __init__(self) -> None:
        self._first: float | None = None
        self._seen = 0
        self._since: int | None = None
        self._in_a_row = 0
        self._asked = False

    def update(self, signals: Signals) -> tuple[Finding, ...]:
        """Return at most one finding, in the first 64 steps; losses that are not finite or positive do not count."""
        if self._seen >= _YOUNG:
            return _NOTHING
        loss = signals.loss
        if not math.isfinite(loss):
            return _NOTHING
        self._seen += 1
        if self._first is None:
            self._first = loss
            return _NOTHING
        if not loss > _RISEN * self._first or not self._first > 0.0:
            self._since, self._in_a_row = None, 0
            return _NOTHING
        self._since = signals.step if self._since is None else self._since
        limit = _TIMES * self._first
        self._in_a_row = self._in_a_row + 1 if loss > limit else 0
        return self._judge(signals, limit) if self._in_a_row else _NOTHING

    def _judge(self, signals: Signals, limit: float) -> tuple[Finding, ...]:
        assert self._first is not None
        sure = self._in_a_row > 1 or signals.loss > _AT_ONCE * self._first
        asks = sure and (not self._asked or self._in_a_row == _AGAIN)
        self._asked = self._asked or asks
        severity: Severity = "act" if asks else "info"
        return (
            Finding(
                detector=self.name,
                step=signals.step,
                severity=severity,
                value=signals.loss,
                limit=limit,
                baseline=self._first,
                since=self._since,
                what=f"the loss rose from {self._first:.3g} to {signals.loss:.3g} in the first steps: updates are "
                "far too large",
            ),
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the state, ready for JSON."""
        return {
            "first": self._first,
            "seen": self._seen,
            "since": self._since,
            "in_a_row": self._in_a_row,
            "asked": self._asked,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        self._first = None if state["first"] is None else float(state["first"])
        self._since = None if state["since"] is None else int(state["since"])
        self._seen, self._in_a_row, self._asked = int(state["seen"]), int(state["in_a_row"]), bool(state["asked"])


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
        """Return a finding at most once per window."""
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
            baseline=self._best,
            since=self._best_step,
            what=f"the loss is about {median:.4g}; it was {self._best:.4g} around step {self._best_step}",
        )
        # Said once; from here on the present level is what better and worse are measured by.
        self._best, self._best_step, self._worse = median, signals.step, 0
        return (found,)

    def state_dict(self) -> dict[str, Any]:
        """Return the state, ready for JSON."""
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


_RISE = 2.0  # from its first value to its top: less is no warm-up


@final
class ShortWarmup:
    """Notes once, at the end of the warmup, that it was shorter than 2 / (1 - beta2) steps.

    A run without any warmup is left alone.

    Args:
        beta2: decay of Adam's second moment.
    """

    name = "short-warmup"

    def __init__(self, *, beta2: float) -> None:
        self._needed = 2.0 / (1.0 - beta2)
        self._first: float | None = None
        self._last = 0.0
        self._steps = 0
        self._done = False

    def update(self, signals: Signals) -> tuple[Finding, ...]:
        """Return a finding at the first step whose learning rate is no higher than the one before."""
        lr = signals.lr
        if self._done or not 0.0 <= lr < float("inf"):
            return ()
        if self._first is None:
            self._first = self._last = lr
            return ()
        self._steps += 1
        if lr > self._last:
            self._last = lr
            return ()
        self._done = True
        if self._last < _RISE * self._first or self._steps <= 1 or self._steps >= self._needed:
            return ()
        what = f"the warmup took {self._steps - 1} steps; Adam's second moment settles in about {self._needed:.0f}"
        return (
            Finding(
                detector=self.name,
                step=signals.step,
                severity="info",
                value=float(self._steps - 1),
                limit=self._needed,
                what=what,
            ),
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the state, ready for JSON."""
        return {"first": self._first, "last": self._last, "steps": self._steps, "done": self._done}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        self._first = None if state["first"] is None else float(state["first"])
        self._last, self._steps, self._done = float(state["last"]), int(state["steps"]), bool(state["done"])
