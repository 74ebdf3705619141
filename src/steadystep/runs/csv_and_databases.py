"""Tables of other tools: CSV of any kind, the SQLite of Trackio and MLflow, and Parquet. Pickles are never loaded.

Delimiter and columns of a CSV are guessed. Exports of Weights & Biases, MLflow and TensorBoard are known.
"""

import csv
import json
import re
import sqlite3
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import closing
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any

from steadystep.errors import ConfigError
from steadystep.runs.gathering import Gathering, encoding_of, number_in_cell
from steadystep.runs.json_and_events import flat
from steadystep.runs.run import Run, Source
from steadystep.runs.table import LogTable, to_run

_CHUNK = 1 << 13  # rows
_MOST_RUNS = 1000
_LOOK = 1 << 14  # characters
_DELIMITERS = ",;\t|"
_EXTREMES = re.compile(r"__(MIN|MAX)$")
_NAMES = ("key", "metric", "tag", "metric.name", "metric_name", "name")
_RUNS = ("run", "run_name", "run name", "run.name", "run_id", "run_uuid", "run id", "run.hash")


def read_csv(path: Path, columns: Mapping[str, str]) -> tuple[Run, ...]:
    """The runs in a CSV file: one, unless a column or the names of the columns tell several apart."""
    with path.open(encoding=encoding_of(path), errors="replace", newline="") as file:
        head = file.read(_LOOK)
        file.seek(0)
        try:
            delimiter = _delimiter(head)
            rows = csv.reader(file, delimiter=delimiter, skipinitialspace=delimiter == " ")
            tables = _tables(rows, path)
        except csv.Error as error:
            raise ConfigError(f"{path}: not a CSV file ({error})") from None
    if len(tables) > 1 and columns.get("loss") in _columns(tables):
        tables = {name: table for name, table in tables.items() if columns["loss"] in table.columns}
    return to_runs(tables, path=path, source="csv", asked=columns)


def to_runs(tables: Mapping[str, LogTable], *, path: Path, source: Source, asked: Mapping[str, str]) -> tuple[Run, ...]:
    """The runs in these tables. Those without a loss are left out, unless that would leave none."""
    found: list[Run] = []
    first: ConfigError | None = None
    for name, table in tables.items():
        try:
            found.append(to_run(table, name=name or path.stem, path=path, source=source, asked=asked))
        except ConfigError as error:
            first = first or error
    if first is not None and not found:
        raise first
    return tuple(found)


def _columns(tables: Mapping[str, LogTable]) -> set[str]:
    return {name for table in tables.values() for name in table.columns}


def _delimiter(head: str) -> str:
    first = next((line for line in head.splitlines() if line.strip() and not line.startswith("#")), "")
    counts = {delimiter: first.count(delimiter) for delimiter in _DELIMITERS}
    best = max(counts, key=lambda delimiter: counts[delimiter])
    return best if counts[best] else (" " if " " in first.strip() else ",")


def _tables(rows: Iterator[list[str]], path: Path) -> dict[str, LogTable]:
    header = next((row for row in rows if any(cell.strip() for cell in row) and not row[0].startswith("#")), None)
    if header is None:
        raise ConfigError(f"{path}: the file has no rows")
    names = [cell.strip() for cell in header]
    first: list[list[str]] = []
    if all(number_in_cell(cell) is not None for cell in names if cell):
        first, names = [header], _unnamed(len(names))
    lower = [name.lower() for name in names]
    run = next((lower.index(name) for name in _RUNS if name in lower), None)
    if "value" in lower and "step" in lower:
        key = next((lower.index(name) for name in _NAMES if name in lower), None)
        if key is not None:
            return _long(rows, names, key, run)
        names = [path.stem if name.lower() == "value" else name for name in names]
    if run is not None:
        return _grouped(rows, names, run, path)
    panel = _panel(names)
    if panel:
        return _panels(
            _wide(first, rows, [name if not _EXTREMES.search(name) else None for name in names], path), panel
        )
    return {"": _wide(first, rows, _kept(names), path)}


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


def _panel(names: list[str]) -> dict[str, list[str]]:
    """The columns of each run in an export of a W&B panel with several runs; empty for any other file."""
    runs: dict[str, list[str]] = {}
    for name in names:
        run, dash, _ = name.rpartition(" - ")
        if dash and not _EXTREMES.search(name):
            runs.setdefault(run, []).append(name)
    metrics = Counter(name.rpartition(" - ")[2] for listed in runs.values() for name in listed)
    return runs if len(runs) > 1 and max(metrics.values()) > 1 else {}


def _panels(table: LogTable, runs: Mapping[str, list[str]]) -> dict[str, LogTable]:
    """One table per run: its own columns, and those that have no run."""
    owned = {name for listed in runs.values() for name in listed}
    shared = {name: column for name, column in table.columns.items() if name not in owned}
    found: dict[str, LogTable] = {}
    for run, listed in runs.items():
        own = {name.rpartition(" - ")[2]: table.columns[name] for name in listed if name in table.columns}
        if own:
            found[run] = LogTable(columns={**shared, **own}, rows=table.rows, notes=list(table.notes))
    return found


