"""CSV of any kind: delimiter and columns are guessed. Exports of Weights & Biases, MLflow and TensorBoard are known."""

import csv
import math
import re
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, final

import numpy as np

from steadystep._utils.text import must_end
from steadystep.errors import ConfigError
from steadystep.runs.run import Run
from steadystep.runs.table import LogTable, to_run

_MOST_COLUMNS = 512


def number(value: Any) -> float | None:
    """The number a cell holds; None when it holds none.

    >>> number("1e-3"), number("NaN"), number(""), number(True), number("1,5")
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
        self.unreadable = 0
        """Lines or cells that were no numbers."""
        self.refused = False
        """There were more columns than anyone could mean."""

    def add(self, row: Mapping[str, Any]) -> None:
        """One row; what is no number is left out."""
        for name, value in row.items():
            found = number(value)
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
                if cell:
                    found = number(cell)
                    if found is not None:
                        rows.append(row)
                        values.append(found)
                    self.unreadable += found is None and bool(cell.strip())

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
    b"PAR1": "a Parquet file",
    b"\x93NUMPY": "a numpy array",
    b"\x89HDF": "an HDF5 file",
    b"\x1f\x8b": "compressed with gzip",
    b"SQLite": "an SQLite database",
}
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
    if b"\x00" in head:
        raise ConfigError(f"{path}: this is not a text file; {_ADVICE}")
    return "utf-8-sig"


_CHUNK = 1 << 13  # rows
_LOOK = 1 << 14  # characters
_DELIMITERS = ",;\t|"
_EXTREMES = re.compile(r"__(MIN|MAX)$")
_NAMES = ("key", "metric", "tag", "name")


def read_csv(path: Path, columns: Mapping[str, str]) -> Run:
    """The run in a CSV file."""
    with path.open(encoding=encoding_of(path), errors="replace", newline="") as file:
        head = file.read(_LOOK)
        file.seek(0)
        try:
            rows = csv.reader(file, delimiter=_delimiter(head))
            table = _table(rows, path)
        except csv.Error as error:
            raise ConfigError(f"{path}: not a CSV file ({error})") from None
    return to_run(table, name=path.stem, path=path, source="csv", asked=columns)


def _delimiter(head: str) -> str:
    first = next((line for line in head.splitlines() if line.strip() and not line.startswith("#")), "")
    counts = {delimiter: first.count(delimiter) for delimiter in _DELIMITERS}
    best = max(counts, key=lambda delimiter: counts[delimiter])
    return best if counts[best] else (" " if " " in first.strip() else ",")


def _table(rows: Iterator[list[str]], path: Path) -> LogTable:
    header = next((row for row in rows if any(cell.strip() for cell in row) and not row[0].startswith("#")), None)
    if header is None:
        raise ConfigError(f"{path}: the file has no rows")
    names = [cell.strip() for cell in header]
    first: list[list[str]] = []
    if all(number(cell) is not None for cell in names if cell):
        first, names = [header], _unnamed(len(names))
    lower = [name.lower() for name in names]
    if "value" in lower and "step" in lower:
        key = next((lower.index(name) for name in _NAMES if name in lower), None)
        if key is not None:
            return _long(rows, names, key)
        names = [path.stem if name.lower() == "value" else name for name in names]
    return _wide(first, rows, _kept(names), path)


def _unnamed(count: int) -> list[str]:
    return ["loss"] if count == 1 else [f"column {i + 1}" for i in range(count)]


def _kept(names: list[str]) -> list[str | None]:
    """What is read of each column: an export of W&B has the run's name before each, and its extremes beside it."""
    plain = [name.rsplit(" - ", 1)[-1] for name in names]
    times, taken = Counter(plain), set[str]()
    found: list[str | None] = []
    for name, short in zip(names, plain, strict=True):
        chosen = short if times[short] == 1 else name
        kept = bool(name) and not _EXTREMES.search(name) and chosen not in taken
        found.append(chosen if kept else None)
        if kept:
            taken.add(chosen)
    return found


def _wide(first: list[list[str]], rows: Iterator[list[str]], names: list[str | None], path: Path) -> LogTable:
    gathering = Gathering()
    chunk = first + list(islice(rows, _CHUNK))
    short = 0
    while chunk:
        lengths = set(map(len, chunk))
        whole = chunk
        if lengths != {len(names)}:
            whole = [row for row in chunk if len(row) >= len(names)]
            short += sum(0 < len(row) < len(names) for row in chunk)
        if whole:
            for name, cells in zip(names, zip(*whole, strict=False), strict=False):
                if name is not None:
                    gathering.add_cells(name, cells, start=gathering.count)
        gathering.count += len(whole)
        chunk = list(islice(rows, _CHUNK))
    if not gathering.count:
        raise ConfigError(f"{path}: the file has a header and no rows")
    table = gathering.table()
    if short:
        table.notes.append(f"{short} incomplete rows were skipped")
    if not table.columns:
        raise ConfigError(f"{path}: no column contains numbers: is this the log of a training run?")
    return table


def _long(rows: Iterator[list[str]], names: list[str], key: int) -> LogTable:
    """One number per row with its name, as MLflow writes the history of metrics."""
    lower = [name.lower() for name in names]
    step, value = lower.index("step"), lower.index("value")
    gathering = Gathering()
    for row in rows:
        if len(row) > max(step, value, key):
            gathering.add({"step": row[step], row[key].strip() or "value": row[value]})
    return gathering.table()
