"""Metrics in files that are no text: the SQLite of Trackio and MLflow, and Parquet. Pickles are never loaded."""

import json
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import closing
from importlib import import_module
from pathlib import Path
from typing import Any

from steadystep.errors import ConfigError
from steadystep.runs.csv_file import to_runs
from steadystep.runs.gathering import Gathering
from steadystep.runs.json_and_events import flat
from steadystep.runs.run import Run

_SQLITE, _PARQUET = b"SQLite format 3\x00", b"PAR1"
_RUN_NAMES = ("run_name", "run_id", "run_uuid", "run", "run.name", "run.hash")
_MOST_RUNS = 1000
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