def _grouped(rows: Iterator[list[str]], names: list[str], run: int, path: Path) -> dict[str, LogTable]:
    """Rows of several runs, told apart by one column."""
    groups: dict[str, Gathering] = {}
    for row in rows:
        if len(row) >= len(names) and (row[run] in groups or len(groups) < _MOST_RUNS):
            cells = {name: cell for at, (name, cell) in enumerate(zip(names, row, strict=False)) if name and at != run}
            groups.setdefault(row[run], Gathering()).add(cells)
    if not groups:
        raise ConfigError(f"{path}: the file has a header and no rows")
    return {name.strip(): group.table() for name, group in groups.items()}


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


def _long(rows: Iterator[list[str]], names: list[str], key: int, run: int | None) -> dict[str, LogTable]:
    """One number per row with its name, as MLflow writes the history of metrics."""
    lower = [name.lower() for name in names]
    step, value = lower.index("step"), lower.index("value")
    groups: dict[str, Gathering] = {}
    for row in rows:
        if len(row) > max(step, value, key, run or 0):
            group = "" if run is None else row[run].strip()
            if group in groups or len(groups) < _MOST_RUNS:
                cells = {"step": row[step], row[key].strip() or "value": row[value]}
                groups.setdefault(group, Gathering()).add(cells)
    return {name: group.table() for name, group in groups.items()} or {"": Gathering().table()}


_SQLITE, _PARQUET = b"SQLite format 3\x00", b"PAR1"
_RUN_NAMES = ("run_name", "run_id", "run_uuid", "run", "run.name", "run.hash")
_BATCH = 1 << 13  # rows
_NOT_METRICS = {"id", "timestamp", "run_id", "run_uuid", "run_name", "run", "log_id", "space_id", "is_nan"}


def is_database(path: Path) -> bool:
    """By its first bytes."""
    try:
        with path.open("rb") as file:
            head = file.read(len(_SQLITE))
    except OSError:
        return False
    return head == _SQLITE or head.startswith(_PARQUET)


def read_database(path: Path, columns: Mapping[str, str]) -> tuple[Run, ...]:
    """The runs in an SQLite or Parquet file.

    Raises:
        ConfigError: it has no table of metrics, is damaged, or needs a package that is not installed.
    """
    with path.open("rb") as file:
        rows = _sqlite(path) if file.read(len(_SQLITE)) == _SQLITE else _parquet(path)
    groups: dict[str, Gathering] = {}
    for run, row in rows:
        if run in groups or len(groups) < _MOST_RUNS:
            groups.setdefault(run, Gathering()).add(row)
    if not groups:
        raise ConfigError(f"{path}: the file has no rows of metrics")
    tables = {name: group.table() for name, group in groups.items()}
    return to_runs(tables, path=path, source="csv", asked=columns)


def _sqlite(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Rows of the table `metrics`: Trackio keeps a JSON object in each, MLflow one key and value."""
    try:
        with closing(_opened(path)) as connection:
            names = [str(row[1]) for row in connection.execute("PRAGMA table_info(metrics)")]
            run = next((name for name in _RUN_NAMES if name in names), None)
            wide = "metrics" in names
            if run is None or "step" not in names or not (wide or {"key", "value"} <= set(names)):
                raise ConfigError(
                    f"{path}: this SQLite database has no table of metrics as Trackio or MLflow write it; export the "
                    "curves as CSV or JSON lines"
                )
            nan = ", is_nan" if "is_nan" in names else ""
            what = "metrics" if wide else f"key, value{nan}"
            for row in connection.execute(f"SELECT {run}, step, {what} FROM metrics ORDER BY rowid"):
                if wide:
                    yield str(row[0]), {**_json(row[2]), "step": row[1]}
                else:
                    value = "nan" if nan and row[4] else row[3]
                    yield str(row[0]), {"step": row[1], str(row[2]): value}
    except sqlite3.Error as error:
        raise ConfigError(f"{path}: this SQLite database cannot be read ({error})") from None


def _opened(path: Path) -> sqlite3.Connection:
    """Read only. A database beside which nothing can be written is read as it stands."""
    place = path.resolve().as_uri()
    connection = sqlite3.connect(f"{place}?mode=ro", uri=True)
    try:
        connection.execute("SELECT name FROM sqlite_master LIMIT 1").fetchall()
    except sqlite3.Error:
        connection.close()
        connection = sqlite3.connect(f"{place}?mode=ro&immutable=1", uri=True)
    return connection


def _json(text: Any) -> Mapping[str, Any]:
    try:
        found = json.loads(text)
    except (TypeError, ValueError, RecursionError):
        return {}
    return flat(found) if isinstance(found, dict) else {}


def _parquet(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    try:
        parquet = import_module("pyarrow.parquet")
    except ImportError:
        raise ConfigError(f"{path}: a Parquet file needs pyarrow: pip install pyarrow; or export it as CSV") from None
    try:
        file = parquet.ParquetFile(path)
        names = file.schema_arrow.names
        run = next((name for name in _RUN_NAMES if name in names), None)
        for batch in file.iter_batches(batch_size=_BATCH):
            for row in batch.to_pylist():
                kept = {name: value for name, value in row.items() if name not in _NOT_METRICS and name != "metrics"}
                yield str(row[run]) if run else "", {**kept, **_json(row.get("metrics"))}
    except ConfigError:
        raise
    except Exception as error:  # why: the types of pyarrow's errors are known only where it is installed
        raise ConfigError(f"{path}: this Parquet file cannot be read ({str(error)[:80]})") from None
