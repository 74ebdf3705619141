"""How much memory and disk the states of a run may take, when the settings do not say."""

import math
import os
import shutil
from pathlib import Path

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
