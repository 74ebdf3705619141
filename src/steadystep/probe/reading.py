"""From a swept loss to a learning rate, without torch.

Losses are smoothed with weights beta^|i - j|, looking both ways, so that the curve does not lag behind the rate that
made it. The level at the small rates is where it falls from; a fall counts when it exceeds the noise of the batches.
The suggestion is 2/3 of the rate at which 4/5 of the fall was done: far closer to the best of a coarse sweep than the
steepest point, a little closer than a tenth of the rate at the minimum (numbers in docs/find_lr.md).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median
from typing import final

from steadystep.probe.curve import LRCurve, Verdict

_SHARE_OF_FALL, _SAFETY = 0.8, 1.5
_LIMIT_SAFETY = 10.0  # without a fall only the limit is known, and near it a longer run still breaks
_STANDARD_ERRORS = 5.0  # of a fall that is no accident of the batches
_SMALLEST_FALL = 1e-3  # as a share of the loss
_FLOOR, _ABOUT = 1e-6, 0.05  # of the level; of the lowest loss
_ENOUGH = 8  # losses to read anything from
_MAD_TO_SIGMA = 1.4826


def read(lrs: Sequence[float], losses: Sequence[float], *, smoothing: float, diverged: bool) -> LRCurve:
    """Judge a sweep. `diverged` says that it was stopped because the loss ran away or stopped being finite.

    >>> read([1e-3, 1e-2], [1.0, float("nan")], smoothing=0.85, diverged=True).verdict.value
    'diverges-at-once'
    """
    count = next((i for i, loss in enumerate(losses) if not math.isfinite(loss)), len(losses))
    level = _level(losses[:count])
    capped = [min(loss, level + 3 * abs(level)) for loss in losses[:count]]
    smoothed = smooth(capped, smoothing)
    verdict, suggested, stable = Verdict.NOT_FINITE if count == 0 else Verdict.DIVERGES_AT_ONCE, None, None
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


def _judge(curve: _Curve, *, diverged: bool) -> tuple[Verdict, float | None, float | None]:
    fall = curve.level - min(curve.smoothed)
    if fall > max(_STANDARD_ERRORS * curve.error, _SMALLEST_FALL * abs(curve.level)):
        target = curve.level - _SHARE_OF_FALL * fall
        reached = next(i for i, loss in enumerate(curve.smoothed) if loss <= target)
        verdict = Verdict.FOUND if diverged else Verdict.OPEN_ENDED
        return verdict, curve.lrs[reached] / _SAFETY, curve.lrs[max(curve.lowest - 1, reached)]
    if not diverged:
        return Verdict.FLAT, None, None
    calm = [i for i, loss in enumerate(curve.smoothed) if loss <= curve.level + 2 * curve.error]
    if not calm or calm[-1] < _ENOUGH // 2:
        return Verdict.DIVERGES_AT_ONCE, None, None
    return Verdict.LIMIT_ONLY, curve.lrs[calm[-1]] / _LIMIT_SAFETY, curve.lrs[calm[-1]]


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
    sigma = _MAD_TO_SIGMA * median(steps) / math.sqrt(2)
    of_smoothed = ((1 - beta) / (1 + beta)) ** 2 * (1 + beta**2) / (1 - beta**2)
    return sigma * math.sqrt(of_smoothed + 1 / _num_level(losses))
