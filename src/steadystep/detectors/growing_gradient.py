"""A gradient norm that adds up step by step: the mark of a forgotten `zero_grad`."""

from itertools import pairwise
from typing import Any, final

from steadystep.records import Finding, Signals

_NOTHING: tuple[Finding, ...] = ()
_RAMP = 32
_EVERY = 16
_FULL = _RAMP - 1 + _EVERY  # each of 16 steps is tried once as the start of a ramp
_EDGES = (0, 1, 2, 4, 8, 16, 32)
_SMALLEST, _LARGEST = 1.2, 3.0  # growth per doubling of the time: 2 if gradients agree, 1.4 if they are independent
_GROWTH = 8.0
_RISING = 0.85


@final
class GrowingGradient:
    """Looks for a ramp that starts anywhere: each doubling of the time since then about doubles the norm.

    Gradients that are never cleared add up: n(t) = |g_1 + ... + g_t|, so the mean norm of steps 1, 2, 3-4, 5-8, 9-16
    and 17-32 grows by a factor of about two each time. An explosion grows faster and faster, a warm-up or a drift
    far more slowly, and neither rises on 85 of 100 steps. Heard once per `quiet_steps`.
    """

    name = "growing-gradient"

    def __init__(self, *, quiet_steps: int = 2000) -> None:
        self._quiet_windows = max(1, quiet_steps // _EVERY)
        self._norms: list[float] = []
        self._full = _RAMP
        self._rest = 0

    def update(self, signals: Signals) -> tuple[Finding, ...]:
        """At most one finding, every 16 norms; those that are not finite do not count."""
        norm = signals.grad_norm
        if norm - norm == 0.0:
            self._norms.append(norm)
            if len(self._norms) == self._full:
                return self._judge(signals)
        return _NOTHING

    def _judge(self, signals: Signals) -> tuple[Finding, ...]:
        norms = self._norms
        self._norms = norms[1 - _RAMP :]
        self._full = _FULL
        starts = norms[: 1 - _RAMP]
        if self._rest:
            self._rest -= 1
            return _NOTHING
        if max(norms[_RAMP - 1 :]) < _GROWTH * min(starts):
            return _NOTHING
        for start in range(len(starts)):
            growth = _growth(norms[start : start + _RAMP])
            if growth >= _GROWTH:
                self._rest = self._quiet_windows
                return (self._finding(signals, growth, began=len(norms) - 1 - start),)
        return _NOTHING

    def _finding(self, signals: Signals, growth: float, began: int) -> Finding:
        return Finding(
            detector=self.name,
            step=signals.step,
            severity="warn",
            value=growth,
            limit=_GROWTH,
            what=f"the gradient norm grew {growth:.0f}-fold in {_RAMP} steps, as if gradients were never cleared",
            since=max(0, signals.step - began),
        )

    def state_dict(self) -> dict[str, Any]:
        """JSON-ready state."""
        return {"norms": list(self._norms), "full": self._full, "rest": self._rest}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        self._norms = [float(x) for x in state["norms"]]
        self._full, self._rest = int(state["full"]), int(state["rest"])


def _growth(ramp: list[float]) -> float:
    """From the first block to the last one; 0.0 for what is no steady ramp."""
    means = [sum(ramp[a:b]) / (b - a) for a, b in pairwise(_EDGES)]
    for before, after in pairwise(means):
        if not _SMALLEST * before <= after <= _LARGEST * before or before <= 0.0:
            return 0.0
    rising = sum(after > before for before, after in pairwise(ramp))
    return means[-1] / means[0] if rising >= _RISING * (len(ramp) - 1) else 0.0
