"""Rules that turn a global gradient norm into a limit, and the clip that follows one.

A rule is plain arithmetic on plain numbers: it needs no tensors, gives the same answer on every rank, and can be asked
about a norm that somebody else has already measured.
"""

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Mapping
from typing import Any, Protocol, final

from steadystep._utils import numbers
from steadystep.clip.global_norm import ClipReport, Params, gradients_of, measured, multiply_


class NormRule(Protocol):
    """Protocol of a clip that learns: computes a limit for the next norm from those seen so far.

    `limit(norm)` changes nothing; `learn(norm)` takes the norm before clipping. A non-finite norm has the limit 0.0 and
    is not learned. A norm of exactly zero is not learned either: it would lead to a limit of zero for the rest of the
    run.

    >>> from steadystep.clip import PercentileClip
    >>> rule: NormRule = PercentileClip(percentile=50)
    >>> for norm in (1.0, 2.0, 3.0):
    ...     rule.learn(norm)
    >>> rule.limit(10.0)
    2.5
    """

    def limit(self, norm: float) -> float:
        """Return the largest norm that this step may have; `math.inf` without a limit."""

    def learn(self, norm: float) -> None:
        """Learn from the norm of this step, as measured before clipping."""

    def state_dict(self) -> dict[str, Any]:
        """Return everything learned so far, as plain JSON."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`."""


def teaches(norm: float) -> bool:
    """Whether a rule may learn from this norm."""
    return math.isfinite(norm) and norm > 0.0


def clip_by_rule_(params: Params, rule: NormRule) -> ClipReport:
    """Measure, ask the rule, tell it, and scale all gradients to its limit if they are above."""
    seen = measured(gradients_of(params))
    norm = seen.total().item()  # sync: the rule needs it
    if not math.isfinite(norm):
        return ClipReport.refused(norm)
    limit = rule.limit(norm)
    rule.learn(norm)
    if norm <= limit:
        return ClipReport.scaled(norm, 1.0)
    scale = limit / norm
    multiply_(seen.parts, seen.layout, scale)
    return ClipReport.scaled(norm, scale)


