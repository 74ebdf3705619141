"""One copy of each small idea that several rooms share."""

import contextlib
import os
import random
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from operator import attrgetter
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, TypeVar, final

_EXPORT = re.compile(r"^from (\S+) import (\w+) as \2$", re.MULTILINE)


def lazy_names(package: str, homes: Mapping[str, Sequence[str]]) -> Callable[[str], object]:
    """Return a module-level `__getattr__` for `package`: each name is imported from its module when it is asked for.

    Args:
        package: `__name__` of the package.
        homes: names by the module that defines them, relative to the package: `terminal`, `.runs.run_log`.
    """
    modules = {name: module for module, names in homes.items() for name in names}

    def load(name: str) -> object:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module("." + modules[name], package), name)

    return load


def stub_homes(stub: str) -> dict[str, str]:
    """Return the module of each name that a stub re-exports, one per line as `from module import name as name`."""
    return {name: module for module, name in _EXPORT.findall(stub)}


def object_at(name: str) -> Any:
    """Return what `package.module:name` names; modules in the working directory are found too."""
    module, _, attribute = name.partition(":")
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    return attrgetter(attribute)(import_module(module))


def load_quietly(module: str) -> ModuleType:
    """Import a module and leave Python's random state as it was.

    Some packages draw random numbers while they are imported, which would change a seeded program.
    """
    numbers = random.getstate()
    try:
        return import_module(module)
    finally:
        random.setstate(numbers)


def this_process() -> dict[str, Any]:
    """Return number, start and host of this process, ready for JSON."""
    return {"pid": os.getpid(), "started": started(os.getpid()), "host": _host()}


def is_alive(process: Mapping[str, Any]) -> bool | None:
    """Return whether the process that `this_process` described still runs; None on another host, or if unknown."""
    pid = process.get("pid")
    if type(pid) is not int or process.get("host") != _host():
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


def _host() -> str:
    import socket  # why here: it takes time, and most programs need none

    return socket.gethostname()


def _stat(pid: int) -> list[str]:
    """Fields of /proc/<pid>/stat from the state on; none where there is no such file."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (OSError, ValueError):
        return []


RunStatus = Literal["running", "finished", "stopped", "stale", "idle"]
QUIET_S = 120.0  # without a new line, where nothing is known of the process


def run_status(
    ended: bool | None, end: str, process: Mapping[str, Any], changed: float, now: float | None = None
) -> RunStatus:
    """Return the status of a run: "stale" if its process is gone without an end, "idle" if the format does not tell.

    Args:
        ended: whether the log has an end; None if the format does not tell.
        end: how it ended.
        process: the process that wrote the log, where it is known.
        changed: when the log last changed, in seconds since 1970.
        now: the time. Default: the clock.
    """
    if end in ("stopped", "error"):
        return "stopped"
    if ended:
        return "finished"
    alive = is_alive(process) if ended is False else None
    if alive is None:
        alive = (time.time() if now is None else now) - changed < QUIET_S
    if alive:
        return "running"
    return "stale" if ended is False else "idle"


_T = TypeVar("_T")


@final
class Attempts:
    """Measurements that not every job allows: one that fails is left out, and named."""

    def __init__(self) -> None:
        self.failed: dict[str, str] = {}
        """What was not measured, and the error."""

    def __call__(self, default: _T, measure: Callable[..., _T], *args: Any, **options: Any) -> _T:
        """What `measure` returns, else `default`."""
        try:
            return measure(*args, **options)
        except Exception as error:  # why all: dtypes, layouts and containers are the user's, and so is the loss
            self.failed[measure.__name__.strip("_")] = f"{type(error).__name__}: {str(error)[:80]}"
            return default
