"""JSON and TensorBoard's event files.

JSON: lines of one object each, a list of them, a mapping of lists, or a Hugging Face `trainer_state.json`.

Event files: scalars only, read record by record; needs the extra `tensorboard`. A record is a length, a checksum, a
message and a checksum. Checksums are not verified: in pure Python that costs more than all the rest, and what is
damaged does not parse.
"""

import json
import struct
from collections.abc import Iterable, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from steadystep._utils.text import install
from steadystep.errors import ConfigError
from steadystep.runs.gathering import Gathering, encoding_of
from steadystep.runs.run import Run, Source
from steadystep.runs.table import LogTable, is_held_out, name_words, to_run

_SUMMARY = "train_runtime"  # the last line of a Hugging Face log: totals, no curve
_LARGEST = 1 << 30  # bytes of one JSON document


def read_json(path: Path, columns: Mapping[str, str]) -> Run:
    """The run in a JSON document."""
    if path.stat().st_size > _LARGEST:
        raise ConfigError(f"{path}: larger than 1 GB: use JSON lines or CSV, which are read in pieces")
    try:
        text = path.read_text(encoding=encoding_of(path), errors="replace")
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        if "\n" in text.strip():
            return read_json_lines(path, columns)
        raise ConfigError(f"{path}: not JSON ({_brief(error)}): is it truncated?") from None
    source: Source = "csv"
    if isinstance(document, dict) and isinstance(document.get("log_history"), list):
        source, document = (
            "transformers",
            [row for row in document["log_history"] if isinstance(row, dict) and _SUMMARY not in row],
        )
        if not document:
            raise ConfigError(f"{path}: its log_history is empty: set logging_steps in TrainingArguments")
    name = path.parent.name if source == "transformers" else path.stem
    return to_run(_table(document, path), name=name or path.stem, path=path, source=source, asked=columns)


def read_json_lines(path: Path, columns: Mapping[str, str]) -> Run:
    """The run in a file with one JSON object in each line; lines that are none are skipped and counted."""
    gathering = Gathering()
    with path.open(encoding=encoding_of(path), errors="replace") as file:
        bad = _gather(file, gathering)
    if not gathering.count:
        raise ConfigError(f"{path}: no line is a JSON object")
    table = gathering.table()
    if bad:
        table.notes.append(f"{bad} lines could not be read and were skipped")
    return to_run(table, name=path.stem, path=path, source="csv", asked=columns)


def _gather(lines: Iterable[str], gathering: Gathering) -> int:
    bad = 0
    for line in lines:
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            bad += bool(line.strip())
            continue
        if isinstance(row, dict):
            gathering.add(flat(row))
        else:
            bad += 1
    return bad


def _table(document: Any, path: Path) -> LogTable:
    gathering = Gathering()
    if isinstance(document, list):
        for row in document:
            if isinstance(row, dict):
                gathering.add(flat(row))
    elif isinstance(document, dict):
        lists = {str(name): values for name, values in document.items() if isinstance(values, list)}
        for i in range(max(map(len, lists.values()), default=0)):
            gathering.add({name: values[i] for name, values in lists.items() if i < len(values)})
    table = gathering.table()
    if not table.columns:
        raise ConfigError(f"{path}: no curves: expected a list of objects, or lists of numbers by name")
    return table


def flat(row: Mapping[Any, Any]) -> Mapping[str, Any]:
    """Objects within the object, as `outer/inner`; most rows have none."""
    if not any(isinstance(value, dict) for value in row.values()):
        return {str(name): value for name, value in row.items()}
    return dict(_walk("", row, depth=0))


def _walk(prefix: str, row: Mapping[Any, Any], *, depth: int) -> Iterator[tuple[str, Any]]:
    for name, value in row.items():
        if isinstance(value, dict) and depth < 4:
            yield from _walk(f"{prefix}{name}/", value, depth=depth + 1)
        else:
            yield f"{prefix}{name}", value


def _brief(error: Exception) -> str:
    return "nested too deeply" if isinstance(error, RecursionError) else str(error)[:80]


