"""Files and folders that are there whole or not at all, whenever the process or the machine stops.

A folder is made under a hidden name, reaches the disk, and is renamed. Hidden names carry who made them: what a dead
process left behind is removed by the next one that opens the place.
"""

import hashlib
import itertools
import os
import re
import shutil
import socket
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import final

_PIECE = 1 << 20  # bytes; small enough to be hashed and written from the cache
_HOST = re.sub(r"[^A-Za-z0-9]", "_", socket.gethostname())[:32] or "host"
_BIRTH = os.urandom(4).hex()  # why: in containers every process has the same number
_SERIAL = itertools.count()
_HIDDEN = re.compile(r"\.(?P<name>.+)\.(?P<host>\w+)-(?P<pid>\d+)-(?P<birth>[0-9a-f]{8})-\d+\.(?P<part>new|old|gone)")
_STRANGE_S = 86_400.0  # on a shared disk: whoever made this a day ago on another machine no longer writes it


@final
@dataclass(frozen=True, slots=True)
class FileMark:
    """What a file must be to be the one that was written."""

    size: int
    sha256: str


def write_file(path: Path, pieces: Iterable[bytes | memoryview]) -> FileMark:
    """Write a new file and wait until the disk has it."""
    digest, size = hashlib.sha256(), 0
    with path.open("xb") as file:
        for whole in pieces:
            for start in range(0, len(whole), _PIECE):
                piece = whole[start : start + _PIECE]
                digest.update(piece)
                file.write(piece)
                size += len(piece)
        file.flush()
        os.fsync(file.fileno())
    return FileMark(size, digest.hexdigest())


def mark_of(path: Path) -> FileMark:
    """Read the file once."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256")
        return FileMark(file.tell(), digest.hexdigest())


def hidden(path: Path, part: str) -> Path:
    """A name beside `path` that nobody else uses."""
    return path.with_name(f".{path.name}.{_HOST}-{os.getpid()}-{_BIRTH}-{next(_SERIAL)}.{part}")


def sync_folder(folder: Path) -> None:
    """Wait until the disk knows what is in the folder."""
    if os.name != "posix":  # elsewhere a folder cannot be opened
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def move_in(new: Path, path: Path) -> None:
    """Give the folder `new` its name; one that has it already is replaced.

    Between the two renames of a replacement both are there under hidden names; `clear_leftovers` puts the old one back.
    """
    sync_folder(new)
    old = hidden(path, "old")
    if path.exists():
        os.rename(path, old)
    try:
        os.rename(new, path)
    except OSError:
        if old.exists():
            os.rename(old, path)
        raise
    sync_folder(path.parent)
    shutil.rmtree(old, ignore_errors=True)


def remove(path: Path) -> None:
    """Remove a folder: first its name, so that no half of it is ever seen."""
    gone = hidden(path, "gone")
    os.rename(path, gone)
    shutil.rmtree(gone)


def clear_leftovers(folder: Path) -> None:
    """What dead processes left: an old one without its successor gets its name back, the rest goes."""
    for path in sorted(folder.iterdir()):
        found = _HIDDEN.fullmatch(path.name)
        if found is None:
            continue
        with suppress(OSError):  # why: another process may be doing the same
            whole = folder / found["name"]
            if found["part"] == "old" and not whole.exists():
                os.rename(path, whole)
                sync_folder(folder)
            elif not _alive(found["host"], int(found["pid"]), found["birth"], path):
                shutil.rmtree(path)


def _alive(host: str, pid: int, birth: str, path: Path) -> bool:
    if host != _HOST or os.name != "posix":  # elsewhere asking for a process by signal 0 would interrupt it
        return time.time() - path.stat().st_mtime < _STRANGE_S
    if pid == os.getpid():
        return birth == _BIRTH
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True  # it belongs to somebody else
    return True
