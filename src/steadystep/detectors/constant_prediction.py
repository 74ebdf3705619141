"""A model that its first updates have thrown so far off that it now predicts the same for every input.

Its loss leaps up in the first steps and comes to rest where it began, at what guessing costs. Waiting does not help:
saturated or dead units pass no gradient on.
"""

import math
from statistics import median
from typing import Any, final

from steadystep.records import Finding, Signals

_NOTHING: tuple[Finding, ...] = ()
_BLOCK = 64
_EARLY = 64  # steps in which it leaps
_RUN = 5  # losses in a row, of which the median counts
_LEAP = 1.5  # times the first loss, and times the largest of the last 64: noise does not do that five times in a row
_NOTHING_LEARNED = 0.7  # of the first loss; guessing letters by their frequency gives 0.8 of guessing them evenly
_FLAT = 0.01  # of the first loss, between blocks
_FLAT_BLOCKS = 3
_PATIENCE = 512  # steps: a run that is not back at its start by then is something else


@final
class ConstantPrediction:
    """A warning, once: a leap in the first 64 steps, then three windows of 64 losses at rest near the first loss."""

    name = "constant-prediction"

    def __init__(self) -> None:
        self._first: float | None = None
        self._losses: list[float] = []
        self._peak = 0.0
        """The largest median of five losses in a row among the first ones."""
        self._levels: list[float] = []
        self._seen = 0
        self._done = False

    def update(self, signals: Signals) -> tuple[Finding, ...]:
        """At most one finding in a run; losses that are not finite do not count."""
        if self._done:
            return _NOTHING
        loss = signals.loss
        if not math.isfinite(loss):
            return _NOTHING
        if self._first is None:
            self._first = loss
        self._seen += 1
        self._losses.append(loss)
        if self._seen <= _EARLY and len(self._losses) >= _RUN:
            self._peak = max(self._peak, median(self._losses[-_RUN:]))
        return self._judge(signals) if self._seen % _BLOCK == 0 else _NOTHING

    def _judge(self, signals: Signals) -> tuple[Finding, ...]:
        last, self._losses = self._losses, []
        first = self._first
        assert first is not None
        self._levels = [*self._levels[1 - _FLAT_BLOCKS :], median(last)]
        self._done = not first > 0.0 or self._peak <= _LEAP * first or self._seen >= _PATIENCE
        if self._done or len(self._levels) < _FLAT_BLOCKS or self._seen <= _EARLY:
            return _NOTHING
        level = self._levels[-1]
        rests = max(self._levels) - min(self._levels) <= _FLAT * first
        if not rests or level < _NOTHING_LEARNED * first or self._peak <= _LEAP * max(last):
            return _NOTHING
        self._done = True
        what = f"the loss leapt from {first:.4g} to {self._peak:.4g} in the first steps and has come to rest at"
        what += f" {level:.4g}: the model predicts the same for every input"
        return (
            Finding(
                detector=self.name,
                step=signals.step,
                severity="warn",
                value=level,
                limit=_NOTHING_LEARNED * first,
                usual=first,
                what=what,
            ),
        )

    def state_dict(self) -> dict[str, Any]:
        """JSON-ready state."""
        return {
            "first": self._first,
            "losses": list(self._losses),
            "peak": self._peak,
            "levels": list(self._levels),
            "seen": self._seen,
            "done": self._done,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        self._first = None if state["first"] is None else float(state["first"])
        self._losses = [float(loss) for loss in state["losses"]]
        self._levels = [float(level) for level in state["levels"]]
        self._peak, self._seen, self._done = float(state["peak"]), int(state["seen"]), bool(state["done"])
