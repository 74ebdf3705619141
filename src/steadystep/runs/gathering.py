"""Columns of numbers, gathered row by row or cell by cell; and what kind of file it is."""

import math
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from steadystep._utils.text import must_end
from steadystep.errors import ConfigError
from steadystep.runs.run import LayerNorms, Run, Series
from steadystep.runs.table import LogTable

_MOST_COLUMNS = 512


def number_in_cell(value: Any) -> float | None:
    """The number a cell holds; None when it holds none.

    >>> number_in_cell("1e-3"), number_in_cell("NaN"), number_in_cell(""), number_in_cell(True), number_in_cell("1,5")
    (0.001, nan, None, None, None)
    """
    if value is None or isinstance(value, bool | dict | list):
        return None
    try:
        return float(value)
    except (TypeError, ValueError):
        return None
    except OverflowError:  # an integer beyond any float
        return math.inf if value > 0 else -math.inf


@final
class Gathering:
    """Rows as mappings, or many cells of one column at a time."""

    def __init__(self) -> None:
        self._rows: dict[str, array[int]] = {}
        self._values: dict[str, array[float]] = {}
        self.count = 0
        self.refused = False
        """There were more columns than anyone could mean."""

    def add(self, row: Mapping[str, Any]) -> None:
        """One row; what is no number is left out."""
        for name, value in row.items():
            found = number_in_cell(value)
            if found is not None:
                self._put(name, self.count, found)
        self.count += 1

    def add_cells(self, name: str, cells: Iterable[str], *, start: int) -> None:
        """The cells of one column from row `start` on; the caller counts the rows."""
        if name not in self._rows and not self._make(name):
            return
        rows, values = self._rows[name], self._values[name]
        listed = list(cells)
        try:
            values.extend(map(float, listed))  # the usual case, at the speed of C
            rows.extend(range(start, start + len(listed)))
        except ValueError:
            del values[len(rows) :]
            for row, cell in enumerate(listed, start):
                found = number_in_cell(cell) if cell else None
                if found is not None:
                    rows.append(row)
                    values.append(found)

    def table(self) -> LogTable:
        """What was gathered, columns without a single number left out."""
        columns = {
            name: (np.frombuffer(rows, dtype=np.int64), np.frombuffer(self._values[name], dtype=np.float64))
            for name, rows in self._rows.items()
            if len(rows)
        }
        notes = [f"only the first {_MOST_COLUMNS} columns were read"] if self.refused else []
        return LogTable(columns=columns, rows=self.count, notes=notes)

    def _put(self, name: str, row: int, value: float) -> None:
        if name in self._rows or self._make(name):
            self._rows[name].append(row)
            self._values[name].append(value)

    def _make(self, name: str) -> bool:
        if len(self._rows) >= _MOST_COLUMNS:
            self.refused = True
            return False
        self._rows[name], self._values[name] = array("q"), array("d")
        return True


_LOOK_BYTES = 1 << 16  # bytes
_PICKLED = (b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")
_KNOWN = {
    b"PK\x03\x04": "an archive (perhaps a checkpoint or an Excel sheet)",
    b"\x93NUMPY": "a numpy array",
    b"\x89HDF": "an HDF5 file",
    b"\x1f\x8b": "compressed with gzip",
}
_CONTROL = [bytes([code]) for code in range(32) if code not in b"\t\n\r\b\f\x1b"]
_MOST_CONTROL = 0.1  # of the first bytes: a text that was damaged has some
_ADVICE = "export the curves as CSV or JSON lines"


def encoding_of(path: Path) -> str:
    """How to decode the file."""
    must_end(path)
    try:
        with path.open("rb") as file:
            head = file.read(_LOOK_BYTES)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror or error})") from None
    if not head.strip():
        raise ConfigError(f"{path}: the file is empty")
    if head.startswith(_PICKLED):
        raise ConfigError(f"{path}: this is a pickle, which is never loaded because it can execute code; {_ADVICE}")
    for magic, what in _KNOWN.items():
        if head.startswith(magic):
            raise ConfigError(f"{path}: this is {what}; {_ADVICE}")
    if head.startswith((b"\xff\xfe", b"\xfe\xff")):
        return "utf-16"
    if sum(head.count(code) for code in _CONTROL) > _MOST_CONTROL * len(head):
        raise ConfigError(f"{path}: this is not a text file; {_ADVICE}")
    return "utf-8-sig"


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


def frame(run: Run) -> tuple[NDArray[np.int64], dict[str, Any]]:
    """Return the logged steps and a column for each curve: NaN where it was not logged; incidents by their cause."""
    curves = {"loss": run.loss, "grad_norm": run.grad_norm, "lr": run.lr, "scale": run.scale, **run.metrics}
    curves |= {name if name not in curves else f"validation/{name}": one for name, one in run.validation.items()}
    curves = {name: series for name, series in curves.items() if len(series)}
    causes = {incident.step: incident.cause for incident in run.incidents}
    every = [series.steps for series in curves.values()] + [np.array(sorted(causes), dtype=np.int64)]
    steps = np.unique(np.concatenate(every))
    columns: dict[str, Any] = {}
    for name, series in curves.items():
        values = np.full(len(steps), np.nan)
        values[np.searchsorted(steps, series.steps)] = series.values  # of a step that comes twice, the later one
        columns[name] = values
    if causes:
        columns["incident"] = [causes.get(step) for step in steps.tolist()]
    return steps, columns


def needed(package: str, call: str) -> Any:
    """Return a package that `call` needs, or raise with the command that installs it."""
    try:
        return import_module(package)
    except ModuleNotFoundError:
        raise ConfigError(f"{call}() needs {package}: pip install {package}") from None