_LARGEST_RECORD = 1 << 28  # bytes of one record
_FLOAT, _DOUBLE = 1, 2  # DataType of a tensor
_STEP = "step"


def is_event_file(path: Path) -> bool:
    """By its name, which TensorBoard itself goes by."""
    return "tfevents" in path.name


def runs_below(folder: Path) -> dict[Path, list[Path]]:
    """Event files by run. A folder inside a run's folder, or one called train or validation, belongs to that run."""
    found: dict[Path, list[Path]] = {}
    for file in sorted(folder.rglob("*tfevents*")):
        if file.is_file():
            found.setdefault(file.parent, []).append(file)
    runs: dict[Path, list[Path]] = {}
    for parent in sorted(found, key=lambda place: len(place.parts)):
        home = next((run for run in runs if run in parent.parents), None)
        if home is None and parent != folder and (is_held_out(parent.name) or "train" in name_words(parent.name)):
            home = parent.parent
        runs.setdefault(home or parent, []).extend(found[parent])
    return runs


def read_events(files: list[Path], *, folder: Path, columns: Mapping[str, str]) -> Run:
    """The run in these event files, the oldest first."""
    event = _event_type()
    gathering = Gathering()
    notes: list[str] = []
    begun = {file: _first_time(file, event) for file in files}
    for file in sorted(files, key=lambda file: (begun[file], file.name)):
        prefix = "" if file.parent == folder or not folder.is_dir() else f"{file.parent.name}/"
        _gather_events(file, prefix, event, gathering, notes)
    table = gathering.table()
    if len(table.columns) < 2:
        raise ConfigError(f"{folder}: the event files contain no scalars")
    table.notes.extend(notes)
    asked = {role: column for role, column in columns.items() if role != _STEP}
    return to_run(table, name=folder.name, path=folder, source="tensorboard", asked=asked)


def _event_type() -> Any:
    try:
        return import_module("tensorboard.compat.proto.event_pb2").Event
    except ImportError:
        raise ConfigError(f"event files need TensorBoard: {install('tensorboard')}") from None


def _first_time(file: Path, event: Any) -> float:
    try:
        first = next(_records(file, []), b"")
        return float(event.FromString(first).wall_time)
    except Exception:  # the parser has error types of its own; the reader below says what is wrong
        return 0.0


def _gather_events(file: Path, prefix: str, event: Any, gathering: Gathering, notes: list[str]) -> None:
    bad = 0
    for record in _records(file, notes):
        try:
            message = event.FromString(record)
        except Exception:  # why: DecodeError belongs to whichever protobuf is installed
            bad += 1
            continue
        for value in message.summary.value:
            found = _scalar(value)
            if found is not None and value.tag != _STEP:
                gathering.add({_STEP: message.step, prefix + value.tag: found})
    if bad:
        notes.append(f"{file.name}: {bad} records could not be read and were skipped")


def _scalar(value: Any) -> float | None:
    kind = value.WhichOneof("value")
    if kind == "simple_value":
        return float(value.simple_value)
    if kind != "tensor" or value.tensor.tensor_shape.dim:
        return None
    tensor = value.tensor
    for listed in (tensor.float_val, tensor.double_val):
        if listed:
            return float(listed[0])
    form = {_FLOAT: "<f", _DOUBLE: "<d"}.get(tensor.dtype)
    if form is None or len(tensor.tensor_content) != struct.calcsize(form):
        return None
    return float(struct.unpack(form, tensor.tensor_content)[0])


def _records(path: Path, notes: list[str]) -> Iterator[bytes]:
    try:
        with path.open("rb") as file:
            while header := file.read(12):
                length = struct.unpack("<Q", header[:8])[0] if len(header) == 12 else _LARGEST_RECORD
                body = file.read(length + 4) if length < _LARGEST_RECORD else b""
                if len(body) < length + 4:
                    notes.append(f"{path.name} ends in the middle of a record; everything before it was read")
                    return
                yield body[:-4]
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror or error})") from None
