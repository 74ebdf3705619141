"""Where the states of a run live, how often one is kept, and which is given up for the next.

Functions of steps and sizes alone, the same on every rank.
"""

import math
import os
import shutil
from collections.abc import Sequence
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
    """One state, the optimizer's moments in half precision: weights are restored exactly, moments to three digits."""

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


_PAIR_INTERVALS, _PAIR_SUSPECTED = (
    2,
    3,
)  # intervals: the same where there are only two, and where one of them is set aside


# Up to so many bytes of a state, so many times the shortest interval. A copy moves six times the bytes of the weights
# (Adam, fp32), a step at least eleven times and a usual batch many more: every 20 steps that is about a hundredth. A
# large model is likely to be on an accelerator, where the copy leaves through a bus that is far slower than its memory.
_SIZES = ((64 * 2**20, 1), (512 * 2**20, 2), (4 * 2**30, 4))


_LARGEST = 8  # times: beyond that more would be lost by a rollback than won by not copying


# A state serves once it is trusted, and the first sign of damage may lie one look at the weights back. So of two the
# younger must not replace the older one too soon, and a single one is of no use in the first 40 steps of its life.
_FEW = {1: 8, 2: 2}


_TOO_OLD = 8  # intervals: the oldest is given up after that,


_OLD = 5  # for one that is at least this old


def interval_mult(size: float, count: int) -> int:
    """Return how many times the shortest interval lies between two of `count` states of `size` bytes each.

    >>> [interval_mult(2**20 * mib, 4) for mib in (1, 65, 513, 5000)], [interval_mult(0, count) for count in (1, 2, 3)]
    ([1, 2, 4, 8], [8, 2, 1])
    """
    mult = next((mult for largest, mult in _SIZES if size <= largest), _LARGEST)
    return max(mult, _FEW.get(count, 1))


def to_replace(steps: Sequence[int], *, now: int, interval: int, suspected_since: int | None = None) -> int:
    """Return the position in `steps` (oldest first) of the state to overwrite at step `now`.

    The young ones lose little when one rolls back to them; the oldest lies before the first sign of a trouble that came
    slowly. It can only be followed by a state that has itself become old: until one has, a younger one is overwritten
    instead, the newest of three, of more the one before it, so that one from just before is there. While something is
    suspected to have begun at `suspected_since`, the newest state from before is set aside and the others are a ring
    of their own. Untrained weights (step -1) are the first to go.

    >>> to_replace([0, 100, 120], now=140, interval=20), to_replace([0, 160, 180], now=200, interval=20)
    (1, 2)
    >>> to_replace([0, 160, 240], now=260, interval=20), to_replace([0, 160, 180, 200], now=220, interval=20)
    (0, 2)
    >>> to_replace([80, 120], now=160, interval=40), to_replace([-1, 19, 39], now=59, interval=20)
    (1, 0)
    """
    before = [i for i, step in enumerate(steps) if suspected_since is not None and step < suspected_since]
    if before and len(steps) > 1:
        kept = before[-1]
        others = [i for i in range(len(steps)) if i != kept]
        # why: a single other one is overwritten before it can be trusted, so the one set aside must not be all there is
        if len(others) == 1 and now - steps[kept] > _PAIR_SUSPECTED * interval:
            return kept
        return others[to_replace([steps[i] for i in others], now=now, interval=interval)]
    if len(steps) == 1 or steps[0] < 0:
        return 0
    age = now - steps[0]
    if len(steps) == 2:
        return 0 if age > _PAIR_INTERVALS * interval else 1
    if age <= _TOO_OLD * interval:
        return 1
    young = len(steps) - (2 if len(steps) > 3 else 1)
    return 0 if now - steps[1] >= _OLD * interval else young
