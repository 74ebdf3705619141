"""From alarm to cause: what a guarded run writes down about a refused step, and that it can be run again."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import steadystep
from steadystep.incidents import read_bundle, replay


class Shaky(nn.Module):
    """Divides by how many numbers are above zero: none, for an empty document."""

    def forward(self, x: Tensor) -> Tensor:
        return x / (x > -10).sum(-1, keepdim=True)


def make() -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.1), nn.Identity(), Shaky(), nn.Linear(8, 1))
    return model, lambda batch: model(batch).square().mean()


BAD = torch.full((6, 4), -1e9)


def guarded(run_dir: Path | None, **config: Any) -> tuple[nn.Module, Any, steadystep.Guard]:
    model, closure = make()
    with torch.no_grad():
        model[0].weight.copy_(torch.eye(8, 4) + torch.eye(8, 4).roll(4, 0))
        model[0].bias.zero_()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return model, closure, steadystep.Guard(model, optimizer, run_dir=run_dir, config=config)


def good(number: int = 0) -> Tensor:
    return torch.randn(6, 4, generator=torch.Generator().manual_seed(number))


def test_the_first_bad_module_is_named_and_the_step_can_be_run_again(tmp_path: Path) -> None:
    model, closure, guard = guarded(tmp_path)
    for i in range(5):
        guard.step(closure, batch=good(i))
    rng = torch.get_rng_state()
    outcome = guard.step(closure, batch=BAD)
    assert not outcome.stepped
    assert outcome.origin.startswith("3 (Shaky), forward")
    assert outcome.incident == str(tmp_path / "incidents" / "incident-000005-skip")
    # looking closely is not seen by what follows
    after = torch.get_rng_state()
    torch.set_rng_state(rng)
    model(BAD)
    assert torch.equal(after, torch.get_rng_state())
    bundle = read_bundle(Path(outcome.incident))
    assert bundle.record["origin"]["module"] == "3"
    again = replay(Path(outcome.incident), make)
    assert again.reproduces
    assert again.now.origin.module == "3"
    lines = (Path(outcome.incident) / "history.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(6))


def test_without_a_folder_the_module_is_named_all_the_same() -> None:
    _, closure, guard = guarded(None)
    outcome = guard.step(closure, batch=BAD)
    assert outcome.origin.startswith("3 (Shaky), forward")
    assert outcome.incident == ""


def test_healthy_steps_write_nothing_and_name_nothing(tmp_path: Path) -> None:
    _, closure, guard = guarded(tmp_path)
    for i in range(5):
        outcome = guard.step(closure, batch=good(i))
        assert (outcome.origin, outcome.incident) == ("", "")
    assert not (tmp_path / "incidents").exists() or not list((tmp_path / "incidents").iterdir())


def test_a_fault_that_does_not_repeat_is_said_to_be_one() -> None:
    model, _, guard = guarded(None)
    calls = []

    def flaky(batch: Tensor) -> Tensor:
        calls.append(1)
        return model(batch).square().mean() * (float("nan") if len(calls) == 1 else 1.0)

    outcome = guard.step(flaky, batch=good())
    assert not outcome.stepped
    assert "hardware" in outcome.origin


def test_the_bad_micro_batch_of_a_group_is_the_one_that_is_kept(tmp_path: Path) -> None:
    _, closure, guard = guarded(tmp_path, training={"gradient_accumulation_steps": 3})
    for batch in (good(1), BAD, good(2)):
        outcome = guard.step(closure, batch=batch)
    assert outcome.left_out == (1,)
    assert outcome.origin.startswith("3 (Shaky)")
    assert torch.equal(read_bundle(Path(outcome.incident)).batch, BAD)


def test_a_loss_given_as_a_tensor_cannot_be_run_again_and_that_is_said(tmp_path: Path) -> None:
    _, closure, guard = guarded(tmp_path)
    outcome = guard.step(closure(BAD))
    assert "cannot be re-run" in outcome.origin
    assert Path(outcome.incident).is_dir()


def test_the_halt_says_where_it_began_and_where_that_is_written(tmp_path: Path) -> None:
    _, closure, guard = guarded(tmp_path, recovery={"max_skips_in_a_row": 3, "snapshots": 0})

    def run() -> None:
        for _ in range(9):
            guard.step(closure, batch=BAD)

    with pytest.raises(steadystep.TrainingHalted) as caught:
        run()
    assert "3 (Shaky)" in str(caught.value)
    assert "incident-" in str(caught.value)
    assert list((tmp_path / "incidents").glob("*-halt"))


def test_incident_bundles_false_writes_none(tmp_path: Path) -> None:
    _, closure, guard = guarded(tmp_path, recovery={"incident_bundles": False})
    outcome = guard.step(closure, batch=BAD)
    assert outcome.origin
    assert not (tmp_path / "incidents").exists()


def test_incident_batch_mb_bounds_what_is_kept_of_the_data(tmp_path: Path) -> None:
    for megabytes, kept in ((0.0, False), (1.0, True)):
        _, closure, guard = guarded(tmp_path / str(kept), recovery={"incident_batch_mb": megabytes})
        outcome = guard.step(closure, batch=BAD)
        assert (read_bundle(Path(outcome.incident)).batch is not None) == kept


def test_a_row_of_bad_batches_does_not_fill_the_disk(tmp_path: Path) -> None:
    _, closure, guard = guarded(tmp_path, recovery={"max_skips": 1000, "snapshots": 0})
    for i in range(60):
        guard.step(closure, batch=BAD if i % 2 else good(i))
    assert len(list((tmp_path / "incidents").glob("incident-*"))) == 10


def test_a_folder_that_cannot_be_written_is_said_once_and_training_goes_on(tmp_path: Path) -> None:
    _, closure, guard = guarded(tmp_path)
    (tmp_path / "incidents").write_text("in the way")
    with pytest.warns(UserWarning, match="incident could not be written"):
        guard.step(closure, batch=BAD)
    assert not guard.step(closure, batch=BAD).stepped  # a second warning would be an error here
    assert guard.step(closure, batch=good()).stepped
