"""Checkpoints between torch's own format and ours, and from four ranks to two and one: exact."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.distributed.launch import ROOT


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_dcp_holds_the_guard_and_fewer_ranks_read_it(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "ignore", "-m", "tests.distributed.exchange", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    assert (tmp_path / "run-1").is_dir()
