"""Which process is meant, and whether it still runs: a process number alone may belong to another one by now."""

import contextlib
import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def this_process() -> dict[str, Any]:
    """Return number, start and host of this process, ready for JSON."""
    return {"pid": os.getpid(), "started": started(os.getpid()), "host": socket.gethostname()}


def is_alive(process: Mapping[str, Any]) -> bool | None:
    """Return whether the process that `this_process` described still runs; None on another host, or if unknown."""
    pid = process.get("pid")
    if type(pid) is not int or process.get("host") != socket.gethostname():
        return None
    return is_running(pid) and started(pid) == process.get("started")


def is_running(pid: int) -> bool:
    """Return whether there is such a process; one that has ended and waits for its parent does not count."""
    if pid <= 0:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):  # another user's
        return True
    fields = _stat(pid)
    return not fields or fields[0] not in "ZX"


def started(pid: int) -> str:
    """Return what tells a process from a later one of the same number; empty where that cannot be known."""
    fields = _stat(pid)
    if len(fields) < 20:
        return ""
    with contextlib.suppress(OSError):
        return f"{fields[19]}@{Path('/proc/sys/kernel/random/boot_id').read_text().strip()}"
    return fields[19]


def _stat(pid: int) -> list[str]:
    """Fields of /proc/<pid>/stat from the state on; none where there is no such file."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (OSError, ValueError):
        return []
