"""Steps in order. A log in which the steps go back was written by more than one process."""

from dataclasses import dataclass
from itertools import pairwise
from typing import final

import numpy as np
from numpy.typing import NDArray

from steadystep.track.run import Series

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
        notes.append("rows were not in the order of their steps and have been sorted")
    elif len(back):
        steps, values, restarts, notes = _joined(steps, values, back)
    last = np.append(np.diff(steps) > 0, True)
    if not last.all():
        notes.append(f"{int((~last).sum())} steps were logged more than once: the last value counts")
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
            notes.append(f"a false start of {part.stop - part.start} points was left out")
            continue
        if anew:
            notes.append("several runs stand one after the other: the last one is read")
            kept, restarts = [part], []
            continue
        if kept:
            restarts.append(first)
            kept = [slice(s.start, s.start + int(np.searchsorted(steps[s], first))) for s in kept]
        kept.append(part)
    chosen = np.concatenate([np.arange(s.start, s.stop) for s in kept])
    return steps[chosen], values[chosen], restarts, notes
