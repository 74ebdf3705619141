"""After a second cut the learning rate asked for is in use again, whoever asks for it, and the one in use is shown."""

import json
import math
from pathlib import Path

import pytest
import torch

import steadystep
from steadystep import schedule
from steadystep.schedule.learning_rate_cut import Ceiling
from tests.rates import LR, STEPS, Small, check, cut, loss_of

OWNERS = ["the program, once", "the guard's schedule", "a torch scheduler", "the program, at each step"]


@pytest.mark.parametrize("owner", OWNERS)
def test_given_back_under_a_guard(owner: str, tmp_path: Path) -> None:
    model = Small()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    own = schedule.cosine(2000) if owner == OWNERS[1] else None
    theirs = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 2000) if owner == OWNERS[2] else None
    guard = steadystep.Guard(model, optimizer, run_dir=tmp_path, schedule=own)
    if theirs is not None:
        guard.keep("scheduler", theirs)
    used, asked = [], []
    for step in range(STEPS):
        if owner == OWNERS[3]:
            optimizer.param_groups[0]["lr"] = LR * (1.0 - step / 5000)
        cut(guard._parts.learning_rate.ceiling, step, optimizer.param_groups[0]["lr"])
        outcome = guard.step(lambda: loss_of(model))
        assert outcome.signals is not None
        used.append(outcome.lr)
        asked.append(outcome.signals.lr)
        assert optimizer.param_groups[0]["lr"] == pytest.approx(asked[-1])  # what was set is what is seen
        if theirs is not None:
            theirs.step()
    guard.close()
    check(used, asked)
    logged = [json.loads(line) for line in (tmp_path / "run.jsonl").read_text().splitlines()]
    rates = [line["lr"] for line in logged if "lr" in line and "loss" in line]
    assert rates[:100] == pytest.approx(used[:100], rel=1e-4)
    page = steadystep.tracking.read(tmp_path)
    assert page.lr.values[:100].tolist() == pytest.approx(used[:100], rel=1e-4)


def test_given_back_under_watch() -> None:
    model = Small()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    used, asked = [], []
    with steadystep.watch(model, optimizer) as watcher:
        for step in range(STEPS):
            cut(watcher.guard._parts.learning_rate.ceiling, step, LR)
            optimizer.zero_grad()
            loss_of(model).backward()
            optimizer.step()
            assert watcher.outcome is not None
            used.append(watcher.outcome.lr)
            asked.append(optimizer.param_groups[0]["lr"])
    check(used, asked)


def test_cuts_start_from_what_was_asked_and_end_by_the_written_rule() -> None:
    ceiling = Ceiling()
    ceiling.asked = LR
    for _ in range(12):  # trouble that comes back again and again
        ceiling.limit(0.5 * LR)
        for _ in range(7):
            ceiling.updated(LR)
    assert ceiling.lr is not None
    assert ceiling.lr >= 0.01 * LR
    count = 0
    while ceiling.low:
        ceiling.updated(LR)
        count += 1
    assert count <= 2400
    assert math.isclose(ceiling.multiplier(LR), 1.0)
