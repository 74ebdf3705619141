"""What a curve usually is at each point and how far it strays, from the points before it. Numpy, O(n)."""

from bisect import insort
from dataclasses import dataclass
from itertools import pairwise
from typing import final

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from steadystep.runs.run import Series
from steadystep.stats import DIFFERENCE_SIGMA, ONE_SIGMA, SIGMA_PER_MAD

Floats = NDArray[np.float64]

WINDOW = 64  # points
_STRIDE = 16
FEWEST = 8  # points before one can be judged


def trailing_median(values: Floats) -> Floats:
    """The median of up to 64 points before each, renewed every 16 points (every one at first); NaN for the first 8."""
    return _trailing(values, 0.5)


def trailing_noise(values: Floats) -> Floats:
    """One sigma upwards of the same points: between neighbours or above the median, whichever is more.

    Neighbours know no trend, but a curve may wander; the median knows nothing of a falling curve's next value.
    """
    steps = np.abs(np.diff(values, prepend=values[:1]))
    jumpy = _trailing(steps, 0.5) / DIFFERENCE_SIGMA
    wide = _trailing(values, ONE_SIGMA) - trailing_median(values)
    return np.maximum(np.maximum(jumpy, wide), resolution(values))


def _trailing(values: Floats, share: float) -> Floats:
    count = len(values)
    found = np.full(count, np.nan)
    first = min(count, WINDOW + _STRIDE)
    found[FEWEST:first] = _quantiles(values[:first], share)
    if count > WINDOW + _STRIDE:
        place = int(share * (WINDOW - 1) + 0.5)
        windows = sliding_window_view(values, WINDOW)[_STRIDE::_STRIDE]
        levels = np.partition(windows, place, axis=1)[:, place]
        spread = np.repeat(levels, _STRIDE)[: count - WINDOW - _STRIDE]
        found[WINDOW + _STRIDE : WINDOW + _STRIDE + len(spread)] = spread
        found[WINDOW + _STRIDE + len(spread) :] = levels[-1]
    return found


def _quantiles(values: Floats, share: float) -> list[float]:
    """As `np.quantile` of the finite points before each, bit for bit: its overhead was most of a diagnosis."""
    found, kept = [], sorted(values[: FEWEST - 1].tolist())
    for i in range(FEWEST, len(values)):
        insort(kept, float(values[i - 1]))
        if i > WINDOW:
            kept.remove(float(values[i - 1 - WINDOW]))
        place = share * (len(kept) - 1)
        low = kept[int(place)]
        high, part = kept[min(int(place) + 1, len(kept) - 1)], place - int(place)
        found.append(low + (high - low) * part if part < 0.5 else high - (high - low) * (1 - part))
    return found


def noise(values: Floats) -> float:
    """One sigma between neighbours of the whole curve; 0 for fewer than two points."""
    if len(values) < 2:
        return 0.0
    return float(max(np.median(np.abs(np.diff(values))) / DIFFERENCE_SIGMA, resolution(values)))


def spread(values: Floats, middle: float) -> float:
    """One sigma around `middle`, whatever a few outliers do."""
    return float(np.median(np.abs(values - middle))) * SIGMA_PER_MAD


def bend_noise(levels: Floats) -> float:
    """One sigma from second differences: straight stretches add nothing, and they have six times the variance."""
    return float(np.median(np.abs(np.diff(levels, n=2))) / (0.6745 * np.sqrt(6.0)))


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


_SIGMAS = 8.0
_MATERIAL = 0.03  # of the level, and of the way it had come
_LEFT = 2.5  # sigma: below this a point still belongs to the level
_BACK = (3, 5)  # so many of so many points under the limit: it has come back
_WALK = 12  # points; an onset is not looked for further back
_LONG_RAMP = 8  # points
_SOON = 64  # points
_MOST = 5000  # stretches
_RAMP = 0.62  # of the height from one point to the next: a jump has more of it at once
_STAYS = 0.85  # of its height, after the top
_GROWS = 1.5


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Excursion:
    """One stretch; positions count finite points."""

    onset: int
    first: int
    """The first point that is clearly raised."""
    end: int | None
    """The first point that is back; None when it never came back."""
    base: float
    top: float
    peak: int
    """The first point near the top."""
    highest: int
    jump: float
    """The largest share of the height that was gained from one point to the next."""
    stays: bool
    """It does not come down again after its top, until it is back at once or the log ends."""
    last: int
    """The last raised point."""

    @property
    def height(self) -> float:
        """From the level before to the top."""
        return self.top - self.base

    @property
    def length(self) -> int:
        """Raised points."""
        return self.last - self.first + 1

    @property
    def is_ramp(self) -> bool:
        """It rose over several points and stayed: a divergence. A jump is a spike."""
        return self.jump < _RAMP and self.stays


