"""After a second cut the learning rate asked for is in use again, whoever asks for it, and the one in use is shown."""

import json
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import steadystep
from steadystep import schedule
from steadystep.actions.ceiling import Ceiling

LR = 1e-2
FIRST, SECOND, STEPS = 20, 60, 700
X = torch.randn(16, 4, generator=torch.Generator().manual_seed(0))


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).squeeze(-1)


def cut(ceiling: Ceiling, step: int, asked: float) -> None:
    """What a rollback for damage by updates does to the rate, at two steps."""
    if step in (FIRST, SECOND):
        ceiling.limit((0.7 if step == FIRST else 0.35) * asked)
        ceiling.rewarm(50)


def check(used: list[float], asked: list[float]) -> None:
    """Low after both cuts, never above what is asked, and given back by the rule."""
    assert used[FIRST] < 0.2 * asked[FIRST]
    assert used[SECOND] < 0.2 * asked[SECOND]
    assert all(u <= a * (1 + 1e-6) for u, a in zip(used, asked, strict=True))
    assert used[-100:] == pytest.approx(asked[-100:], rel=1e-6)


def loss_of(model: nn.Module) -> Tensor:
    return (model(X) - X.sum(-1)).square().mean() + 0.1


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
        cut(guard._lr.ceiling, step, optimizer.param_groups[0]["lr"])
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
    page = steadystep.track.read(tmp_path)
    assert page.lr.values[:100].tolist() == pytest.approx(used[:100], rel=1e-4)


def test_given_back_under_watch() -> None:
    model = Small()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    used, asked = [], []
    with steadystep.watch(model, optimizer) as watcher:
        for step in range(STEPS):
            cut(watcher.guard._lr.ceiling, step, LR)
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
