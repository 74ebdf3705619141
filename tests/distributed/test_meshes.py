"""A guard on every kind of mesh, in real processes (gloo) that are forked: healthy, faulty, rolled back, replayed."""

import subprocess
import sys
from types import ModuleType

import pytest

from tests.distributed import experts, meshes, pipelines, stress
from tests.distributed.launch import ROOT

BRIEFLY = {
    (meshes, 2): ["norms tp", "norms sp", "replay ddp", "replay fsdp", "unlearnable fsdp", "clipping_loop fsdp"],
    (meshes, 4): ["norms hsdp", "norms fsdp tp"],
    (pipelines, 2): ["norms gpipe", "nan 1f1b", "replay interleaved"],
    (pipelines, 4): ["norms fsdp"],
    (experts, 2): ["norms experts", "norms own", "norms context"],
    (stress, 2): ["hopeless backward", "loaders 2"],
}
PROGRAMS = (meshes, pipelines, experts)
EVERY = [(program, size, mode) for program in PROGRAMS for size, modes in program.MODES.items() for mode in modes]


def named(value: object) -> str:
    return str(getattr(value, "__name__", value)).rpartition(".")[2]


def run(program: ModuleType, size: int, checks: list[str], *, timeout: float) -> None:
    command = [sys.executable, "-W", "ignore", "-m", program.__name__, str(size), *checks]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=timeout, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    assert [line for line in done.stdout.splitlines() if line.endswith(": ok")] == [f"{name}: ok" for name in checks]


@pytest.mark.parametrize(("program", "size"), BRIEFLY, ids=named)
def test_each_mode_briefly(program: ModuleType, size: int) -> None:
    run(program, size, BRIEFLY[program, size], timeout=240)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("program", "size", "mode"), EVERY, ids=named)
def test_each_mode(program: ModuleType, size: int, mode: str) -> None:
    run(program, size, [f"{check} {mode}" for check in program.CHECKS], timeout=240)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("check", stress.EVERY)
def test_ranks_under_stress(check: str, size: int) -> None:
    run(stress, size, [check], timeout=240)