def excursions(values: Floats, *, base: Floats, sigma: Floats, start: float) -> list[Excursion]:
    """All of them, in order; at most 5,000. `base` and `sigma` are the usual level and noise at each point."""
    if len(values) < 12:
        return []
    way = np.maximum(start - base, 0.0)
    limit = base + np.maximum(_SIGMAS * sigma, _MATERIAL * np.maximum(np.abs(base), way))
    raised = np.flatnonzero(values > limit)
    found: list[Excursion] = []
    at = 0
    while at < len(raised) and len(found) < _MOST:
        first = int(raised[at])
        baseline, most = float(base[first]), float(limit[first])
        if found and first - found[-1].last < _SOON and found[-1].base < baseline:
            # why: the level before has been learned from a rise that went unnoticed between its first points
            baseline, most = found[-1].base, most - baseline + found[-1].base
        end = _return(values, first, most)
        found.append(_described(values, first, end, baseline, float(sigma[first])))
        at = int(np.searchsorted(raised, len(values) if end is None else end))
    return found


def _return(values: Floats, first: int, limit: float) -> int | None:
    """The first point after `first` from which on most are under the limit."""
    need, of = _BACK
    size = 256
    begin = first + 1
    while begin < len(values):
        low = values[begin : begin + size + of] <= limit
        if len(low) < of:  # the end of the log: what there is must be low
            return begin + int(np.argmax(low)) if len(low) and low[-1] and low.mean() >= need / of else None
        counts = np.convolve(low, np.ones(of, dtype=int), mode="valid")
        good = np.flatnonzero((counts >= need) & low[: len(counts)])
        if len(good):
            return begin + int(good[0])
        begin += len(counts)
        size *= 4
    return None


def _described(values: Floats, first: int, end: int | None, base: float, sigma: float) -> Excursion:
    onset = _left(values, first, base, sigma)
    stop = len(values) if end is None else end
    part = values[first:stop]
    top = float(part.max()) if len(part) < 16 else float(np.quantile(part, 0.95))
    height = top - base
    peak = first + int(np.argmax(part >= base + 0.9 * height))
    if peak - first >= _LONG_RAMP:  # far above its noise the slope is known: where did it start?
        slope = float(values[first + _LONG_RAMP // 2 : first + _LONG_RAMP].mean() - values[first]) / (0.75 * _LONG_RAMP)
        back = (float(values[first]) - base) / slope if slope > 0.0 else 0.0
        onset = min(onset, max(first - round(min(back, 4.0 * _WALK)), 0))
    jump = float(np.diff(values[max(0, onset - 1) : peak + 1], prepend=base).max()) / height
    after = float(np.median(values[peak:stop])) - base
    grows = len(part) >= 8 and height > _GROWS * (values[first] - base) and peak - first > 0.5 * len(part)
    return Excursion(
        onset=onset,
        first=first,
        end=end,
        base=base,
        top=float(part.max()),
        peak=peak,
        highest=first + int(np.argmax(part)),
        jump=0.0 if grows else jump,
        stays=after >= _STAYS * height,
        last=stop - 1,
    )


def _left(values: Floats, first: int, base: float, sigma: float) -> int:
    """Back along the points that lead up to `first`, each clearly lower than the next, to where it left the level."""
    onset = first
    while onset > max(0, first - _WALK):
        before = float(values[onset - 1])
        if before <= base + _LEFT * sigma or before > values[onset] - sigma:
            break
        onset -= 1
    return onset


_SHORT = 0.1  # of the longest part: a last part shorter than this that begins anew is a false start
_UNSORTED = 0.02  # of all points going back: the order of the rows means nothing


@final
@dataclass(frozen=True, slots=True)
class Ordered:
    """A curve with rising steps, where other processes took over, and what was left out."""

    series: Series
    restarts: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()


def in_order(steps: NDArray[np.int64], values: NDArray[np.float64]) -> Ordered:
    """What was written last counts, as it does for the weights: a resumed run writes its last steps again."""
    if len(steps) < 2:
        return Ordered(Series(steps, values))
    back = np.flatnonzero(np.diff(steps) < 0) + 1
    notes: list[str] = []
    restarts: list[int] = []
    if len(back) > max(8, _UNSORTED * len(steps)):
        order = np.argsort(steps, kind="stable")
        steps, values = steps[order], values[order]
        notes.append("rows were not ordered by step and have been sorted")
    elif len(back):
        steps, values, restarts, notes = _joined(steps, values, back)
    last = np.append(np.diff(steps) > 0, True)
    if not last.all():
        notes.append(f"{int((~last).sum())} steps were logged more than once: the last value is used")
        steps, values = steps[last], values[last]
    return Ordered(Series(steps, values), tuple(restarts), tuple(notes))


def _joined(
    steps: NDArray[np.int64], values: NDArray[np.float64], back: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.float64], list[int], list[str]]:
    bounds = [0, *back.tolist(), len(steps)]
    parts = [slice(a, b) for a, b in pairwise(bounds)]
    longest = max(part.stop - part.start for part in parts)
    notes: list[str] = []
    kept: list[slice] = []
    restarts: list[int] = []
    for part in parts:
        first = int(steps[part.start])
        anew = bool(kept) and first <= int(steps[kept[0].start])
        if anew and part.stop - part.start < _SHORT * longest:
            notes.append(f"an aborted start of {part.stop - part.start} points was skipped")
            continue
        if anew:
            notes.append("the file contains several runs: the last one is read")
            kept, restarts = [part], []
            continue
        if kept:
            restarts.append(first)
            kept = [slice(s.start, s.start + int(np.searchsorted(steps[s], first))) for s in kept]
        kept.append(part)
    chosen = np.concatenate([np.arange(s.start, s.stop) for s in kept])
    return steps[chosen], values[chosen], restarts, notes
