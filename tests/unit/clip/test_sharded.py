"""Gradients spread over ranks (DTensor): clipped by the norm over all ranks, in one process and in two."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.multiprocessing

from tests.reference import clip_ranks


def test_one_process(tmp_path: Path) -> None:
    clip_ranks.run(0, 1, str(tmp_path / "store"))


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_two_processes(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(clip_ranks.run, args=(2, str(tmp_path / "store")), nprocs=2)


def test_who_shards_nothing_imports_nothing_for_it() -> None:
    code = (
        "import sys, torch; from steadystep import clip; p = torch.nn.Parameter(torch.ones(2)); p.grad = torch.ones(2);"
        "[f([p]) for f in (clip.agc_, clip.ZScoreClip().clip_, clip.TensorEMAClip().clip_)];"
        "clip.clip_value_([p], max_value=1.0); print('torch.distributed.tensor' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
