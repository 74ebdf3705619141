"""Gradients that are exactly zero: an output that cannot learn, or a branch that nothing reaches."""

import math
from typing import Any, final

from steadystep.records import Finding, Signals

_STEPS = 8
_EVERY_STEPS = 4
_EVALUATIONS = 64


@final
class ZeroGradient:
    """Warns when all gradients are zero for 8 steps; notes single tensors that have had none for 256.

    Single ones are only worth a note: frozen branches and experts that were never chosen are no faults.
    """

    name = "zero-gradient"

    def __init__(self) -> None:
        self._in_a_row = 0
        self._zeros: dict[str, int] = {}

    def update(self, signals: Signals) -> tuple[Finding, ...]:
        """One warning or note when the count is reached; again only after a gradient came."""
        if signals.grad_norm != 0.0:
            if signals.grad_norm < math.inf:
                self._in_a_row = 0
            return self._single(signals) if signals.step % _EVERY_STEPS == 0 else ()
        if not math.isfinite(signals.loss):
            return ()
        self._in_a_row += 1
        if self._in_a_row != _STEPS:
            return ()
        since = max(0, signals.step - _STEPS + 1)
        what = f"every gradient has been exactly zero for {_STEPS} steps: an output that cannot learn"
        return (
            Finding(
                detector=self.name, step=signals.step, severity="warn", value=0.0, limit=0.0, what=what, since=since
            ),
        )

    def _single(self, signals: Signals) -> tuple[Finding, ...]:
        if 0.0 not in signals.norms:
            if self._zeros:
                self._zeros = {}
            return ()
        if not math.isfinite(signals.grad_norm):
            return ()
        zeros = (n for n, x in zip(signals.names, signals.norms, strict=False) if x == 0.0)
        self._zeros = {name: self._zeros.get(name, 0) + 1 for name in zeros}
        where = tuple(name for name, count in self._zeros.items() if count == _EVALUATIONS)
        if not where:
            return ()
        return (
            Finding(
                detector=self.name,
                step=signals.step,
                severity="info",
                value=0.0,
                limit=0.0,
                what="some tensors never get a gradient while others do",
                where=where,
            ),
        )

    def state_dict(self) -> dict[str, Any]:
        """JSON-ready state."""
        return {"in_a_row": self._in_a_row, "zeros": dict(self._zeros)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        self._in_a_row = int(state["in_a_row"])
        self._zeros = {name: int(count) for name, count in state["zeros"].items()}
