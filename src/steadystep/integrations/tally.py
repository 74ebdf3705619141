"""What became of a run's steps, as the numbers a framework's own loggers take."""

import math
from typing import final

from steadystep.records import Outcome


@final
class Tally:
    """Counts outcomes; holds the last one's true numbers."""

    def __init__(self) -> None:
        self._refused = self._rollbacks = self._clipped = self._incidents = 0
        self._last: Outcome | None = None

    def add(self, outcome: Outcome) -> None:
        """One more step."""
        self._last = outcome
        self._refused += not outcome.stepped
        self._rollbacks += outcome.restored is not None
        self._clipped += outcome.clipped
        self._incidents += bool(outcome.plan.steps)

    def numbers(self) -> dict[str, float]:
        """Under names of our own. A loss or norm that is NaN stays NaN: no filter."""
        last = self._last
        if last is None:
            return {}
        norm = math.nan if last.signals is None else last.signals.grad_norm
        return {
            "steadystep/loss": last.loss,
            "steadystep/grad_norm": norm,
            "steadystep/incidents": float(self._incidents),
            "steadystep/refused": float(self._refused),
            "steadystep/rollbacks": float(self._rollbacks),
            "steadystep/clipped": float(self._clipped),
            "steadystep/lr_mult": last.lr_mult,
        }
