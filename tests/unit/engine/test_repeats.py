"""Repeated incidents are logged once and counted; a log that is deleted is begun again."""

import gc
import json
import logging
import math
import shutil
import subprocess
import sys
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
    assert len(said) == 4
    assert said[0].startswith("steadystep: step 0: ")
    assert said[1].startswith("steadystep: … repeated 10 times (steps 1-10), last: the loss is NaN")
    assert said[2].startswith("steadystep: … repeated 18 times (steps 1-18), last: ")
    assert said[3].startswith("steadystep: step 19: ")


def incidents(caplog: pytest.LogCaptureFixture) -> list[str]:
    """How each line about an incident begins."""
    said = [record.getMessage() for record in caplog.records if getattr(record, "incident", False)]
    return [text.removeprefix("steadystep: ").partition(":")[0].partition(", last")[0] for text in said]


def test_a_row_of_like_incidents_is_summed_up_when_it_is_over(caplog: pytest.LogCaptureFixture) -> None:
    model, guard = guarded()
    good, bad = torch.ones(4, 2), torch.full((4, 2), math.nan)
    with caplog.at_level(logging.WARNING, "steadystep"):
        for x in (bad, good, bad, bad, good, bad, bad, bad, *[good] * 51):
            guard.step(lambda x=x: model(x).mean())
        assert incidents(caplog) == ["step 0", "… repeated 5 times (steps 2-7)"]
        guard.step(lambda: model(bad).mean())
    assert incidents(caplog)[2:] == ["step 59"]


def test_a_single_repeat_is_shown_in_full(caplog: pytest.LogCaptureFixture) -> None:
    model, guard = guarded()
    bad = torch.full((4, 2), math.nan)
    with caplog.at_level(logging.WARNING, "steadystep"):
        for _ in range(2):
            guard.step(lambda: model(bad).mean())
        assert incidents(caplog) == ["step 0"]
        guard.close()
    assert incidents(caplog) == ["step 0", "step 1"]


def test_another_kind_of_incident_is_shown_at_once(caplog: pytest.LogCaptureFixture) -> None:
    model, guard = guarded()
    bad, infinite = torch.full((4, 2), math.nan), torch.tensor(math.inf)
    with caplog.at_level(logging.WARNING, "steadystep"):
        for _ in range(3):
            guard.step(lambda: model(bad).mean())
        guard.step(lambda x: model(x).mean() * infinite, batch=torch.full((4, 2), math.inf))
    assert incidents(caplog) == ["step 0", "… repeated 2 times (steps 1-2)", "step 3"]


def test_the_intervals_grow(caplog: pytest.LogCaptureFixture) -> None:
    model, guard = guarded(max_skips=10_000, max_skips_in_a_row=10_000)
    bad = torch.full((4, 2), math.nan)
    with caplog.at_level(logging.WARNING, "steadystep"):
        for _ in range(151):
            guard.step(lambda: model(bad).mean())
    counts = [text.split()[2] for text in incidents(caplog)[1:]]
    assert counts == ["10", "100"]


def test_what_was_counted_is_logged_when_the_guard_is_dropped(caplog: pytest.LogCaptureFixture) -> None:
    model, guard = guarded()
    bad = torch.full((4, 2), math.nan)
    with caplog.at_level(logging.WARNING, "steadystep"):
        for _ in range(4):
            guard.step(lambda: model(bad).mean())
        del guard
        gc.collect()
    assert incidents(caplog) == ["step 0", "… repeated 3 times (steps 1-3)"]


@pytest.mark.slow
def test_what_was_counted_is_logged_when_the_program_ends(tmp_path: Path) -> None:
    program = """
import logging, math, torch, steadystep
logging.basicConfig(format="%(message)s")
model = torch.nn.Linear(2, 1)
guard = steadystep.Guard(model, torch.optim.SGD(model.parameters(), lr=0.01), run_dir="run")
for _ in range(6):
    guard.step(lambda: model(torch.full((4, 2), math.nan)).mean())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path, check=True)
    lines = done.stderr.splitlines()
    assert all(line.startswith("steadystep: ") for line in lines)
    assert any("… repeated 5 times (steps 1-5)" in line for line in lines)
    assert (tmp_path / "run/run.jsonl").read_text().count('"kind": "incident"') == 6


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
        f"steadystep: {folder / 'run.jsonl'} was deleted during the run: a new log starts here"
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
