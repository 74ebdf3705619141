"""DDP and FSDP2 under a guard, in real torchrun processes (gloo): no hang, one decision, the same weights."""

from pathlib import Path

import pytest
import torch

import steadystep
from steadystep.checkpoints.checkpoint import read_checkpoint
from tests.distributed import dying, saving
from tests.distributed.launch import ROOT, torchrun

SCRIPT = str(Path(__file__).parent / "main.py")
pytestmark = pytest.mark.slow  # some twenty processes one after the other, each with a torch of its own


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """What two ranks have left, and what they said."""
    folder = tmp_path_factory.mktemp("ranks")
    return folder, torchrun(SCRIPT, "two", str(folder), ranks=2, folder=folder, timeout=240)


@pytest.mark.timeout(300)
def test_two_ranks(written: tuple[Path, str]) -> None:
    _, said = written
    assert said.count(": ok\n") == 45
    assert said.count("step 4: the loss is NaN on rank 1") == 2  # rank 0 alone says so, once for each kind


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_four_ranks_go_on_where_two_have_stopped(written: tuple[Path, str]) -> None:
    folder, _ = written
    assert torchrun(SCRIPT, "four", str(folder), ranks=4, folder=folder, timeout=240).count(": ok\n") == 8


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_one_process_goes_on_where_two_ranks_have_stopped(kind: str, written: tuple[Path, str], tmp_path: Path) -> None:
    folder, _ = written
    model = saving.with_dropout()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with pytest.warns(UserWarning, match="by 2 ranks and this run has 1"):
        guard = steadystep.Guard.resume(model, optimizer, run_dir=tmp_path, path=folder / f"{kind}-end")
    assert guard.attempts == 16
    assert saving.fingerprint(model) == (folder / f"{kind}.txt").read_text()
    assert all(slots["exp_avg"].shape == p.shape for p, slots in optimizer.state.items())
    guard.close()


@pytest.mark.timeout(300)
def test_a_rank_that_dies_costs_nothing(written: tuple[Path, str], tmp_path: Path, monkeypatch) -> None:
    """Killed with SIGKILL in the middle; torchrun starts all ranks again, and the end is the same to the last bit."""
    folder, _ = written
    (tmp_path / "plan.yaml").write_text(dying.PLAN)
    monkeypatch.setenv("DIES", "1")
    command = ("-m", "steadystep", "train", "plan.yaml")
    said = torchrun(*command, ranks=2, folder=tmp_path, timeout=240, restarts=1)
    assert "1 intervention" in said
    name = f"checkpoints/step-{dying.STEPS:08d}"
    left, right = (read_checkpoint(run / name).state for run in (folder / "whole", tmp_path / "runs" / "plan"))
    log = (tmp_path / "runs" / "plan" / "run.jsonl").read_text()
    assert log.count('"kind": "start"') == 2
    for name, value in left["parameters"].items():
        assert torch.equal(value, right["parameters"][name]), name
    for number, slots in left["optimizer"]["state"].items():
        for key, value in slots.items():
            assert torch.equal(value, right["optimizer"]["state"][number][key]), (number, key)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_example(tmp_path: Path) -> None:
    said = torchrun(str(ROOT / "examples" / "ddp.py"), ranks=2, folder=tmp_path, timeout=240)
    assert "2 ranks, refused [60]" in said
    assert "same: True" in said


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_step_is_computed_again_by_all_ranks_and_the_wrong_one_is_named(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("FOLDER", str(tmp_path))
    script = str(Path(__file__).parent / "recomputed.py")
    said = torchrun(script, ranks=2, folder=tmp_path, timeout=240)
    assert said.count(": ok\n") == 2


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_bit_that_flips_on_one_rank_is_put_back_by_all(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("FOLDER", str(tmp_path))
    script = str(Path(__file__).parent / "flipped.py")
    said = torchrun(script, ranks=2, folder=tmp_path, timeout=240)
    assert said.count(": ok\n") == 2
