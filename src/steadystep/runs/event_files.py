"""TensorBoard event files: scalars only, read record by record. Needs the extra `tensorboard`.

A record is a length, a checksum, a message and a checksum. Checksums are not verified: in pure Python that costs more
than all the rest, and what is damaged does not parse.
"""

import struct
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from steadystep._utils.text import install
from steadystep.errors import ConfigError
from steadystep.runs.csv_file import Gathering
from steadystep.runs.roles import is_held_out, words
from steadystep.runs.run import Run
from steadystep.runs.table import to_run

_LARGEST = 1 << 28  # bytes of one record
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
        if home is None and parent != folder and (is_held_out(parent.name) or "train" in words(parent.name)):
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
        _gather(file, prefix, event, gathering, notes)
    table = gathering.table()
    if len(table.columns) < 2:
        raise ConfigError(f"{folder}: there are event files and not a single scalar in them")
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


def _gather(file: Path, prefix: str, event: Any, gathering: Gathering, notes: list[str]) -> None:
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
                length = struct.unpack("<Q", header[:8])[0] if len(header) == 12 else _LARGEST
                body = file.read(length + 4) if length < _LARGEST else b""
                if len(body) < length + 4:
                    notes.append(f"{path.name} ends in the middle of a record: what stands before it was read")
                    return
                yield body[:-4]
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror or error})") from None
