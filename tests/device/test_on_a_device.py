"""Runs the checks beside this file in a process of their own: a device, once registered, is there for all of it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


def run(*arguments: str) -> str:
    paths = os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", "")))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-p", "no:cacheprovider", "--tb=short", *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    return done.stdout


@pytest.mark.slow
def test_checks() -> None:
    run(*sorted(str(path) for path in HERE.glob("check_*.py")))


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("promise", ["test_2_no_poison", "test_4_trusted_snapshots", "test_9_the_schedule_stays"])
def test_promises(promise: str) -> None:
    run("-p", "tests.device.plugin", str(ROOT / "tests" / "promises" / f"{promise}.py"))
