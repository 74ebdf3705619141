"""Columns of numbers, gathered row by row or cell by cell; and what kind of file it is."""

import math
from array import array
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, final

import numpy as np

from steadystep._utils.text import must_end
from steadystep.errors import ConfigError
from steadystep.runs.table import LogTable

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
