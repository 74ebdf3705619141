"""CSV of any kind: delimiter and columns are guessed. Exports of Weights & Biases, MLflow and TensorBoard are known."""

import csv
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path

from steadystep.curves.columns_of_text import Gathering, number
from steadystep.curves.table import Table, to_run
from steadystep.curves.text import encoding_of
from steadystep.errors import ConfigError
from steadystep.track.run import Run

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


def _table(rows: Iterator[list[str]], path: Path) -> Table:
    header = next((row for row in rows if any(cell.strip() for cell in row) and not row[0].startswith("#")), None)
    if header is None:
        raise ConfigError(f"{path}: there are no rows in this file")
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


def _wide(first: list[list[str]], rows: Iterator[list[str]], names: list[str | None], path: Path) -> Table:
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
        raise ConfigError(f"{path}: there is a header and no row below it")
    table = gathering.table()
    if short:
        table.notes.append(f"{short} rows were cut short and left out")
    if not table.columns:
        raise ConfigError(f"{path}: no column holds numbers; is this a log of a training run?")
    return table


def _long(rows: Iterator[list[str]], names: list[str], key: int) -> Table:
    """One number per row with its name, as MLflow writes the history of metrics."""
    lower = [name.lower() for name in names]
    step, value = lower.index("step"), lower.index("value")
    gathering = Gathering()
    for row in rows:
        if len(row) > max(step, value, key):
            gathering.add({"step": row[step], row[key].strip() or "value": row[value]})
    return gathering.table()
