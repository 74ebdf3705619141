"""Reinforcement learning: one vocabulary for what RL libraries log, a monitor that computes it, a forecast.

`Controls` is what a loop lets the guard do about its policy: play rollouts to compare policies, raise two coefficients.
"""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, final

from steadystep._utils import lazy_names
from steadystep.errors import MisuseError

if TYPE_CHECKING:
    from steadystep.rl.monitor import Monitor, grad_norms_by_sign
    from steadystep.rl.vocabulary import METRICS, Metric, canonical, translate

__all__ = ["METRICS", "CeilingFit", "Controls", "Metric", "Monitor", "canonical", "grad_norms_by_sign", "translate"]

__getattr__ = lazy_names(
    __name__,
    {
        "monitor": ("Monitor", "grad_norms_by_sign"),
        "vocabulary": ("METRICS", "Metric", "canonical", "translate"),
    },
)

_RAISE = 2.0  # times
_FROM_ZERO = 0.003  # the first entropy or KL coefficient where there was none
_MOST_RAISES = 4
_FEWEST = 32  # readings
_LEAST_FIT = 0.5  # share of the variance of the reward that the curve explains
_LARGEST_ENTROPY = 20.0  # nats: of a vocabulary of 5e8


@final
class Controls:
    """Gives a guard rollouts to compare policies with, and coefficients to raise: `guard.keep("policy", controls)`.

    With `evaluate`, autopilot rolls back when rollouts prove an earlier policy better; without it, it only warns.

    Args:
        evaluate: returns the reward of rollouts with the current weights; higher is better. Called 8 times for each
            state that is compared, again to confirm, each time with other random numbers. It must leave no trace.
        kl_coef: the KL coefficient of your loss; read `controls.kl_coef` in it.
        entropy_coef: the coefficient of the entropy bonus; read `controls.entropy_coef`.
        on_change: called with the name and the new value when one of them is raised.

    >>> controls = Controls(kl_coef=0.02, on_change=lambda name, value: print(name, value))
    >>> controls.raise_("kl_coef")
    kl_coef 0.04
    True
    >>> controls.kl_coef, controls.raise_("entropy_coef")
    (0.04, False)
    """

    def __init__(
        self,
        *,
        evaluate: Callable[[], float] | None = None,
        kl_coef: float | None = None,
        entropy_coef: float | None = None,
        on_change: Callable[[str, float], object] | None = None,
    ) -> None:
        if evaluate is not None and not callable(evaluate):
            raise MisuseError(f"evaluate must be a function without arguments, got {type(evaluate).__name__}")
        self.evaluate = evaluate
        self._on_change = on_change
        given = {"kl_coef": kl_coef, "entropy_coef": entropy_coef}
        self._values = {name: float(value) for name, value in given.items() if value is not None}
        for name, value in self._values.items():
            if not value >= 0.0:
                raise MisuseError(f"{name} = {value}: must not be negative")
        self._raised = dict.fromkeys(self._values, 0)

    @property
    def kl_coef(self) -> float:
        """The KL coefficient to use; 0 where none was given."""
        return self._values.get("kl_coef", 0.0)

    @property
    def entropy_coef(self) -> float:
        """The entropy coefficient to use; 0 where none was given."""
        return self._values.get("entropy_coef", 0.0)

    @property
    def names(self) -> tuple[str, ...]:
        """Coefficients that may be raised further: each is doubled four times at most."""
        return tuple(name for name in self._values if self._raised[name] < _MOST_RAISES)

    def raise_(self, name: str) -> bool:
        """Double a coefficient and report it; return False if it was not given or has been raised often enough."""
        if name not in self.names:
            return False
        self._values[name] = _RAISE * self._values[name] or _FROM_ZERO
        self._raised[name] += 1
        if self._on_change is not None:
            self._on_change(name, self._values[name])
        return True

    def state_dict(self) -> dict[str, Any]:
        """Return the state, ready for JSON."""
        return {"values": dict(self._values), "raised": dict(self._raised)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`; coefficients that differ are reported."""
        for name in self._values:
            value, raised = state["values"].get(name), state["raised"].get(name)
            if value is None or raised is None:
                continue
            # why: a rollback restores an earlier policy, but what was learned about the coefficient stays
            if raised >= self._raised[name]:
                changed, self._values[name], self._raised[name] = value != self._values[name], float(value), int(raised)
                if changed and self._on_change is not None:
                    self._on_change(name, float(value))


@final
class CeilingFit:
    """The reward at zero entropy: least squares of R = -a e^H + b (Cui et al. 2025, arXiv 2505.22617), at H = 0 b - a.

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
