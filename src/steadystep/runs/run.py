"""A run as its log tells it: plain arrays and names. Readers make it; reports, pages and the doctor take it.

Steps as they stand in a log become rising ones: restarts are told apart, epochs that count anew are joined.
"""

from array import array
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, final

import numpy as np
from numpy.typing import NDArray

from steadystep.records import Incident

Source = Literal["steadystep", "tensorboard", "csv", "transformers", "text"]
StepUnit = Literal["step", "row", "epoch"]


@final
@dataclass(frozen=True, slots=True)
class Series:
    """One curve. Steps never decrease within a run; a value may be NaN or infinite."""

    steps: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    """The steps."""
    values: NDArray[np.float64] = field(default_factory=lambda: np.empty(0))
    """The value at each step."""

    def __len__(self) -> int:
        return len(self.steps)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class LayerNorms:
    """Gradient norms per layer at the logged steps: one row per step, NaN where a layer was missing."""

    steps: NDArray[np.int64]
    """The logged steps."""
    names: tuple[str, ...]
    """Names of the layers, in the order of the columns."""
    norms: NDArray[np.float64]
    """One row per step, one column per layer."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Everything that a log holds about a run."""

    name: str
    """Name of the run."""
    path: Path
    """File or folder it was read from."""
    source: Source
    """Format it was read from."""
    loss: Series = field(default_factory=Series)
    """Training loss."""
    grad_norm: Series = field(default_factory=Series)
    """Global gradient norm, before clipping."""
    lr: Series = field(default_factory=Series)
    """Learning rate."""
    metrics: Mapping[str, Series] = field(default_factory=dict)
    """Metrics logged with training steps, by name."""
    validation: Mapping[str, Series] = field(default_factory=dict)
    """Metrics of validations, by name; the loss is `val_loss`."""
    clipped: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    """Steps whose gradient was clipped."""
    incidents: tuple[Incident, ...] = ()
    """Incidents, in order."""
    layers: LayerNorms | None = None
    """Gradient norms per layer, where they were logged."""
    restarts: tuple[int, ...] = ()
    """Steps at which another process continued: not spikes."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the guard, nested as in the YAML file."""
    notes: tuple[str, ...] = ()
    """What the reader had to skip or guess, in sentences."""
    columns: Mapping[str, str] = field(default_factory=dict)
    """Names in the log by what they were read as, such as `loss`; empty for our own log."""
    read: str = ""
    """Which rows and columns the reader used, in a clause; empty for our own log."""
    step_unit: StepUnit = "step"
    """What the steps count; "row" when the log has no steps."""
    ended: bool | None = None
    """Whether the run came to its end; None if the format does not tell."""
    end: str = ""
    """How it ended, where the log tells: finished, stopped or error."""
    error: str = ""
    """With "stopped" and "error": the message."""
    verdict: str = ""
    """Last diagnosis of the guard: a cause and its evidence."""
    fault: str = ""
    """The particular mistake, where the guard's diagnosis names one."""
    scale: Series = field(default_factory=Series)
    """Loss scale, where there was one."""
    began: float | None = None
    """Start of the last process, in seconds since 1970."""
    parameters: int | None = None
    """Number of trainable parameters."""
    hparams: Mapping[str, Any] = field(default_factory=dict)
    """Hyperparameters, where they were logged."""
    updates: LayerNorms | None = None
    """Size of the update relative to the weights, by parameter, where it was logged."""
    logits: LayerNorms | None = None
    """Upper bound of the attention logits, by module, where it was logged."""


@final
class Column:
    """Steps and the values at them."""

    def __init__(self) -> None:
        self.steps = array("q")
        self._values = array("d")

    def append(self, step: int, value: float) -> None:
        """One more."""
        self.steps.append(step)
        self._values.append(value)

    def cut(self, step: int) -> None:
        """Forget what is at `step` or later."""
        place = bisect_left(self.steps, step)
        del self.steps[place:]
        del self._values[place:]

    def series(self) -> Series:
        """A copy, as arrays."""
        return Series(np.array(self.steps, dtype=np.int64), np.array(self._values))

    def carried_on(self, steps: NDArray[np.int64]) -> Series:
        """At each of these steps what was last said; NaN ends it, and before the first there is nothing."""
        if not self.steps or not len(steps):
            return Series()
        place = np.searchsorted(np.array(self.steps, dtype=np.int64), steps, side="right") - 1
        values = np.array(self._values)[np.maximum(place, 0)]
        known = (place >= 0) & ~np.isnan(values)
        return Series(steps[known], values[known])


@final
class LayerRows:
    """Rows of per-layer norms. Names stand in the file only where they changed."""

    def __init__(self) -> None:
        self.names: tuple[str, ...] = ()
        self._steps = array("q")
        self._rows: list[tuple[tuple[str, ...], NDArray[np.float32]]] = []

    def append(self, step: int, names: Iterable[Any] | None, norms: Sequence[Any]) -> None:
        """One more row; words such as "NaN" are numbers too. Without `names` they are those of the row before."""
        if not isinstance(norms, list):
            raise TypeError("not a sequence of numbers")
        names = None if names is None else tuple(str(name) for name in names)
        with np.errstate(over="ignore"):  # beyond single precision is infinite for a picture
            row = np.array(norms, dtype=np.float64).astype(np.float32)
        if row.ndim != 1 or len(row) != len(self.names if names is None else names):
            raise ValueError("names and norms differ in number")
        if names is not None:
            self.names = names
        self.cut(step)
        self._steps.append(step)
        self._rows.append((self.names, row))

    def cut(self, step: int) -> None:
        """Forget what is at `step` or later."""
        place = bisect_left(self._steps, step)
        del self._steps[place:]
        del self._rows[place:]

    def norms(self) -> LayerNorms | None:
        """All of them in one table, a column for every name there has been."""
        if not self._rows:
            return None
        union = dict.fromkeys(name for names in dict.fromkeys(names for names, _ in self._rows) for name in names)
        columns = {name: place for place, name in enumerate(union)}
        places = {names: [columns[name] for name in names] for names in {names for names, _ in self._rows}}
        table = np.full((len(self._rows), len(columns)), np.nan)
        for at, (names, row) in enumerate(self._rows):
            table[at, places[names]] = row
        return LayerNorms(steps=np.array(self._steps, dtype=np.int64), names=tuple(columns), norms=table)


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
