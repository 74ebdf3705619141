"""The file under a run log: how it is begun, written to and ended."""

import json
import logging
import os
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from steadystep.errors import TrainingHalted

logger = logging.getLogger("steadystep")


def state(path: Path) -> tuple[bool, bool]:
    """Whether there is anything, and whether a crash left it without an end: what is appended must not stick to it."""
    if not path.exists() or path.stat().st_size == 0:
        return False, False
    with path.open("rb") as file:
        file.seek(-1, 2)
        return True, file.read(1) != b"\n"


def is_gone(file: IO[str]) -> bool:
    """No name leads to it any more: what is written to it nobody will read."""
    try:
        return not file.closed and os.fstat(file.fileno()).st_nlink == 0
    except (OSError, ValueError):
        return False


def dropped(
    file: IO[str], pending: list[str], path: Path, process: int, unwritten: list[int], last_before: int
) -> None:
    """Nobody closed it: the log was let go of, or the program ends. `last_before` is the id of an older error."""
    # why last_value: at the end of a program, what ended it is no longer being handled
    last: BaseException | None = getattr(sys, "last_value", None)
    if id(last) == last_before:  # of an earlier cell of a notebook
        last = None
    end(file, pending, path, process, unwritten, sys.exc_info()[1] or last)


def end(
    file: IO[str],
    pending: list[str],
    path: Path,
    process: int,
    unwritten: list[int],
    error: BaseException | None,
) -> None:
    """The last lines and how it ended; then the file is closed."""
    if os.getpid() == process:  # what was forked off has a copy of the lines, and no business here
        line: dict[str, Any] = {"kind": "end", "how": "finished", "time": round(time.time(), 1)}
        if unwritten[0]:
            line["unwritten"] = unwritten[0]
        if error is not None:
            stopped = isinstance(error, TrainingHalted | KeyboardInterrupt | SystemExit)
            line |= {"how": "stopped" if stopped else "error", "error": f"{type(error).__name__}: {error}"[:1000]}
        pending.append(json.dumps(line) + "\n")
        write(file, pending, path)
    with suppress(OSError):  # a full disk fails once more on what the file still buffers
        file.close()


def write(file: IO[str], pending: list[str], path: Path) -> None:
    """What is pending; a disk that is full ends the log and not the training."""
    lines = "".join(pending)
    pending.clear()
    if file.closed:
        return
    try:
        file.write(lines)
        file.flush()
    except OSError as error:
        logger.warning("run log %s stopped (%s); training goes on", path, error.strerror or error)
        with suppress(OSError):
            file.close()
