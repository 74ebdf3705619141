"""Reads a run log: all of it, or what was added since the last look. Needs no torch; forgives what a crash leaves."""

import json
import os
from pathlib import Path
from typing import IO, Any, final

from steadystep.errors import ConfigError
from steadystep.given_file import must_end
from steadystep.track.ledger import Ledger
from steadystep.track.run import Run

NAME = "run.jsonl"
_CHUNK = 1 << 20  # bytes; its rows as Python objects take about ten times as much, for a moment
_LONGEST_LINE = 1 << 26  # bytes; no step of ours comes near
_HEADER = b'{"kind": "start"'  # what a log begins with


def read(path: str | Path) -> Run:
    """The run whose folder, or whose `run.jsonl`, this is.

    Raises:
        ConfigError: there is no run log here, or nothing in it.
    """
    follower = Follower(path)
    follower.update()
    if follower.is_empty:
        raise ConfigError(f"{follower.path}: the log is empty: the run has written nothing to it")
    return follower.run


@final
class Follower:
    """Reads on from where it was, while the log grows. For one thread at a time."""

    def __init__(self, path: str | Path) -> None:
        given = Path(path)
        self.path = given / NAME if given.is_dir() else given
        self._forget()

    def _forget(self) -> None:
        self._ledger = Ledger(self.path.parent)
        self._tail = b""
        self._offset = 0
        self._identity: tuple[int, int] | None = None
        self._run: Run | None = None
        self._dropped = 0

    @property
    def is_empty(self) -> bool:
        """Not one line of it has been seen."""
        return not self._ledger.known

    @property
    def run(self) -> Run:
        """The run as of the last update."""
        if self._run is None:
            notes: tuple[str, ...] = ("the log is empty",) if not self._ledger.known else ()
            if self._dropped:
                notes += (f"{self._dropped} lines longer than {_LONGEST_LINE >> 20} MB were left out",)
            self._run = self._ledger.as_run(notes)
        return self._run

    def update(self) -> bool:
        """Read what is new; True when there was anything. A log that was replaced is read from its beginning.

        Raises:
            ConfigError: the file is not there, cannot be read, or is something else.
        """
        try:
            if self.path.exists():
                must_end(self.path)
            with self.path.open("rb") as file:
                return self._read(file)
        except FileNotFoundError:
            raise ConfigError(f"{self.path}: there is no run log here (a run's folder holds one, {NAME})") from None
        except OSError as error:
            raise ConfigError(f"{self.path}: cannot be read ({error.strerror or error})") from None

    def _read(self, file: IO[bytes]) -> bool:
        status = os.fstat(file.fileno())
        identity = (status.st_dev, status.st_ino)
        if self._identity not in (None, identity) or status.st_size < self._offset:
            self._forget()
        self._identity = identity
        file.seek(self._offset)
        changed = False
        while chunk := file.read(_CHUNK):
            self._offset += len(chunk)
            *lines, self._tail = (self._tail + chunk).split(b"\n")
            if len(self._tail) > _LONGEST_LINE:
                self._tail, self._dropped = b"", self._dropped + 1
            if lines:
                self._ledger.take(_parsed([line for line in lines if line]))
                changed, self._run = True, None
            self._check()
        return changed

    def _check(self) -> None:
        """Something else, such as another tool's log: not one line of it makes sense."""
        ledger = self._ledger
        begun = self._tail and not _HEADER.startswith(self._tail[: len(_HEADER)])
        if not ledger.known and (ledger.junk or ledger.unknown or begun or self._dropped):
            self._forget()
            raise ConfigError(f"{self.path}: not a run log of steadystep (`steadystep diagnose` reads other logs too)")


def _parsed(lines: list[bytes]) -> list[Any]:
    """Each line's value, None for one that is not JSON."""
    try:
        # why all at once: one call is three times as quick as one per line
        found: list[Any] = json.loads(b"[" + b",".join(lines) + b"]")
        if len(found) == len(lines):
            return found
    except (ValueError, RecursionError):
        pass
    return [_value(line) for line in lines]


def _value(line: bytes) -> Any:
    try:
        return json.loads(line.decode())
    except (ValueError, RecursionError):
        return None
