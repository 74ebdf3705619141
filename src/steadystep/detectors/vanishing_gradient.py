"""Gradients that fade on their way down: the first layers get next to nothing of what the last ones get."""

import math
from statistics import median_low
from typing import Any, final

from steadystep.records import Finding, Signals

_LIMIT = 1e-4
_EVERY_STEPS = 16
_PATIENCE = 4  # evaluations
_FEWEST = 4  # weight tensors: below, there is no depth to speak of


@final
class VanishingGradient:
    """Warns when the first quarter of the weights gets 1e-4 of the gradient of the last quarter, in medians.

    A ratio, so no scale of loss or data matters. Parameters are taken in the order in which the model names them.
    """

    name = "vanishing-gradient"

    def __init__(self) -> None:
        self._in_a_row = 0

    def update(self, signals: Signals) -> tuple[Finding, ...]:
        """A warning when four evaluations in a row agree, once until the gradient comes back."""
        if signals.step % _EVERY_STEPS or not signals.grad_norm < math.inf:
            return ()
        weights = [x for n, x in zip(signals.names, signals.norms, strict=False) if n.endswith("weight")]
        if len(weights) < _FEWEST or not all(map(math.isfinite, weights)):
            return ()
        quarter = len(weights) // 4
        first, last = median_low(weights[:quarter]), median_low(weights[-quarter:])
        if last <= 0.0:  # why: zero everywhere is another fault
            return ()
        ratio = first / last
        self._in_a_row = self._in_a_row + 1 if ratio < _LIMIT else 0
        if self._in_a_row != _PATIENCE:
            return ()
        return (
            Finding(
                detector=self.name,
                step=signals.step,
                severity="warn",
                value=ratio,
                limit=_LIMIT,
                what=f"the first layers get {ratio:.0e} of the gradient of the last ones",
                where=tuple(n for n in signals.names if n.endswith("weight"))[:quarter],
                since=max(0, signals.step - _EVERY_STEPS * (_PATIENCE - 1)),
            ),
        )

    def state_dict(self) -> dict[str, Any]:
        """JSON-ready state."""
        return {"in_a_row": self._in_a_row}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        self._in_a_row = int(state["in_a_row"])
