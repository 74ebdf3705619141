"""A gradient norm that adds up, from the first step on or later: the mark of a forgotten `zero_grad`."""

from itertools import pairwise
from typing import Any, final

from steadystep.detectors.piling import Piling
from steadystep.records import Finding, Signals

_NOTHING: tuple[Finding, ...] = ()
_RAMP = 32
_EDGES = (0, 1, 2, 4, 8, 16, 32)
_SMALLEST, _LARGEST = 1.2, 2.4  # growth per doubling of the time: 2 if gradients agree, 1.4 if they are independent
_GROWTH = 8.0
_MOST = 28.0  # gradients that agree perfectly reach 24.5; more than that is another story
_RISING = 0.85


@final
class GrowingGradient:
    """Judges the first 32 norms of a run, once: does each doubling of the time about double the norm?

    Gradients that are never cleared add up, n(t) = |g_1 + ... + g_t|, so the mean norm of steps 1, 2, 3-4, 5-8, 9-16
    and 17-32 grows by a factor of nearly two each time. An explosion grows faster and faster, a warm-up or a drift
    far more slowly. Later on a healthy net that leaves a flat region can grow like that; there norms must also have
    become smoother than those of single batches are (detectors/piling.py).
    """

    name = "growing-gradient"

    def __init__(self) -> None:
        self._norms: list[float] = []
        self._done = False
        self._piling = Piling()

    def update(self, signals: Signals) -> tuple[Finding, ...]:
        """At most one finding for the beginning, and one for each time later; what is not finite does not count."""
        if self._piling.update(signals):
            return (self._piled(signals),)
        if self._done:
            return _NOTHING
        norm = signals.grad_norm
        if norm - norm == 0.0:
            self._norms.append(norm)
            if len(self._norms) == _RAMP:
                return self._judge(signals)
        return _NOTHING

    def _judge(self, signals: Signals) -> tuple[Finding, ...]:
        norms, self._norms, self._done = self._norms, [], True
        growth = _growth(norms)
        if not _GROWTH <= growth <= _MOST:
            return _NOTHING
        what = f"the gradient norm grew {growth:.0f}-fold in {_RAMP} steps, as if gradients were never cleared"
        return (
            Finding(detector=self.name, step=signals.step, severity="warn", value=growth, limit=_GROWTH, what=what),
        )

    def _piled(self, signals: Signals) -> Finding:
        usual = self._piling.usual
        what = (
            f"the gradient norm climbed to {signals.grad_norm / usual:.2g} times its usual {usual:.3g} and differs far "
            "less from batch to batch than before, as if gradients were no longer cleared"
        )
        return Finding(
            detector=self.name,
            step=signals.step,
            severity="warn",
            value=signals.grad_norm,
            limit=self._piling.limit,
            usual=usual,
            since=max(0, signals.step - self._piling.num_steps),
            what=what,
        )

    def state_dict(self) -> dict[str, Any]:
        """JSON-ready state."""
        return {
            "norms": list(self._norms),
            "done": self._done,
            "piling": self._piling.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        self._norms = [float(norm) for norm in state["norms"]]
        self._done = bool(state["done"])
        if state.get("piling") is not None:  # older states do not have it
            self._piling.load_state_dict(state["piling"])


def _growth(norms: list[float]) -> float:
    """From the first block to the last one; 0.0 for what is no steady ramp."""
    means = [sum(norms[a:b]) / (b - a) for a, b in pairwise(_EDGES)]
    for before, after in pairwise(means):
        if not _SMALLEST * before <= after <= _LARGEST * before:
            return 0.0
    rising = sum(after > before for before, after in pairwise(norms))
    return means[-1] / means[0] if rising >= _RISING * (len(norms) - 1) else 0.0
