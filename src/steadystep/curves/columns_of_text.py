"""Gathers numbers by column, row after row; memory is eight bytes for each number and each row it stood in."""

import math
from array import array
from collections.abc import Iterable, Mapping
from typing import Any, final

import numpy as np

from steadystep.curves.table import Table

_MOST_COLUMNS = 512
_SPECIAL = {"nan": math.nan, "inf": math.inf, "infinity": math.inf, "-inf": -math.inf, "-infinity": -math.inf}


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
        return _SPECIAL.get(str(value).strip().lower())
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

    def table(self) -> Table:
        """What was gathered, columns without a single number left out."""
        columns = {
            name: (np.frombuffer(rows, dtype=np.int64), np.frombuffer(self._values[name], dtype=np.float64))
            for name, rows in self._rows.items()
            if len(rows)
        }
        notes = [f"only the first {_MOST_COLUMNS} columns were read"] if self.refused else []
        return Table(columns=columns, rows=self.count, notes=notes)

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
