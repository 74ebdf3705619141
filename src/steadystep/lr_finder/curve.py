"""What a learning-rate sweep showed."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from statistics import fmean, median
from typing import final

from pydantic import ConfigDict

from steadystep.records import Record
from steadystep.stats import SIGMA_PER_MAD

_ROWS, _BAR = 24, 30


class SweepShape(StrEnum):
    """Shape of a range-test curve: how far its suggestion can be trusted."""

    FOUND = "found"
    """The loss fell, then diverged."""
    OPEN_ENDED = "open-ended"
    """The loss fell and never diverged: a larger `max_lr` may show a larger stable rate."""
    LIMIT_ONLY = "limit-only"
    """The loss diverged before it fell beyond its noise; the suggestion is a tenth of the limit."""
    FLAT = "flat"
    """The loss did not change at any rate."""
    DIVERGES_AT_ONCE = "diverges-at-once"
    """The loss diverged in the first steps."""
    NOT_FINITE = "not-finite"
    """The first loss was not finite."""


_MEANING = {
    SweepShape.FOUND: "the loss fell, then diverged",
    SweepShape.OPEN_ENDED: "the loss fell and never diverged: a larger max_lr may show a larger stable rate",
    SweepShape.LIMIT_ONLY: "the loss did not fall beyond its noise before it diverged, so the suggestion is a "
    "tenth of the limit; use more num_steps or a larger batch for a clearer curve",
    SweepShape.FLAT: "the loss did not change at any rate: does it depend on these parameters, is max_lr too "
    "small, or is the noise larger than what so few steps can learn?",
    SweepShape.DIVERGES_AT_ONCE: "the loss diverged in the first steps: lower min_lr, or check the model and the data",
    SweepShape.NOT_FINITE: "the first loss was non-finite: no learning rate fixes that",
}


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class LRCurve(Record):
    """Result of `find_lr`. Rates are those of groups at the optimizer's default; other groups keep their ratio.

    >>> told = {"verdict": SweepShape.FOUND, "suggested": 0.5, "largest_stable": 1.0}
    >>> print(LRCurve(lrs=(0.1, 1.0), losses=(2.0, 1.0), smoothed=(2.0, 1.0), **told))
    learning rate       loss
    1.0e-01                2  ##############################
    1.0e+00                1    <- suggested 5.00e-01  <- largest stable 1.00e+00
    suggested: 5.00e-01
    largest stable: 1.00e+00
    verdict: found: the loss fell, then diverged
    """

    __pydantic_config__ = ConfigDict(ser_json_inf_nan="strings", extra="forbid")

    lrs: tuple[float, ...]
    """Learning rates, in ascending order."""
    losses: tuple[float, ...]
    """Loss before the step at each rate, as measured."""
    smoothed: tuple[float, ...]
    """Smoothed losses."""
    verdict: SweepShape
    """Shape of the curve."""
    suggested: float | None = None
    """A learning rate to train with; None if the curve shows none."""
    largest_stable: float | None = None
    """Rate at the lowest loss (verdict `limit-only`: the last rate at which the loss had not yet risen)."""

    @property
    def meaning(self) -> str:
        """The verdict as a sentence."""
        return _MEANING[self.verdict]

    def __str__(self) -> str:
        lines = [f"{'learning rate':<15} {'loss':>8}"]
        lines += [self._row(i) for i in self._shown()]
        for name, rate in (("suggested", self.suggested), ("largest stable", self.largest_stable)):
            lines += [f"{name}: {rate:.2e}"] if rate is not None else []
        return "\n".join([*lines, f"verdict: {self.verdict.value}: {self.meaning}"])

    def _shown(self) -> list[int]:
        every = max(1, math.ceil(len(self.lrs) / _ROWS))
        return sorted({*range(0, len(self.lrs), every), *self._marks().values()})

    def _marks(self) -> dict[str, int]:
        """The row nearest to each of the two rates."""
        named = {"suggested": self.suggested, "largest stable": self.largest_stable}
        return {
            name: min(range(len(self.lrs)), key=lambda i: abs(math.log(self.lrs[i] / rate)))
            for name, rate in named.items()
            if rate is not None
        }

    def _row(self, i: int) -> str:
        finite = [loss for loss in self.smoothed if math.isfinite(loss)]
        bar = ""
        if math.isfinite(self.smoothed[i]) and max(finite) > min(finite):
            bar = "#" * round(_BAR * (self.smoothed[i] - min(finite)) / (max(finite) - min(finite)))
        exact = {"suggested": self.suggested, "largest stable": self.largest_stable}
        marks = "".join(f"  <- {name} {exact[name]:.2e}" for name, row in self._marks().items() if row == i)
        return f"{self.lrs[i]:<15.1e} {self.smoothed[i]:>8.4g}  {bar}{marks}".rstrip()


_SHARE_OF_FALL, _SAFETY = 0.8, 1.5
_LIMIT_SAFETY = 10.0  # without a fall only the limit is known, and near it a longer run still breaks
_STANDARD_ERRORS = 5.0  # of a fall that is no accident of the batches
_SMALLEST_FALL = 1e-3  # as a share of the loss
_FLOOR, _ABOUT = 1e-6, 0.05  # of the level; of the lowest loss
_ENOUGH = 8  # losses to read anything from


def judge_sweep(lrs: Sequence[float], losses: Sequence[float], *, smoothing: float, diverged: bool) -> LRCurve:
    """Judge a sweep. `diverged` says that it was stopped because the loss ran away or stopped being finite.

    >>> judge_sweep([1e-3, 1e-2], [1.0, float("nan")], smoothing=0.85, diverged=True).verdict.value
    'diverges-at-once'
    """
    count = next((i for i, loss in enumerate(losses) if not math.isfinite(loss)), len(losses))
    level = _level(losses[:count])
    capped = [min(loss, level + 3 * abs(level)) for loss in losses[:count]]
    smoothed = smooth(capped, smoothing)
    verdict, suggested, stable = SweepShape.NOT_FINITE if count == 0 else SweepShape.DIVERGES_AT_ONCE, None, None
    if count >= _ENOUGH:
        lowest = _lowest(capped, level, smoothing)
        curve = _Curve(lrs, smoothed, lowest, level, _error(capped, smoothing))
        verdict, suggested, stable = _judge(curve, diverged=diverged)
    return LRCurve(
        lrs=tuple(lrs),
        losses=tuple(losses),
        smoothed=(*smoothed, *losses[count:]),
        verdict=verdict,
        suggested=suggested,
        largest_stable=stable,
    )


def smooth(values: Sequence[float], beta: float) -> list[float]:
    """The mean around each position with weights beta^distance; at the ends over what there is.

    >>> smooth([1.0, 1.0, 1.0], 0.9), smooth([0.0, 1.0], 0.0)
    ([1.0, 1.0, 1.0], [0.0, 1.0])
    """
    sums, weights = (_both_ways(row, beta) for row in (values, [1.0] * len(values)))
    return [total / weight for total, weight in zip(sums, weights, strict=True)]


def _both_ways(values: Sequence[float], beta: float) -> list[float]:
    ahead, behind = _decayed(values, beta), _decayed(values[::-1], beta)[::-1]
    return [a + b - value for a, b, value in zip(ahead, behind, values, strict=True)]


def _decayed(values: Sequence[float], beta: float) -> list[float]:
    sums, total = [], 0.0
    for value in values:
        total = value + beta * total
        sums.append(total)
    return sums


@final
@dataclass(frozen=True, slots=True)
class _Curve:
    lrs: Sequence[float]
    smoothed: Sequence[float]
    lowest: int
    """Where the loss stopped falling: it is that of the step before, so the rate before is the last good one."""
    level: float
    """Before the learning rate did anything."""
    error: float
    """Standard error of the difference between the level and a smoothed loss."""


def _judge(curve: _Curve, *, diverged: bool) -> tuple[SweepShape, float | None, float | None]:
    fall = curve.level - min(curve.smoothed)
    if fall > max(_STANDARD_ERRORS * curve.error, _SMALLEST_FALL * abs(curve.level)):
        target = curve.level - _SHARE_OF_FALL * fall
        reached = next(i for i, loss in enumerate(curve.smoothed) if loss <= target)
        verdict = SweepShape.FOUND if diverged else SweepShape.OPEN_ENDED
        return verdict, curve.lrs[reached] / _SAFETY, curve.lrs[max(curve.lowest - 1, reached)]
    if not diverged:
        return SweepShape.FLAT, None, None
    calm = [i for i, loss in enumerate(curve.smoothed) if loss <= curve.level + 2 * curve.error]
    if not calm or calm[-1] < _ENOUGH // 2:
        return SweepShape.DIVERGES_AT_ONCE, None, None
    return SweepShape.LIMIT_ONLY, curve.lrs[calm[-1]] / _LIMIT_SAFETY, curve.lrs[calm[-1]]


def _lowest(losses: Sequence[float], level: float, beta: float) -> int:
    """The first position about as low as any; in the log of the loss, if it has one, with a floor.

    Near zero a rise by a thousand is the end of stability and still tiny. A loss at zero no longer shows any.
    """
    if min(losses) < 0 or level == 0:
        curve = smooth(losses, beta)
        return curve.index(min(curve))
    curve = smooth([math.log(max(loss / level, _FLOOR)) for loss in losses], beta)
    return next(i for i, value in enumerate(curve) if value <= min(curve) + _ABOUT)


def _level(losses: Sequence[float]) -> float:
    return fmean(losses[: _num_level(losses)]) if losses else math.nan


def _num_level(losses: Sequence[float]) -> int:
    return max(5, len(losses) // 5)


def _error(losses: Sequence[float], beta: float) -> float:
    """From the differences of neighbours, which a slow trend hardly touches; the first half, before things run away."""
    half = losses[: max(_num_level(losses), len(losses) // 2)]
    steps = [abs(after - before) for before, after in pairwise(half)]
    sigma = SIGMA_PER_MAD * median(steps) / math.sqrt(2)
    of_smoothed = ((1 - beta) / (1 + beta)) ** 2 * (1 + beta**2) / (1 - beta**2)
    return sigma * math.sqrt(of_smoothed + 1 / _num_level(losses))
