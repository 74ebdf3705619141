"""One process per run folder: two would write over each other's checkpoints and log.

The file `.lock` in the folder says which process it is, and the process holds a lock of the operating system on it. A
process that has died holds none, so what it left behind is not in the way: not after `kill -9`, not on another machine
where the file system knows locks. Where it does not, a process of this machine is known by its number and the time it
was started; of a process on another machine nothing is known, and it counts as alive.
"""

import contextlib
import json
import os
import socket
import weakref
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, final

from steadystep._utils import is_running
from steadystep._utils import started as _started
from steadystep.errors import MisuseError

fcntl: Any
try:
    import fcntl
except ImportError:  # Windows: the process number has to do
    fcntl = None

FILE = ".lock"
_TRIES = 5  # the owner may remove the file between two looks at it


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """The process that writes to a folder."""

    pid: int
    started: str
    """What tells it from a later process of the same number; empty where that cannot be known."""
    host: str
    since: str

    @classmethod
    def here(cls) -> "Owner":
        """This process."""
        pid, now = os.getpid(), datetime.now(UTC).isoformat(timespec="seconds")
        return cls(pid=pid, started=_started(pid), host=socket.gethostname(), since=now)

    @property
    def is_alive(self) -> bool | None:
        """None for a process of another machine."""
        if self.host != socket.gethostname():
            return None
        return is_running(self.pid) and _started(self.pid) == self.started


@final
class RunLock:
    """Held from the moment it is made until `release`, the end of the process, or nobody holds this object."""

    def __init__(self, folder: Path, *, force: bool = False) -> None:
        """Take it; a guard of this same process may hold it too. With `force` go on without it where it is held.

        Raises:
            MisuseError: another process holds it, and `force` is false.
        """
        key = os.path.realpath(folder / FILE)  # why not resolve: it raises where links lead in a circle
        self._finalizer = weakref.finalize(self, _let_go, key, os.getpid())
        held = _HELD.get(key)
        if held is not None and held.pid == os.getpid():
            held.count += 1
            return
        try:
            _HELD[key] = _HeldLock(_open(folder), os.getpid())
        except OSError:  # what cannot be written to needs no lock; who tries to write says why it cannot
            self._finalizer.detach()
        except MisuseError:
            self._finalizer.detach()
            if not force:
                raise

    def release(self) -> None:
        """Let others in; more than once is fine."""
        self._finalizer()


@dataclass(slots=True)
class _HeldLock:
    file: int
    pid: int
    count: int = 1


_HELD: dict[str, _HeldLock] = {}
"""Of this process, by file. A process that was forked off has inherited it, but not the locks."""


def _let_go(key: str, pid: int) -> None:
    held = _HELD.get(key)
    if held is None or held.pid != os.getpid() or pid != os.getpid():
        return
    held.count -= 1
    if held.count == 0:
        del _HELD[key]
        with contextlib.suppress(OSError):
            if os.fstat(held.file).st_ino == os.stat(key).st_ino:
                os.unlink(key)
        with contextlib.suppress(OSError):
            os.close(held.file)


def _open(folder: Path) -> int:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / FILE
    for _ in range(_TRIES):
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            mine = _lock(file)
            if mine and not _is_at(file, path):
                os.close(file)
                continue
            owner = _read(file)
            if _is_held(owner, mine):
                raise MisuseError(_in_use(folder, owner))
            os.ftruncate(file, 0)
            os.pwrite(file, json.dumps(asdict(Owner.here())).encode(), 0)
        except BaseException:
            with contextlib.suppress(OSError):
                os.close(file)
            raise
        return file
    raise OSError("the lock is taken and released too quickly")


def _is_held(owner: Owner | None, mine: bool | None) -> bool:
    """`mine`: whether the system gave us its lock; None where it has none to give."""
    if mine is False:
        return True
    if owner is None or owner.pid == os.getpid():
        return False
    alive = owner.is_alive
    return mine is None if alive is None else alive


def _lock(file: int) -> bool | None:
    if fcntl is None:
        return None
    try:
        # why not flock: a worker process that a killed trainer has left behind would go on holding it
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (PermissionError, BlockingIOError):
        return False
    except OSError:
        return None
    return True


def _is_at(file: int, path: Path) -> bool:
    try:
        return os.fstat(file).st_ino == path.stat().st_ino
    except OSError:
        return False


def _read(file: int) -> Owner | None:
    try:
        known: Any = json.loads(os.pread(file, 4096, 0))
        return Owner(
            pid=int(known["pid"]), started=str(known["started"]), host=str(known["host"]), since=str(known["since"])
        )
    except (OSError, ValueError, LookupError, TypeError):
        return None


def _in_use(folder: Path, owner: Owner | None) -> str:
    who = f"process {owner.pid} on {owner.host}, since {owner.since}" if owner else "another process"
    return (
        f"{folder} is in use by {who}: two runs in one folder would overwrite each other's checkpoints. Use another "
        "run_dir, or stop that process; to use it anyway: Guard(..., force=True) or steadystep train --force"
    )
