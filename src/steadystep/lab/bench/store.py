"""Results on disk: a header, then one line per job, each written as soon as it is there."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Self, final

from steadystep.errors import ConfigError
from steadystep.lab.bench.header import Header
from steadystep.lab.bench.study import Choice, Row


def results_file(folder: Path, study: str, choice: Choice) -> Path:
    """NAME.jsonl, or NAME-quick.jsonl."""
    return folder / f"{study}{'-quick' if choice.quick else ''}.jsonl"


@final
class Store:
    """The rows of one results file by key, in the order they came."""

    def __init__(self, path: Path, header: Header, rows: dict[str, Row]) -> None:
        self.path, self.header, self.rows = path, header, rows

    @classmethod
    def read(cls, path: Path) -> Self | None:
        """What is in the file; None when there is none."""
        try:
            text = path.read_text(encoding="utf-8")
        except FileNotFoundError:
            return None
        except UnicodeDecodeError:
            text = ""
        except OSError as error:
            raise ConfigError(f"{path}: cannot be read ({error.strerror})") from None
        entries = list(_entries(text))
        try:
            header = Header.read(entries[0]["header"])
        except (IndexError, KeyError, TypeError, AttributeError, ValueError):
            raise ConfigError(
                f"{path}: not a results file of steadystep bench; use another --out, or --fresh"
            ) from None
        return cls(path, header, {entry["key"]: entry["row"] for entry in entries[1:] if _is_row(entry)})

    @classmethod
    def open(cls, path: Path, header: Header, *, fresh: bool) -> Self:
        """The file to go on with, or a new one. Rows made with other code or settings are never mixed with ours."""
        found = None if fresh else cls.read(path)
        if found is not None:
            apart = found.header.differences(header)
            if apart:
                raise ConfigError(
                    f"{path} holds other results: {'; '.join(apart)}. --fresh replaces them, --out DIR keeps them, "
                    "--table shows them"
                )
            _end_the_last_line(path)
            return found
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps({"header": header.as_dict()}) + "\n", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"{path}: cannot be written ({error.strerror})") from None
        return cls(path, header, {})

    def add(self, key: str, row: Row) -> None:
        """Write it down at once."""
        self.rows[key] = row
        with self.path.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps({"key": key, "row": row}) + "\n")


def _entries(text: str) -> Iterator[Row]:
    for line in text.splitlines():
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError):  # a line that was being written when the power went
            continue
        if isinstance(entry, dict):
            yield entry


def _is_row(entry: Row) -> bool:
    return isinstance(entry.get("key"), str) and isinstance(entry.get("row"), dict)


def _end_the_last_line(path: Path) -> None:
    if not path.read_bytes().endswith(b"\n"):
        with path.open("a", encoding="utf-8") as lines:
            lines.write("\n")
