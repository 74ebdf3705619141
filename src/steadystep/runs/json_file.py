"""JSON: lines of one object each, a list of them, a mapping of lists, or a Hugging Face `trainer_state.json`."""

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from steadystep.errors import ConfigError
from steadystep.runs.csv_file import Gathering, encoding_of
from steadystep.runs.run import Run, Source
from steadystep.runs.table import LogTable, to_run

_SUMMARY = "train_runtime"  # the last line of a Hugging Face log: totals, no curve
_LARGEST = 1 << 30  # bytes of one JSON document


def read_json(path: Path, columns: Mapping[str, str]) -> Run:
    """The run in a JSON document."""
    if path.stat().st_size > _LARGEST:
        raise ConfigError(f"{path}: larger than 1 GB; JSON lines or CSV can be read piece by piece")
    try:
        text = path.read_text(encoding=encoding_of(path), errors="replace")
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        if "\n" in text.strip():
            return read_json_lines(path, columns)
        raise ConfigError(f"{path}: not JSON ({_brief(error)}); was it cut off?") from None
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
        raise ConfigError(f"{path}: no line of it is a JSON object")
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
            gathering.add(_flat(row))
        else:
            bad += 1
    return bad


def _table(document: Any, path: Path) -> LogTable:
    gathering = Gathering()
    if isinstance(document, list):
        for row in document:
            if isinstance(row, dict):
                gathering.add(_flat(row))
    elif isinstance(document, dict):
        lists = {str(name): values for name, values in document.items() if isinstance(values, list)}
        for i in range(max(map(len, lists.values()), default=0)):
            gathering.add({name: values[i] for name, values in lists.items() if i < len(values)})
    table = gathering.table()
    if not table.columns:
        raise ConfigError(f"{path}: no curve in it: expected a list of objects, or lists of numbers by name")
    return table


def _flat(row: Mapping[Any, Any]) -> Mapping[str, Any]:
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
