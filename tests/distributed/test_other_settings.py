"""Ranks with other settings or trouble of their own: the attack of benchmarks/attacks, with another seed."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_no_rank_waits_and_all_say_the_same(tmp_path: Path) -> None:
    command = [
        sys.executable,
        str(ROOT / "benchmarks/attacks/ranks.py"),
        "--seed",
        "3",
        "--out",
        str(tmp_path / "rows"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
