"""What something else than the forward pass has written into a buffer is put back; what is meant is left alone."""

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import steadystep

BAD = {"NaN": math.nan, "inf": math.inf, "1e38": 1e38, "-1e38": -1e38}


class Net(nn.Module):
    """Running statistics, a constant table that every batch is multiplied by, and one that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))
        self.register_buffer("table", torch.linspace(0.5, 1.5, 6))
        self.register_buffer("unused", torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x * self.table).squeeze(-1)


def batch(step: int) -> Tensor:
    return torch.randn(32, 6, generator=torch.Generator().manual_seed(step))


def run(
    model: Net,
    steps: int,
    before: Callable[[int], None],
    *,
    mode: str = "autopilot",
    gives_losses: bool = False,
) -> tuple[steadystep.Guard, list[steadystep.Outcome]]:
    guard = steadystep.Guard(model, torch.optim.AdamW(model.parameters(), lr=1e-3), config={"mode": mode})
    outcomes = []
    for step in range(steps):
        before(step)
        x = batch(step)

        def loss(x: Tensor = x) -> Tensor:
            return (model(x) - x.sum(-1)).square().mean()

        outcomes.append(guard.step(loss() if gives_losses else loss))
    return guard, outcomes


@pytest.mark.parametrize("gives_losses", [False, True], ids=["closure", "loss"])
@pytest.mark.parametrize("mode", ["autopilot", "careful"])
@pytest.mark.parametrize("value", BAD.values(), ids=BAD.keys())
def test_running_statistics_are_put_back(value: float, mode: str, gives_losses: bool) -> None:
    model = Net()

    def damage(step: int) -> None:
        if step == 11:
            model.body[1].running_mean[2] = value
        if step == 50:
            model.body[1].running_var.data[1] = abs(value)

    guard, outcomes = run(model, 60, damage, mode=mode, gives_losses=gives_losses)
    assert [o.step for o in outcomes if not o.stepped] == [11, 50]
    assert any("running_mean" in name for name in outcomes[11].findings[0].where)
    for name, buffer in model.named_buffers():
        assert bool(buffer.isfinite().all()), name
        assert float(buffer.abs().max()) < 100.0, name
    assert guard.diagnose()[0].cause != "healthy"
    model.eval()
    assert bool(model(batch(99)).isfinite().all())


@pytest.mark.parametrize("how", ["in place", "through .data"])
@pytest.mark.parametrize("name", ["table", "unused"])
@pytest.mark.parametrize("mode", ["autopilot", "careful"])
def test_constants_are_put_back(name: str, how: str, mode: str) -> None:
    model = Net()
    table = model.get_buffer(name)
    expected = table.clone()

    def damage(step: int) -> None:
        if step == 50:
            (table if how == "in place" else table.data)[1] = math.nan

    _, outcomes = run(model, 80, damage, mode=mode)
    assert sum(not o.stepped for o in outcomes) == 1
    assert torch.equal(model.get_buffer(name), expected)


def test_what_is_meant_stays() -> None:
    model = Net()

    def edit(step: int) -> None:
        if step == 30:
            model.unused.fill_(-math.inf)  # a mask
        if step == 40:
            model.body[1].running_var.mul_(5.0)
        if step == 45:
            model.table.mul_(2.0)

    _, outcomes = run(model, 60, edit)
    assert all(o.stepped for o in outcomes)
    assert model.unused.tolist() == [-math.inf] * 3


def test_a_program_that_writes_nan_again_and_again_loses_one_batch() -> None:
    model = Net()
    _, outcomes = run(model, 60, lambda step: None if step < 20 else model.unused.fill_(math.nan))
    assert sum(not o.stepped for o in outcomes) == 1


def test_whoever_looks_on_is_told_once() -> None:
    model = Net()

    def damage(step: int) -> None:
        if step == 20:
            model.body[1].running_mean[0] = math.nan

    _, outcomes = run(model, 40, damage, mode="observe")
    assert [o.step for o in outcomes if any(f.detector == "non-finite" for f in o.findings)] == [20]


def test_kept_masks_do_not_keep_checkpoints_from_being_written(tmp_path: Path) -> None:
    model, average = Net(), Net()
    average.register_buffer("mask", torch.full((2,), -math.inf))
    guard = steadystep.Guard(model, torch.optim.AdamW(model.parameters()))
    guard.keep("average", average)
    guard.step(lambda: (model(batch(0)) - 1.0).square().mean())
    guard.save(tmp_path)
    average.body[0].weight.data[0, 0] = math.nan
    with pytest.raises(steadystep.errors.CheckpointError, match=r"kept.average.body.0.weight"):
        guard.save(tmp_path)
