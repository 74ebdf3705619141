"""Opens anybody's log: what it is, is seen by its name and its first bytes."""

from collections.abc import Mapping
from dataclasses import replace
from itertools import islice
from pathlib import Path

from steadystep._utils.text import is_folder
from steadystep.errors import ConfigError
from steadystep.runs.csv_and_databases import is_database, read_csv, read_database
from steadystep.runs.gathering import encoding_of
from steadystep.runs.json_and_events import is_event_file, read_events, read_json, read_json_lines, runs_below
from steadystep.runs.run import Run
from steadystep.runs.table import check_roles
from steadystep.runs.text_log import is_text_log, read_text

_OURS = "run.jsonl"
_STATE = "trainer_state.json"
_TEXT = (".csv", ".tsv", ".jsonl", ".ndjson", ".parquet", ".db", ".sqlite")
_PRINTED = (".log", ".txt", ".out")
_MOST_PRINTED = 200  # files of a folder that are looked into
_FORMS = (
    "steadystep run folders, TensorBoard events, CSV, JSON lines, trainer_state.json, what a training script printed, "
    "and the SQLite or Parquet files of Trackio and MLflow"
)


def open_run(path: str | Path, columns: Mapping[str, str] | None = None) -> Run:
    """Read the run at `path`: our log, TensorBoard events, CSV, JSON, a `trainer_state.json`, or printed text.

    Args:
        path: a file, or a folder that holds one run. Of a file with several runs the first is read.
        columns: which column is the `step`, `loss`, `grad_norm`, `lr` or `val_loss`, where the names do not tell.

    Raises:
        ConfigError: it cannot be read; the message names the reason and what to try.
    """
    place = Path(path)
    if is_folder(place):
        found = find_runs(place)
        if len(found) > 1:
            names = ", ".join(str(run.relative_to(place)) for run in found[:5])
            more = ", ..." if len(found) > 5 else ""
            raise ConfigError(f"{place}: found {len(found)} runs here ({names}{more}): name one of them")
    runs = open_runs(place, columns)
    if len(runs) == 1:
        return runs[0]
    names = ", ".join(repr(run.name) for run in runs[:5]) + (", ..." if len(runs) > 5 else "")
    note = f"the file contains {len(runs)} runs ({names}): {runs[0].name!r} is read"
    return replace(runs[0], notes=(*runs[0].notes, note))


def read_run(path: str | Path, columns: Mapping[str, str] | None = None) -> Run:
    """Read the run at `path`, ours or another tool's, without torch: curves as arrays, incidents, settings.

    `run.to_pandas()` and `run.to_polars()` give a table with a row per step, `run.numbers()` the figures of its report.

    Args:
        path: a run folder, or the log of another tool: TensorBoard events, CSV, JSON, `trainer_state.json`, text.
        columns: which column is the `step`, `loss`, `grad_norm`, `lr` or `val_loss`, where the names do not tell.

    Raises:
        ConfigError: it cannot be read; the message names the reason and what to try.
    """
    return open_run(path, columns)


def open_runs(path: str | Path, columns: Mapping[str, str] | None = None) -> tuple[Run, ...]:
    """Read every run of one file, such as the export of a panel with several runs; a folder of one run works too.

    Args:
        path: a file, or a folder that holds one run.
        columns: as for `open_run`.

    Raises:
        ConfigError: it cannot be read; the message names the reason and what to try.
    """
    place, asked = Path(path), dict(columns or {})
    check_roles(asked)
    if not is_folder(place):
        return _open_file(place, asked)
    found = find_runs(place)
    if found[0] != place:
        return open_runs(found[0], asked)
    if (place / _OURS).is_file():
        return (_read_ours(place),)
    return (read_events(runs_below(place)[place], folder=place, columns=asked),)


def find_runs(path: str | Path) -> tuple[Path, ...]:
    """Return what can be opened at `path`: a file itself, or all runs in a folder, at any depth.

    Raises:
        ConfigError: there is none.
    """
    place = Path(path)
    if not is_folder(place):
        return (place,)
    try:
        found = _runs_in(place)
    except OSError as error:
        raise ConfigError(f"{place}: cannot be read ({error.strerror or error})") from None
    if not found:
        raise ConfigError(f"{place}: no log in this folder; supported are {_FORMS}")
    return found


def _runs_in(place: Path) -> tuple[Path, ...]:
    if (place / _OURS).is_file():
        return (place,)
    ours = sorted(file.parent for file in place.rglob(_OURS) if file.is_file())
    if ours:
        return tuple(ours)
    state = _last_state(place)
    if state is not None:
        return (state,)
    states = [run for folder in sorted(place.iterdir()) if folder.is_dir() for run in [_last_state(folder)] if run]
    if states:
        return tuple(states)
    events = runs_below(place)
    if events:
        return tuple(events)
    files = [file for file in sorted(place.rglob("*")) if file.is_file()]
    tables = tuple(file for file in files if file.suffix.lower() in _TEXT)
    printed = (file for file in files if file.suffix.lower() in _PRINTED)
    return tables or tuple(file for file in islice(printed, _MOST_PRINTED) if _is_printed(file))


def _is_printed(file: Path) -> bool:
    try:
        return is_text_log(file)
    except ConfigError:  # empty, or no text
        return False


def _last_state(place: Path) -> Path | None:
    """Each checkpoint of the Hugging Face Trainer holds the log up to there; the last one holds all."""
    if (place / _STATE).is_file():
        return place / _STATE
    saved = [file for file in place.glob(f"checkpoint-*/{_STATE}") if file.parent.name[11:].isdigit()]
    return max(saved, key=lambda file: int(file.parent.name[11:]), default=None)


def _open_file(place: Path, asked: Mapping[str, str]) -> tuple[Run, ...]:
    if is_event_file(place):
        return (read_events([place], folder=place, columns=asked),)
    if is_database(place):
        return read_database(place, asked)
    try:
        return _open_table(place, asked)
    except ConfigError as error:  # no table: perhaps what a script printed
        try:
            return (read_text(place, asked),)
        except ConfigError as other:
            raise (other if place.suffix.lower() in _PRINTED else error) from None


def _open_table(place: Path, asked: Mapping[str, str]) -> tuple[Run, ...]:
    suffix = place.suffix.lower()
    with place.open(encoding=encoding_of(place), errors="replace") as file:
        head = file.read(4096).lstrip()
    first = head.split("\n", 1)[0]
    if suffix in (".jsonl", ".ndjson") or (first.startswith('{"') and first.rstrip().endswith("}")):
        if '"steadystep"' in first and '"kind"' in first:
            return (_read_ours(place),)
        return (read_json(place, asked) if "\n" not in head.strip() else read_json_lines(place, asked),)
    if suffix == ".json":
        return (read_json(place, asked),)
    if suffix not in (".csv", ".tsv") and is_text_log(place):
        return (read_text(place, asked),)
    if head.startswith(("{", "[")):
        return (read_json(place, asked),)
    return read_csv(place, asked)


def _read_ours(place: Path) -> Run:
    from steadystep.runs.run_log import read

    return read(place)
