"""Where the states of a run live, and what that is worth: a function of sizes alone, the same on every rank."""

import math
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import final

_PAIR = 2  # states: what a rollback needs, one that is trusted and one that is becoming so
_GIB = 2**30


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """How many states of `size` bytes are kept, and where."""

    size: float
    in_memory: int
    on_disk: int = 0
    is_compact: bool = False
    """One state, the optimizer's moments in half precision: weights go back exactly, moments to three digits."""

    @property
    def count(self) -> int:
        """All of them."""
        return self.in_memory + self.on_disk


def place(*, size: float, compact_size: float, count: int, memory: float, disk: float) -> Placement:
    """Return where up to `count` states of `size` bytes go, with so many bytes of memory and of disk for all of them.

    Memory comes first. The disk makes up for what is missing to two. Where not even one fits, a compact one may.

    >>> place(size=12e9, compact_size=8e9, count=4, memory=64e9, disk=0.0).in_memory
    4
    >>> spilled = place(size=12e9, compact_size=8e9, count=4, memory=16e9, disk=100e9)
    >>> spilled.in_memory, spilled.on_disk
    (1, 1)
    >>> last = place(size=12e9, compact_size=8e9, count=4, memory=9e9, disk=0.0)
    >>> last.count, last.is_compact, place(size=12e9, compact_size=8e9, count=4, memory=1e9, disk=0.0).count
    (1, True, 0)
    """
    size = max(size, 1.0)
    in_memory = int(min(memory / size, count))
    on_disk = int(min(disk / size, max(min(count, _PAIR) - in_memory, 0)))
    if in_memory + on_disk == 0 and count and memory >= compact_size:
        return Placement(size=compact_size, in_memory=1, is_compact=True)
    return Placement(size=size, in_memory=in_memory, on_disk=on_disk)


def protection(placed: Placement, *, interval: int, trust_steps: int, checkpoints: bool) -> str:
    """What this placement buys, in one line.

    >>> print(protection(Placement(size=2**30, in_memory=4), interval=80, trust_steps=20, checkpoints=False))
    bad updates are skipped; rollbacks use 4 snapshots of 1.00 GiB in memory, one every 80 steps, trusted after 20
    """
    begin = "bad updates are skipped; "
    if not placed.count:
        rest = "use checkpoints on disk only" if checkpoints else "are not possible: no snapshot fits"
        return f"{begin}rollbacks {rest}"
    kinds = [(placed.in_memory, "in memory"), (placed.on_disk, "on disk")]
    where = " and ".join(f"{_states(count)} of {placed.size / _GIB:.2f} GiB {place}" for count, place in kinds if count)
    compact = " (moments in half precision)" if placed.is_compact else ""
    saved = ", and checkpoints" if checkpoints else ""
    return f"{begin}rollbacks use {where}{compact}, one every {interval} steps, trusted after {trust_steps}{saved}"


def without_replay(trust_steps: int, why: str) -> str:
    """What a rollback costs where updates cannot be replayed.

    >>> print(without_replay(20, "4 ranks"))
    a rollback loses 20 or more updates here, because they are not replayed: 4 ranks
    """
    return f"a rollback loses {trust_steps} or more updates here, because they are not replayed: {why}"


def _states(count: int) -> str:
    return "1 snapshot" if count == 1 else f"{count} snapshots"


_SHARE = 0.25  # of what the machine has, for all processes of this run on it


def memory_bytes(setting_gb: float | None) -> float:
    """The setting, or this process's part of a quarter of the machine's memory."""
    if setting_gb is not None:
        return setting_gb * 2**30
    try:
        return _SHARE * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / _processes()
    except (AttributeError, ValueError, OSError):  # not a POSIX system
        return math.inf


def disk_bytes(setting_gb: float | None, folder: Path | None) -> float:
    """The setting, or this process's part of a quarter of what is free where `folder` is; 0 without one."""
    if folder is None:
        return 0.0
    if setting_gb is not None:
        return setting_gb * 2**30
    there = next((path for path in (folder, *folder.absolute().parents) if path.exists()), None)
    try:
        return 0.0 if there is None else _SHARE * shutil.disk_usage(there).free / _processes()
    except OSError:
        return 0.0


def _processes() -> int:
    """On this machine, as torchrun counts them: each keeps states of its own."""
    try:
        return max(int(os.environ.get("LOCAL_WORLD_SIZE", "1")), 1)
    except ValueError:
        return 1
