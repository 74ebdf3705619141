"""Fewer points, the same picture: the lowest and the highest value of every pixel's worth of steps are kept.

Averaging would erase the spikes, which are what one looks for. What is not finite stays, as a gap with a name.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from steadystep.track.run import Series

DIGITS = 6  # of a number in a page; a chart shows three
_LARGEST = 1e300  # the difference of two values must still be a number where they are drawn


@final
@dataclass(frozen=True, slots=True)
class Thinned:
    """A curve as drawn. A value that is not finite breaks the line at its step."""

    steps: NDArray[np.int64]
    values: NDArray[np.float64]

    def for_json(self) -> dict[str, Any]:
        """Steps, values with None for gaps, and what each gap is."""
        finite = np.isfinite(self.values)
        drawn = np.clip(self.values, -_LARGEST, _LARGEST)
        values = [float(f"{v:.{DIGITS}g}") if ok else None for v, ok in zip(drawn, finite, strict=True)]
        bad = [[int(s), _name(v)] for s, v in zip(self.steps[~finite], self.values[~finite], strict=True)]
        return {"x": [int(step) for step in self.steps], "y": values, "bad": bad}


def thin(series: Series, *, buckets: int, first: int | None = None, last: int | None = None) -> Thinned:
    """At most three points for each of `buckets` equal stretches of steps, and the two ends.

    Args:
        series: the curve.
        buckets: how many pixels there are to draw it in.
        first: where the picture begins; one point before it stays, so that the line enters from the edge.
        last: where it ends, with one point after it.
    """
    steps, values = _window(series, first, last)
    if len(steps) <= 2 * buckets:
        return Thinned(steps, values)
    place = steps.astype(np.float64)
    place = (place - place[0]) / max(place[-1] - place[0], 1.0) * buckets
    bucket = np.minimum(place.astype(np.int64), buckets - 1)
    finite = np.isfinite(values)
    good, bad = np.flatnonzero(finite), np.flatnonzero(~finite)
    keep = [np.array([0, len(steps) - 1]), _first_of_each(bucket[bad], bad)]
    if len(good):
        keep += [_extreme(values[good], bucket[good], good, np.minimum)]
        keep += [_extreme(values[good], bucket[good], good, np.maximum)]
    chosen = np.unique(np.concatenate(keep))
    return Thinned(steps[chosen], values[chosen])


@np.errstate(all="ignore")
def typical(series: Series, *, buckets: int) -> Thinned:
    """The median of each stretch: the line an eye would draw through a noisy curve."""
    finite = np.isfinite(series.values)
    steps, values = series.steps[finite], series.values[finite]
    if len(steps) < 4 * buckets:
        buckets = len(steps) // 4
    if buckets < 3:
        return Thinned(np.empty(0, dtype=np.int64), np.empty(0))
    cuts = np.linspace(0, len(steps), buckets + 1).astype(np.int64)
    middle = [int(np.median(steps[a:b])) for a, b in pairwise(cuts)]
    level = [float(np.median(values[a:b])) for a, b in pairwise(cuts)]
    return Thinned(np.array(middle, dtype=np.int64), np.array(level))


def _window(series: Series, first: int | None, last: int | None) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    start = 0 if first is None else max(int(np.searchsorted(series.steps, first, side="left")) - 1, 0)
    stop = len(series) if last is None else int(np.searchsorted(series.steps, last, side="right")) + 1
    return series.steps[start:stop], series.values[start:stop]


def _first_of_each(bucket: NDArray[np.int64], index: NDArray[np.int64]) -> NDArray[np.int64]:
    return index[np.unique(bucket, return_index=True)[1]]


def _extreme(
    values: NDArray[np.float64], bucket: NDArray[np.int64], index: NDArray[np.int64], pick: np.ufunc
) -> NDArray[np.int64]:
    starts = np.flatnonzero(np.diff(bucket, prepend=-1))
    best: NDArray[np.float64] = pick.reduceat(values, starts)
    sizes = np.diff(np.append(starts, len(values)))
    at_best = np.flatnonzero(values == np.repeat(best, sizes))
    return _first_of_each(bucket[at_best], index[at_best])


def _name(value: float) -> str:
    return "NaN" if np.isnan(value) else ("inf" if value > 0 else "-inf")
