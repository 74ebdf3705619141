"""The same message again and again is one message and a count; a log that is deleted is begun again."""

import json
import logging
import math
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

import steadystep
from steadystep.runs.run_log import read


def guarded(run_dir: Path | None = None, **recovery: object) -> tuple[nn.Module, steadystep.Guard]:
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    return model, steadystep.Guard(model, optimizer, run_dir=run_dir, config={"recovery": recovery, "mode": "careful"})


def test_twenty_refusals_before_a_halt_are_one_with_a_count(caplog: pytest.LogCaptureFixture) -> None:
    model, guard = guarded(max_skips_in_a_row=20)
    x = torch.full((4, 2), math.nan)
    with caplog.at_level(logging.WARNING, "steadystep"):
        for _ in range(19):
            guard.step(lambda: model(x).mean())
        with pytest.raises(steadystep.TrainingHalted):
            guard.step(lambda: model(x).mean())
    said = [record.getMessage() for record in caplog.records if getattr(record, "incident", False)]
    assert len(said) == 2
    assert said[0].startswith("step 0: ")
    assert said[1].startswith("steps 1 to 19: the same 19 times more: ")


def test_each_new_thing_is_said_at_once(caplog: pytest.LogCaptureFixture) -> None:
    model, guard = guarded()
    good, bad = torch.ones(4, 2), torch.full((4, 2), math.nan)
    with caplog.at_level(logging.WARNING, "steadystep"):
        for x in (bad, good, bad, bad, good, bad, bad, bad, good):
            guard.step(lambda x=x: model(x).mean())
    said = [record.getMessage().partition(":")[0] for record in caplog.records if getattr(record, "incident", False)]
    assert said == ["step 0", "step 2", "step 3", "step 5", "steps 6 to 7"]


@pytest.mark.parametrize("whole_folder", [False, True])
def test_a_deleted_log_is_said_once_and_begun_again(
    whole_folder: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "run"
    model, guard = guarded(folder)
    x = torch.ones(4, 2)
    with caplog.at_level(logging.WARNING, "steadystep"):
        for step in range(450):
            if step == 50:
                shutil.rmtree(folder) if whole_folder else (folder / "run.jsonl").unlink()
            guard.step(lambda: model(x).square().mean())
        guard.close()
    assert [record.getMessage() for record in caplog.records if "deleted" in record.getMessage()] == [
        f"{folder / 'run.jsonl'} was deleted while the run goes on: it is begun again from here"
    ]
    assert read(folder).name == "run"
    lines = [json.loads(line) for line in (folder / "run.jsonl").read_text().splitlines()]
    assert lines[0]["kind"] == "start"
    assert lines[-1]["how"] == "finished"
    assert [line["step"] for line in lines if "loss" in line][-1] == 449


@pytest.mark.filterwarnings("ignore:steadystep.*checkpoint")  # one that was on its way could not be written
def test_checkpoints_and_bundles_are_written_to_a_folder_that_was_deleted(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    settings = {"monitoring": {"save_checkpoints": True, "checkpoint_frequency": 5}}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    folder = tmp_path / "run"
    with steadystep.Guard(model, optimizer, run_dir=folder, config=settings) as guard:
        for step in range(40):
            if step == 12:
                shutil.rmtree(folder, ignore_errors=True)  # a checkpoint may be on its way
            x = torch.full((4, 2), math.nan if step == 20 else 1.0)
            guard.step(lambda batch: model(batch).square().mean(), batch=x)
    assert [path for path in (folder / "checkpoints").iterdir() if path.is_dir()]
    assert list((folder / "incidents").glob("incident-*"))
