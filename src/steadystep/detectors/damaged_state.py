"""The optimizer's state, or a kept object such as averaged weights, that holds what no gradient has put there.

NaN in a moment is in the weights one update later. A momentum of 1e38 is harder to see: an optimizer that uses its sign
or its direction alone (Lion, Muon) takes finite updates that lead nowhere for thousands of steps.
"""

import math
from typing import Any, final

from steadystep.records import Finding, Signals
from steadystep.stats.absurd import is_absurd

_KEPT = "kept."
_LARGEST_GRADIENT = 1e10  # its square is far from where numbers count as absurd
_PATIENCE = 2  # looks in a row, after which it is this optimizer's way


@final
class DamagedState:
    """Asks for older values of what is NaN, infinite or beyond all numbers that training comes to."""

    name = "damaged-state"

    def __init__(self) -> None:
        self._clean = 0
        """The step of the last look at which all was well."""
        self._largest_gradient = 0.0
        self._in_a_row: dict[str, int] = {}

    def update(self, signals: Signals) -> tuple[Finding, ...]:
        """One finding for all tensors concerned."""
        if self._largest_gradient < signals.grad_norm < math.inf:
            self._largest_gradient = signals.grad_norm
        if not signals.state_peaks:
            return ()
        peaks = dict(zip(signals.state, signals.state_peaks, strict=True))
        bad = {name: peak for name, peak in peaks.items() if self._is_bad(peak)}
        told = {name: peak for name, peak in bad.items() if self._in_a_row.get(name, 0) < _PATIENCE}
        self._in_a_row = {name: self._in_a_row.get(name, 0) + 1 for name in bad}
        if not bad:
            self._clean = signals.step
        if not told:
            return ()
        # kept objects come last: what the optimizer holds goes into the next update
        where = sorted(told, key=lambda name: name.startswith(_KEPT))
        worst = told[where[0]]
        what = "not finite" if not math.isfinite(worst) else f"up to {worst:.1e}, and no gradient was"
        return (
            Finding(
                detector=self.name,
                step=signals.step,
                severity="act",
                value=worst,
                limit=_LARGEST_GRADIENT,
                what=f"{where[0]} is {what}",
                where=tuple(where),
                since=self._clean,
            ),
        )

    def _is_bad(self, peak: float) -> bool:
        return not math.isfinite(peak) or (is_absurd(peak) and self._largest_gradient < _LARGEST_GRADIENT)

    def state_dict(self) -> dict[str, Any]:
        """JSON-ready state."""
        return {"clean": self._clean, "gradient": self._largest_gradient, "in_a_row": dict(self._in_a_row)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        self._clean, self._largest_gradient = int(state["clean"]), float(state["gradient"])
        self._in_a_row = {str(name): int(count) for name, count in state["in_a_row"].items()}
