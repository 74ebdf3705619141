"""Reinforcement learning: one vocabulary for what RL libraries log, a monitor that computes it, a forecast.

`Controls` is what a loop lets the guard do about its policy: play rollouts to compare policies, raise two coefficients.
"""

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from statistics import fmean, median
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
_READINGS, _BEFORE = 32, 8  # rewards: in all, and those that are usual
_SIGMA_PER_MAD = 1.4826  # of a normal distribution
_JUMP, _OF_RANGE = 8.0, 0.3  # deviations of one reading, and of the range of all of them
_LAST, _AT_ONCE = 2, 0.7  # readings, in which that much of the way has to be made
_LARGEST_ENTROPY = 20.0  # nats: of a vocabulary of 5e8


@final
class Controls:
    """Gives a guard rollouts to compare policies with, and coefficients to raise: `guard.keep("policy", controls)`.

    With `evaluate` the guard looks at what the policy earns, warns when that has fallen, and in autopilot rolls back
    when rollouts prove an earlier policy better; without it, it only warns about the metrics.

    Args:
        evaluate: returns the reward of rollouts with the current weights; higher is better. Called once at each look,
            8 times when it is suspected to have fallen, and 32 times for the proof of a rollback. It must leave no
            trace.
        every: steps between two looks; 0 looks only when a metric is suspicious.
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

    MOST_LOOKS = 512

    def __init__(
        self,
        *,
        evaluate: Callable[[], float] | None = None,
        every: int = 5,
        kl_coef: float | None = None,
        entropy_coef: float | None = None,
        on_change: Callable[[str, float], object] | None = None,
    ) -> None:
        if evaluate is not None and not callable(evaluate):
            raise MisuseError(f"evaluate must be a function without arguments, got {type(evaluate).__name__}")
        if every < 0:
            raise MisuseError(f"every = {every}: must be a number of steps, or 0 for none")
        self.evaluate, self.every = evaluate, every
        self.looks: list[list[float]] = []
        """Step and reward of each look."""
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

    def add_look(self, step: int, reward: float) -> None:
        """Remember what rollouts earned at `step`; the first look stays: what was gained is measured from there."""
        if not self.looks or self.looks[-1][0] < step:
            self.looks.append([step, reward])
            del self.looks[1 : -self.MOST_LOOKS]

    def state_dict(self) -> dict[str, Any]:
        """Return the state, ready for JSON."""
        looks = [list(look) for look in self.looks]
        return {"values": dict(self._values), "raised": dict(self._raised), "looks": looks}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`; coefficients that differ are reported."""
        looks = [[float(value) for value in look] for look in state.get("looks", ())]
        if looks and (not self.looks or looks[-1][0] > self.looks[-1][0]):  # a rollback does not unsee
            self.looks = looks
        for name in self._values:
            value, raised = state["values"].get(name), state["raised"].get(name)
            if value is None or raised is None:
                continue
            # why: a rollback restores an earlier policy, but what was learned about the coefficient stays
            if raised >= self._raised[name]:
                changed, self._values[name], self._raised[name] = value != self._values[name], float(value), int(raised)
                if changed and self._on_change is not None:
                    self._on_change(name, float(value))


def noise_of(differences: Sequence[float], *, least: float = 0.7) -> float:
    """Return the deviation of one reading from the differences of neighbours, which have twice its variance.

    Of few readings a median may be far too small: not less than a share of their root mean square.

    >>> round(noise_of([0.1, -0.1, 0.1, -0.1]), 3)
    0.105
    """
    spread = least * math.sqrt(fmean(d * d for d in differences))
    return max(_SIGMA_PER_MAD * median(map(abs, differences)), spread) / math.sqrt(2.0)


@final
class RewardJump:
    """Finds a reward that is far from the last ones, either way: a policy changes by degrees, a grader at once.

    >>> jump = RewardJump()
    >>> [jump.add(0.5 + 0.01 * (i % 3), i) for i in range(16)] == [None] * 16
    True
    >>> usual, limit, since = jump.add(2.0, 16)
    >>> usual, round(limit, 3), since
    (0.51, 0.08, 8)
    """

    def __init__(self) -> None:
        self._readings: list[list[float]] = []
        """Reward and step."""
        self._range = [math.inf, -math.inf]

    def add(self, value: float, step: int) -> tuple[float, float, int] | None:
        """Return what is usual, how far off a reward may be, and since when, if `value` is farther; begins anew."""
        known, found = self._readings, None
        if abs(value) > 1e30:  # nothing that can be squared
            return None
        if len(known) >= 2 * _BEFORE:
            usual, since = median(reward for reward, _ in known[-_BEFORE:]), int(known[-_BEFORE][1])
            noise = math.sqrt(fmean((b[0] - a[0]) ** 2 for a, b in pairwise(known)) / 2.0)
            limit = max(_JUMP * noise, _OF_RANGE * (self._range[1] - self._range[0]))
            far = abs(value - usual)
            # why: a mean over recent episodes follows the policy by degrees, and late
            at_once = abs(value - known[-_LAST][0]) > _AT_ONCE * far
            found = (usual, limit, since) if far > limit > 0.0 and at_once else None
        self._readings = [*(() if found else known[1 - _READINGS :]), [value, float(step)]]
        self._range = [min(self._range[0], value), max(self._range[1], value)]
        return found

    def state_dict(self) -> dict[str, Any]:
        """Return the state, ready for JSON."""
        return {
            "readings": [list(each) for each in self._readings],
            "range": list(self._range) if self._readings else None,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`; earlier versions had none."""
        self._readings = [[float(value) for value in each] for each in state.get("readings", ())]
        self._range = list(map(float, state.get("range") or (math.inf, -math.inf)))


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
