"""Steps as they stand in a log become rising ones: restarts are told apart, epochs that count anew are joined."""

from dataclasses import dataclass
from itertools import pairwise
from typing import final

import numpy as np
from numpy.typing import NDArray

from steadystep.runs.run import Series

Floats = NDArray[np.float64]

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


_AT_EPOCHS = 0.9  # of all steps back
_DONE = 0.8  # of the length of a progress bar


def counted_on(steps: Floats, epochs: Floats | None, whole: float | None) -> Floats | None:
    """Steps that start again in every epoch, counted on from one to the next; None where they do not.

    Args:
        steps: of every row; NaN where there is none.
        epochs: of every row, if they were logged.
        whole: the length of the progress bar that the steps were read from.
    """
    known = np.flatnonzero(np.isfinite(steps))
    if len(known) < 2:
        return None
    values = steps[known]
    back = np.flatnonzero(np.diff(values) < 0) + 1
    if not len(back):
        return None
    anew = np.zeros(len(back), dtype=bool)
    if epochs is not None:
        anew |= epochs[known][back] > epochs[known][back - 1]
    if whole:
        anew |= values[back - 1] >= _DONE * whole
    if anew.mean() < _AT_EPOCHS:
        return None
    every = float(np.median(np.diff(values)[np.diff(values) > 0])) if np.any(np.diff(values) > 0) else 1.0
    offset = np.zeros(len(values))
    for at in back[anew]:
        offset[at:] += whole or float(values[at - 1] + every - min(values[0], every))
    found = steps.copy()
    found[known] = values + offset
    return found
