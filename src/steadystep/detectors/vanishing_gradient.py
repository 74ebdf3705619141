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
        self._names: tuple[str, ...] = ()
        self._ends: tuple[list[int], list[int]] = ([], [])

    def update(self, signals: Signals) -> tuple[Finding, ...]:
        """A warning when four evaluations in a row agree, once until the gradient comes back."""
        if signals.step % _EVERY_STEPS or not signals.grad_norm < math.inf:
            return ()
        if signals.names != self._names:
            self._names, self._ends = signals.names, _ends(signals.names)
        low, high = ([signals.norms[i] for i in end] for end in self._ends)
        if not low or not all(map(math.isfinite, low + high)):
            return ()
        first, last = median_low(low), median_low(high)
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
                where=tuple(signals.names[i] for i in self._ends[0]),
                since=max(0, signals.step - _EVERY_STEPS * (_PATIENCE - 1)),
            ),
        )

    def state_dict(self) -> dict[str, Any]:
        """JSON-ready state."""
        return {"in_a_row": self._in_a_row}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        self._in_a_row = int(state["in_a_row"])


def _ends(names: tuple[str, ...]) -> tuple[list[int], list[int]]:
    """Positions of the first and the last quarter of the weights; none when there is no depth."""
    weights = [i for i, name in enumerate(names) if name.endswith("weight")]
    quarter = len(weights) // 4 if len(weights) >= _FEWEST else 0
    return weights[:quarter], weights[len(weights) - quarter :]
