"""Where a noisy curve stands, and how sure one can be of it."""

import math
from dataclasses import dataclass
from typing import final

import numpy as np
from numpy.typing import NDArray

from steadystep.track.run import Series

_BLOCKS = 8
_SIGMA_PER_MAD = 1.4826  # of a normal distribution


@final
@dataclass(frozen=True, slots=True)
class Level:
    """The value at the end of a curve, and the standard error that its own noise gives it."""

    value: float
    noise: float | None
    """None with too few points to tell."""
    points: int


@np.errstate(all="ignore")  # why: a log may hold any number, and the square of it may be none
def level(series: Series, *, until: int | None = None) -> Level | None:
    """Over the last tenth of a long curve, or the last three points of a short one; None for an empty one.

    Args:
        series: the curve.
        until: steps after this one do not count.
    """
    stop = len(series) if until is None else int(np.searchsorted(series.steps, until, side="right"))
    values = series.values[:stop]
    if not len(values):
        return None
    tail = values[-max(3, len(values) // 10) :]
    finite = tail[np.isfinite(tail)]
    if 2 * len(finite) < len(tail):
        return Level(math.nan, None, len(values))
    if len(finite) >= 5 * _BLOCKS:
        return Level(float(np.median(finite)), _noise_of_blocks(finite), len(values))
    return Level(float(np.median(finite)), _noise_of_turns(values[np.isfinite(values)], len(finite)), len(values))


def _noise_of_blocks(values: NDArray[np.float64]) -> float:
    """Means of blocks, so that neighbours may be alike; around a straight line, because a run still learns."""
    size = len(values) // _BLOCKS
    means = np.median(values[len(values) - size * _BLOCKS :].reshape(_BLOCKS, size), axis=1)
    at = np.arange(_BLOCKS) - (_BLOCKS - 1) / 2
    rest = means - means.mean() - at * (at @ means) / (at @ at)
    return float(np.sqrt(np.sum(rest**2) / (_BLOCKS - 2) / _BLOCKS))


def _noise_of_turns(values: NDArray[np.float64], used: int) -> float | None:
    """Second differences leave a smooth course out, and have six times the variance of what is left."""
    turns = np.diff(values[-20:], n=2)
    if len(turns) < 3:
        return None
    return float(_SIGMA_PER_MAD * np.median(np.abs(turns)) / math.sqrt(6) / math.sqrt(used))
