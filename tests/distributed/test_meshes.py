"""A guard on every kind of mesh, in real processes (gloo) that are forked: healthy, faulty, rolled back, replayed."""

import subprocess
import sys

import pytest

from tests.distributed.launch import ROOT
from tests.distributed.meshes import CHECKS, MODES

BRIEFLY = {
    2: ["norms tp", "norms sp", "replay ddp", "replay fsdp"],
    4: ["norms hsdp", "norms fsdp tp"],
}


def run(size: int, checks: list[str], *, timeout: float) -> None:
    command = [sys.executable, "-W", "ignore", "-m", "tests.distributed.meshes", str(size), *checks]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=timeout, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    assert [line for line in done.stdout.splitlines() if line.endswith(": ok")] == [f"{name}: ok" for name in checks]


@pytest.mark.parametrize("size", MODES)
def test_each_mode_briefly(size: int) -> None:
    run(size, BRIEFLY[size], timeout=60)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("mode", [mode for modes in MODES.values() for mode in modes])
def test_each_mode(mode: str) -> None:
    size = next(size for size, modes in MODES.items() if mode in modes)
    run(size, [f"{check} {mode}" for check in CHECKS], timeout=240)
