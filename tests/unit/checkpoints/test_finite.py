"""A state that is not finite is not written, takes no finite one's place, and is passed over at a resume."""

import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import steadystep
from steadystep.checkpoints.checkpoint import read_checkpoint
from steadystep.checkpoints.shared_store import finish, refuse_part, write_part
from steadystep.checkpoints.store import CheckpointStore
from steadystep.errors import CheckpointError
from tests.loops import batches, small_net, squared

DATA = batches(80)
SAVES: dict[str, Any] = {"monitoring": {"save_checkpoints": True, "checkpoint_frequency": 2, "keep_checkpoints": 3}}


def trained(folder: Path, steps: int, *, damage_at: int = -1, **settings: Any) -> nn.Module:
    """Up to `steps`, from where the last run ended; halts are as good as any end."""
    model = small_net(dropout=0.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "steadystep: the state of step")
        guard = steadystep.Guard.resume(model, optimizer, run_dir=folder, config=SAVES | settings)
        try:
            with guard:
                while guard.attempts < steps:
                    if guard.attempts == damage_at:
                        model[0].weight.data[0, 0] = math.nan
                    x = DATA[guard.attempts]
                    guard.step(lambda x=x: squared(model, x))
        except steadystep.TrainingHalted:
            pass
    return model


def saved(folder: Path) -> dict[int, bool]:
    """The steps on disk, and whether each is finite."""
    states = {path: read_checkpoint(path).state for path in sorted((folder / "checkpoints").glob("step-*"))}
    return {
        int(path.name[5:]): all(bool(t.isfinite().all()) for t in state["parameters"].values())
        for path, state in states.items()
    }


@pytest.mark.parametrize(
    "settings", [{}, {"mode": "careful"}, {"training": {"auto_recovery": False}}], ids=["autopilot", "careful", "off"]
)
def test_no_nan_is_written_before_a_halt_and_the_next_start_goes_on(tmp_path: Path, settings: dict[str, Any]) -> None:
    trained(tmp_path, 42, **settings)
    trained(tmp_path, 66, damage_at=45, **settings)
    assert all(saved(tmp_path).values())
    model = trained(tmp_path, 70, **settings)
    assert 70 in saved(tmp_path)
    assert all(bool(p.isfinite().all()) for p in model.parameters())


def test_a_state_that_is_not_finite_is_said_and_refused(tmp_path: Path) -> None:
    model = small_net()
    guard = steadystep.Guard(model, torch.optim.AdamW(model.parameters()))
    guard.step(lambda: squared(model, DATA[0]))
    model[1].running_mean[0] = math.inf
    with pytest.raises(CheckpointError, match=r"non-finite values \(buffers.1.running_mean\): nothing was written"):
        guard.save(tmp_path)


def test_save_says_why_nothing_was_written(tmp_path: Path) -> None:
    model = small_net()
    guard = steadystep.Guard(model, torch.optim.AdamW(model.parameters()), run_dir=tmp_path, config=SAVES)
    guard.step(lambda: squared(model, DATA[0]))
    model[0].weight.data[0, 0] = math.nan
    with pytest.warns(UserWarning, match="the state of step 1 has non-finite values"), pytest.raises(CheckpointError):
        guard.save()
    model[0].weight.data[0, 0] = 0.0
    with pytest.warns(UserWarning, match="are being written to .* again"):
        guard.close()


def test_those_of_an_older_version_are_passed_over_and_take_no_place(tmp_path: Path) -> None:
    trained(tmp_path, 10)
    store = CheckpointStore(tmp_path / "checkpoints", keep_last=9)
    good = read_checkpoint(tmp_path / "checkpoints" / "step-00000010")
    for step in (12, 14, 16):
        state = {**good.state, "parameters": {n: t * math.nan for n, t in good.state["parameters"].items()}}
        state.pop("finite")
        store.put(state, step=step, updates=step)
    with pytest.warns(UserWarning, match=r"step-00000016 contains non-finite values .*using .*00000010 instead"):
        trained(tmp_path, 11)
    model, bad = small_net(), tmp_path / "checkpoints" / "step-00000016"
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(CheckpointError, match="non-finite values"):
        steadystep.Guard.resume(model, optimizer, run_dir=tmp_path / "other", path=bad)
    store = CheckpointStore(tmp_path / "checkpoints", keep_last=2)
    with pytest.warns(UserWarning, match="non-finite"):
        found = store.newest()
    assert found is not None
    store.put(found.state, step=17, updates=17)
    assert store.steps() == [found.step, 17]


class Infinite(nn.Module):
    """Infinity on purpose: a mask, a mask that is made later, an expanded one, a frozen table."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.table = nn.Parameter(torch.tensor([0.0, -math.inf]), requires_grad=False)
        self.register_buffer("mask", torch.full((6, 6), -math.inf).triu(1))
        self.register_buffer("wide", torch.full((1, 1), -math.inf).expand(3, 3))
        self.register_buffer("later", None)

    def forward(self, x: Tensor) -> Tensor:
        if self.later is None:
            self.later = torch.tensor([1.0, math.inf])
            self.register_buffer("new", torch.tensor([math.nan]))
        return torch.softmax(self.linear(x) @ self.linear.weight + self.mask[0], -1) * self.table.exp().sum()


def test_infinity_on_purpose_is_written_and_read(tmp_path: Path) -> None:
    def start() -> tuple[Infinite, steadystep.Guard]:
        torch.manual_seed(0)
        model = Infinite()
        guard = steadystep.Guard.resume(model, torch.optim.AdamW(model.parameters()), run_dir=tmp_path, config=SAVES)
        return model, guard

    for until in (6, 12):
        model, guard = start()
        with guard:
            while guard.attempts < until:
                x = DATA[guard.attempts]
                guard.step(lambda x=x, model=model: model(x).square().mean())
    assert guard.attempts == 12
    assert max(saved(tmp_path)) == 12
    assert model.wide.tolist() == [[-math.inf] * 3] * 3


def test_a_rank_that_refuses_its_part_is_not_waited_for(tmp_path: Path) -> None:
    staging = tmp_path / ".step.parts"
    write_part(staging, steadystep.checkpoints.packing.pack({"x": torch.zeros(1)}), rank=0)
    refuse_part(staging, rank=1)
    with pytest.raises(CheckpointError, match="rank 1 has non-finite values"):
        finish(staging, tmp_path / "step-00000002", size=2, step=2, updates=2, score=None)
