"""Starts real torchrun processes; a hang is a failure."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent


def torchrun(*command: str, ranks: int, folder: Path, timeout: float = 120, restarts: int = 0) -> str:
    """Run a script with arguments, or `-m module ...`, on so many ranks; what it said, or an AssertionError."""
    done = attempt(*command, ranks=ranks, folder=folder, timeout=timeout, restarts=restarts)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said[-6000:]
    return said


def attempt(
    *command: str, ranks: int, folder: Path, timeout: float = 120, restarts: int = 0
) -> subprocess.CompletedProcess[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    paths = [str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in paths if p), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [*launcher, "--max-restarts", str(restarts), *command],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout,
    )
