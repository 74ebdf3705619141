"""Where a run took place: what somebody needs to know who runs it again elsewhere."""

import platform
import re
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from steadystep.version import __version__


def environment(folder: Path | None = None) -> dict[str, Any]:
    """Versions, devices, threads, and the git commit of `folder` (the working directory) where there is one."""
    devices = ["cpu"]
    if torch.accelerator.is_available():
        kind = torch.accelerator.current_accelerator()
        module = torch.get_device_module(kind)
        namer = getattr(module, "get_device_name", lambda i: f"{kind}:{i}")
        devices += [str(namer(i)) for i in range(torch.accelerator.device_count())]
    return {
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "steadystep": __version__,
        "platform": platform.platform(),
        "devices": devices,
        "threads": torch.get_num_threads(),
        "git": git_commit(Path.cwd() if folder is None else folder),
    }


def git_commit(folder: Path) -> str | None:
    """The commit that is checked out around `folder`, read from files: starting git would take longer."""
    with suppress(OSError):
        for place in (folder, *folder.parents):
            git = place / ".git"
            if git.is_dir():
                return _commit(git)
    return None


def _commit(git: Path) -> str | None:
    head = (git / "HEAD").read_text().strip()
    if not head.startswith("ref: "):
        return head if re.fullmatch("[0-9a-f]{40,64}", head) else None
    name = head.removeprefix("ref: ")
    if (git / name).is_file():
        return (git / name).read_text().strip()
    packed = (git / "packed-refs").read_text()
    found = re.search(rf"^([0-9a-f]+) {re.escape(name)}$", packed, re.M)
    return found.group(1) if found else None