@final
class PercentileClip:
    """Clips gradient norms to a percentile of the last `history_steps` norms.

    With the paper's percentile of 10, nine steps in ten are clipped, which resembles normalized gradient descent. Use
    90 or more to clip outliers only. It learns norms as measured, so it follows a new level.

    Args:
        percentile: the limit, as a percentile of the norms in the history.
        history_steps: number of past norms to keep.

    >>> import torch
    >>> clip = PercentileClip(percentile=50)
    >>> weight = torch.nn.Parameter(torch.zeros(1))
    >>> for norm in (1.0, 2.0, 9.0):
    ...     weight.grad = torch.tensor([norm])
    ...     report = clip.clip_([weight])
    >>> report.clipped, weight.grad
    (True, tensor([2.]))
    """

    def __init__(self, *, percentile: float = 10.0, history_steps: int = 1000) -> None:
        self._share = numbers.real("percentile", percentile, most=100.0, above=0.0) / 100.0
        self._history_steps = numbers.whole("history_steps", history_steps, least=1)
        self._history: deque[float] = deque()
        self._ranked: list[float] = []

    def clip_(self, params: Params) -> ClipReport:
        """Clip the gradients of `params` in place and learn from their norm."""
        return clip_by_rule_(params, self)

    def limit(self, norm: float) -> float:
        """Return the largest norm that this step may have. Changes nothing."""
        if not math.isfinite(norm):
            return 0.0
        if norm == 0.0:
            return math.inf
        ranked = self._ranked.copy()  # why: a thousand pointers copy in less time than it takes to sort them
        if len(ranked) == self._history_steps:
            del ranked[bisect_left(ranked, self._history[0])]
        insort(ranked, norm)
        position = self._share * (len(ranked) - 1)
        below = int(position)
        above = min(below + 1, len(ranked) - 1)
        return ranked[below] + (ranked[above] - ranked[below]) * (position - below)

    def learn(self, norm: float) -> None:
        """Learn from a norm as measured. A norm that is zero or not finite is ignored."""
        if not teaches(norm):
            return
        if len(self._history) == self._history_steps:
            del self._ranked[bisect_left(self._ranked, self._history.popleft())]
        self._history.append(norm)
        insort(self._ranked, norm)

    def state_dict(self) -> dict[str, Any]:
        """Return the norms as plain JSON, oldest first."""
        return {"history": list(self._history)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`; a shorter `history_steps` keeps the newest norms."""
        numbers.state_keys("PercentileClip", state, "history")
        history = [numbers.real("history", norm, above=0.0) for norm in state["history"]][-self._history_steps :]
        self._history, self._ranked = deque(history), sorted(history)


_EPSILON = 1e-6  # the authors'
_LARGEST = 1e100  # what a warm-up can use: the square of more, summed, leaves double precision


@final
class ZScoreClip:
    """Clips gradient norms that stand out from the run's own recent ones; the further they stand out, the harder.

    As published, the rule never accepts a new level: after a lasting jump it clips every step, because it learns
    clipped norms. `restart_after_steps` ends that.

    Args:
        z_threshold: standard deviations above the mean at which clipping begins.
        alpha: decay of the moving mean and variance.
        warmup_steps: number of first norms that only set mean and variance.
        max_norm: a fixed limit in addition, from the first step on.
        restart_after_steps: warm up again after so many clipped steps in a row; None for never.

    >>> import torch
    >>> clip = ZScoreClip(warmup_steps=4)
    >>> weight = torch.nn.Parameter(torch.zeros(1))
    >>> for norm in (1.0, 1.2, 1.0, 0.8, 50.0):
    ...     weight.grad = torch.tensor([norm])
    ...     report = clip.clip_([weight])
    >>> report.clipped, round(report.norm_before * report.scale, 3)
    (True, 1.003)
    """

    def __init__(
        self,
        *,
        z_threshold: float = 2.5,
        alpha: float = 0.97,
        warmup_steps: int = 25,
        max_norm: float | None = None,
        restart_after_steps: int | None = None,
    ) -> None:
        self._z_threshold = numbers.real("z_threshold", z_threshold, above=0.0)
        self._alpha = numbers.fraction("alpha", alpha)
        self._warmup_steps = numbers.whole("warmup_steps", warmup_steps, least=1)
        self._max_norm = math.inf if max_norm is None else numbers.real("max_norm", max_norm, above=0.0)
        self._restart_after = math.inf
        if restart_after_steps is not None:
            self._restart_after = numbers.whole("restart_after_steps", restart_after_steps, least=1)
        self._begin()

    def _begin(self) -> None:
        self._warmup: list[float] = []
        self._mean = 0.0
        self._variance = 0.0
        self._ready = False
        self._held_back_in_a_row = 0

    def clip_(self, params: Params) -> ClipReport:
        """Clip the gradients of `params` in place and learn from their norm."""
        return clip_by_rule_(params, self)

    def limit(self, norm: float) -> float:
        """Return the largest norm that this step may have. Changes nothing."""
        return min(self._limit_by_history(norm), self._max_norm) if math.isfinite(norm) else 0.0

    def _limit_by_history(self, norm: float) -> float:
        if not self._ready:
            return math.inf
        sigma = math.sqrt(self._variance)
        z = (norm - self._mean) / (sigma + _EPSILON)
        return self._mean + self._z_threshold * sigma / (z / self._z_threshold) if z > self._z_threshold else math.inf

    def learn(self, norm: float) -> None:
        """Learn from a norm as measured. A norm that is zero or not finite is ignored."""
        if not teaches(norm):
            return
        if not self._ready:
            self._warm_up(norm)
            return
        # why: max_norm does not enter; where it always acts, every norm would look the same and sigma would vanish
        seen = min(norm, self._limit_by_history(norm))
        self._held_back_in_a_row = self._held_back_in_a_row + 1 if seen < norm else 0
        if self._held_back_in_a_row >= self._restart_after:
            self._begin()
            return
        self._mean = self._alpha * self._mean + (1.0 - self._alpha) * seen
        self._variance = self._alpha * self._variance + (1.0 - self._alpha) * (seen - self._mean) ** 2

    def _warm_up(self, norm: float) -> None:
        if norm > _LARGEST:
            return
        self._warmup.append(norm)
        if len(self._warmup) < self._warmup_steps:
            return
        self._mean = math.fsum(self._warmup) / len(self._warmup)
        self._variance = math.fsum((x - self._mean) ** 2 for x in self._warmup) / len(self._warmup)
        self._warmup = []
        self._ready = True

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain JSON."""
        return {
            "warmup": list(self._warmup),
            "mean": self._mean,
            "variance": self._variance,
            "ready": self._ready,
            "held_back_in_a_row": self._held_back_in_a_row,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`."""
        numbers.state_keys("ZScoreClip", state, *self.state_dict())
        warmup = [numbers.real("warmup", norm, above=0.0) for norm in state["warmup"]]
        mean = _level("mean", state["mean"], most=_LARGEST)
        variance = _level("variance", state["variance"], most=_LARGEST * _LARGEST)
        held_back = numbers.whole("held_back_in_a_row", state["held_back_in_a_row"], least=0)
        self._warmup, self._mean, self._variance = warmup, mean, variance
        self._ready, self._held_back_in_a_row = bool(state["ready"]), held_back


def _level(key: str, value: object, *, most: float) -> float:
    """Something learned from norms: a finite number, zero included."""
    return 0.0 if value == 0 else numbers.real(key, value, above=0.0, most=most)
