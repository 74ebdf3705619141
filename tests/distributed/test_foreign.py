"""FSDP1, DDP's join and pipelines in real processes: one clear error on every rank, no abort and no hang."""

from pathlib import Path

import pytest

from tests.distributed.foreign import ALL
from tests.distributed.launch import torchrun


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_engines_that_cannot_be_guarded_are_refused_on_every_rank(tmp_path: Path) -> None:
    script = str(Path(__file__).parent / "foreign.py")
    said = torchrun(script, ranks=2, folder=tmp_path, timeout=240)
    assert said.count(": ok\n") == len(ALL)
