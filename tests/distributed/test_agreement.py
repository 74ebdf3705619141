"""DDP and FSDP2 under a guard, in real torchrun processes (gloo): no hang, one decision, the same weights."""

from pathlib import Path

import pytest

from tests.distributed.launch import torchrun

SCRIPT = str(Path(__file__).parent / "agreement.py")


@pytest.mark.timeout(240)
def test_two_ranks(tmp_path: Path) -> None:
    said = torchrun(SCRIPT, "ddp", "fsdp", ranks=2, folder=tmp_path, timeout=200)
    assert said.count(": ok\n") == 15
    assert said.count("step 4: the loss is NaN on rank 1") == 2  # rank 0 alone says so


@pytest.mark.timeout(240)
def test_four_ranks(tmp_path: Path) -> None:
    said = torchrun(SCRIPT, "ddp", "fsdp", "briefly", ranks=4, folder=tmp_path, timeout=200)
    assert said.count(": ok\n") == 4
