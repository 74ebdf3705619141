"""What a curve usually is at each point and how far it strays, from the points before it. Numpy, O(n)."""

from itertools import pairwise

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

Floats = NDArray[np.float64]

WINDOW = 64  # points
_STRIDE = 16
FEWEST = 8  # points before one can be judged
_ONE_SIGMA = 0.8413  # the share of a normal distribution below mean + sigma
_DIFFERENCE_SIGMA = 0.954  # the median |difference| of neighbours in a normal sequence, in sigma


def trailing_median(values: Floats) -> Floats:
    """The median of up to 64 points before each, renewed every 16 points (every one at first); NaN for the first 8."""
    return _trailing(values, 0.5)


def trailing_noise(values: Floats) -> Floats:
    """One sigma upwards of the same points: between neighbours or above the median, whichever is more.

    Neighbours know no trend, but a curve may wander; the median knows nothing of a falling curve's next value.
    """
    steps = np.abs(np.diff(values, prepend=values[:1]))
    jumpy = _trailing(steps, 0.5) / _DIFFERENCE_SIGMA
    wide = _trailing(values, _ONE_SIGMA) - trailing_median(values)
    return np.maximum(np.maximum(jumpy, wide), resolution(values))


def _trailing(values: Floats, share: float) -> Floats:
    count = len(values)
    found = np.full(count, np.nan)
    for i in range(FEWEST, min(count, WINDOW + _STRIDE)):
        found[i] = np.quantile(values[max(0, i - WINDOW) : i], share)
    if count > WINDOW + _STRIDE:
        place = int(share * (WINDOW - 1) + 0.5)
        windows = sliding_window_view(values, WINDOW)[_STRIDE::_STRIDE]
        levels = np.partition(windows, place, axis=1)[:, place]
        spread = np.repeat(levels, _STRIDE)[: count - WINDOW - _STRIDE]
        found[WINDOW + _STRIDE : WINDOW + _STRIDE + len(spread)] = spread
        found[WINDOW + _STRIDE + len(spread) :] = levels[-1]
    return found


def noise(values: Floats) -> float:
    """One sigma between neighbours of the whole curve; 0 for fewer than two points."""
    if len(values) < 2:
        return 0.0
    return float(max(np.median(np.abs(np.diff(values))) / _DIFFERENCE_SIGMA, resolution(values)))


def resolution(values: Floats) -> float:
    """About what the numbers were rounded to: loggers keep four digits or so."""
    size = float(np.median(np.abs(values))) if len(values) else 0.0
    return 1e-5 * size


def blocks(values: Floats, count: int) -> Floats:
    """The medians of `count` parts of about equal length; fewer parts than points."""
    bounds = np.linspace(0, len(values), min(count, len(values)) + 1).astype(int)
    return np.array([np.median(values[a:b]) for a, b in pairwise(bounds)])


def means(values: Floats, count: int) -> Floats:
    """As `blocks`, with means."""
    bounds = np.linspace(0, len(values), min(count, len(values)) + 1).astype(int)
    sums = np.add.reduceat(values, bounds[:-1])
    return np.asarray(sums / np.diff(bounds))
