"""The reward that a policy reaches when its entropy is spent: R = -a e^H + b (Cui et al. 2025, arXiv 2505.22617).

Fitted by least squares on the run's own readings; at H = 0 the forecast is b - a. Plain numbers, resumable.
"""

import math
from typing import Any, final

_FEWEST = 32  # readings
_LEAST_FIT = 0.5  # share of the variance of the reward that the curve explains
_LARGEST_ENTROPY = 20.0  # nats: of a vocabulary of 5e8


@final
class CeilingFit:
    """Least squares of the reward on e^H.

    >>> fit = CeilingFit()
    >>> for i in range(40):
    ...     entropy = 2.0 - i / 40
    ...     fit.add(entropy=entropy, reward=1.0 - 0.1 * math.exp(entropy))
    >>> round(fit.a, 6), round(fit.b, 6), round(fit.ceiling, 6)
    (0.1, 1.0, 0.9)
    """

    def __init__(self) -> None:
        self._count = 0
        self._means = [0.0, 0.0]
        self._sums = [0.0, 0.0, 0.0]
        """Of squares of e^H around its mean, of the reward, and of their products (Welford 1962: no cancellation)."""

    def add(self, *, entropy: float, reward: float) -> None:
        """Learn one reading; what is not finite is left out."""
        if not (math.isfinite(entropy) and math.isfinite(reward)) or abs(reward) > 1e12:
            return
        x = math.exp(min(entropy, _LARGEST_ENTROPY))
        self._count += 1
        off_x, off_y = x - self._means[0], reward - self._means[1]
        self._means[0] += off_x / self._count
        self._means[1] += off_y / self._count
        self._sums[0] += off_x * (x - self._means[0])
        self._sums[1] += off_y * (reward - self._means[1])
        self._sums[2] += off_x * (reward - self._means[1])

    @property
    def a(self) -> float:
        """The slope: reward bought per unit of e^H; NaN without any spread."""
        return -self._sums[2] / self._sums[0] if self._sums[0] > 0.0 else math.nan

    @property
    def b(self) -> float:
        """The reward at e^H = 0."""
        return self._means[1] + self.a * self._means[0]

    @property
    def explained(self) -> float:
        """Share of the variance of the reward that the curve explains, 0 to 1."""
        size = self._sums[0] * self._sums[1]
        return min(self._sums[2] * self._sums[2] / size, 1.0) if size > 0.0 else 0.0

    @property
    def ceiling(self) -> float | None:
        """The forecast b - a at H = 0; None where the readings do not follow the curve."""
        known = self._count >= _FEWEST and self.a > 0.0 and self.explained >= _LEAST_FIT
        return self.b - self.a if known else None

    def state_dict(self) -> dict[str, Any]:
        """Return the state, ready for JSON."""
        return {"count": self._count, "means": list(self._means), "sums": list(self._sums)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        self._count = int(state["count"])
        self._means = [float(value) for value in state["means"]]
        self._sums = [float(value) for value in state["sums"]]
