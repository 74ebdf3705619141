"""Refusing, rolling back, replaying, resuming and explaining, on a device."""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import steadystep
from steadystep.checkpoints import store
from steadystep.incidents import replay
from steadystep.snapshots import Snapshots
from steadystep.snapshots.tensor_state import TensorState
from tests.device import notgpu
from tests.device.loops import Batch, closure_of, data, net, plain_step, scaler_for, seed
from tests.loops import assert_same, full_state, is_finite

notgpu.register()
D = notgpu.DEVICE
BATCHES = data(48)
REPLAYING = {"trust_steps": 4, "lr_mult": 1.0, "rewarm_steps": 0}


def flip(model: nn.Module) -> None:
    with torch.no_grad():
        next(model.parameters()).mul_(1e30)


def train(
    config: dict[str, Any], *, broken_at: int = -1, until: int = 36, run_dir: Path | None = None
) -> tuple[dict[str, Tensor], list[steadystep.Outcome], steadystep.Guard]:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    seed(1)
    guard = (
        steadystep.Guard(model, optimizer, config=config)
        if run_dir is None
        else steadystep.Guard.resume(model, optimizer, config=config, run_dir=run_dir)
    )
    closure, outcomes = closure_of(model), []
    while guard.attempts < until:
        if guard.attempts == broken_at:
            flip(model)
        outcomes.append(guard.step(closure, batch=BATCHES[guard.attempts]))
    return full_state(model, optimizer), outcomes, guard


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_damaged_weights_are_rolled_back_and_the_batches_replayed(precision: str) -> None:
    config = {"training": {"mixed_precision": precision}, "recovery": REPLAYING}
    expected, *_ = train(config)
    got, outcomes, guard = train(config, broken_at=30)
    assert [o.step for o in outcomes if "rollback" in o.plan.actions] == [30]
    assert guard.updates == 36
    assert_same(expected, got)


def test_snapshots_are_in_host_memory_and_whole() -> None:
    _, _, guard = train({"recovery": REPLAYING}, until=22)
    state = guard._recovery.states[-1]
    assert {tensor.device.type for tensor in state.tensors.values()} == {"cpu"}
    assert all(bool(tensor.isfinite().all()) for tensor in state.tensors.values())


def test_states_on_disk_come_back_exactly(tmp_path: Path) -> None:
    expected, *_ = train({"recovery": REPLAYING})
    tight = REPLAYING | {"snapshot_memory_gb": 1e-9}
    with pytest.warns(UserWarning, match="2 instead of 4"):
        got, outcomes, guard = train({"recovery": tight}, broken_at=30, run_dir=tmp_path)
    assert outcomes[30].restored is not None
    assert all(state.file is not None for state in guard._recovery.states)
    assert_same(expected, got)


def test_counts_of_steps_stay_on_the_host_after_a_rollback() -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    tensor_state = TensorState(model, optimizer, SimpleNamespace(parameters=list(model.parameters())))
    kept = Snapshots(tensor_state, count=1, device=torch.device(D))
    closure_of(model)(BATCHES[0]).backward()
    optimizer.step()
    kept.take(step=0, updates=1, lr=0.1, parts={})
    optimizer.state.clear()
    kept.roll_back(0, replay=True)
    places = {name: {s[name].device.type for s in optimizer.state.values()} for name in ("step", "exp_avg")}
    assert places == {"step": {"cpu"}, "exp_avg": {notgpu.NAME}}


def test_a_bad_batch_leaves_no_trace_and_its_module_is_named(tmp_path: Path) -> None:
    class Odd(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x / (x.abs().sum() < 1e6)

    def make() -> tuple[nn.Module, Any]:
        seed()
        model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.1), Odd(), nn.Linear(8, 1)).to(D)
        return model, lambda x: model(x).square().mean()

    model, closure = make()
    with torch.no_grad():
        model[1].weight.mul_(1e9)
    model[1].eval()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    guard = steadystep.Guard(model, optimizer, run_dir=tmp_path)
    before = full_state(model, optimizer)
    outcome = guard.step(closure, batch=torch.full((6, 4), 1e9, device=D))
    assert not outcome.stepped
    assert outcome.origin.startswith("3 (Odd), forward")
    assert_same(before, full_state(model, optimizer))
    for place in (None, "cpu", D):
        again = replay(Path(outcome.incident), make, device=place)
        assert again.reproduces, place
        assert again.now.origin.module == "3"


def test_an_overflow_under_fp16_reaches_the_scaler_and_nothing_else() -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    guard = steadystep.Guard(model, optimizer, config={"training": {"mixed_precision": "fp16"}})
    closure = closure_of(model)
    guard.step(closure, batch=BATCHES[0])
    outcome = guard.step(lambda batch: closure(batch) * 1e4, batch=BATCHES[1])
    assert not outcome.stepped
    assert guard.step(closure, batch=BATCHES[2]).signals.scale == 32768.0
    assert is_finite(full_state(model, optimizer))


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_watched_loop_refuses_a_nan(precision: str) -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scaler = scaler_for(precision)
    watcher = steadystep.watch(model, optimizer, scaler=scaler if precision == "fp16" else None)
    step = plain_step(model, optimizer, scaler, precision)
    for i, batch in enumerate(BATCHES[:6]):
        before = full_state(model, optimizer)
        if i == 4:
            (nn.functional.cross_entropy(model(batch[0]), batch[1]) * math.nan).backward()
            scaler.step(optimizer) if precision == "fp32" else optimizer.step()
            optimizer.zero_grad()
            assert not watcher.outcome.stepped
            assert_same(before, full_state(model, optimizer))
        else:
            step(batch)
            assert watcher.outcome.stepped
    watcher.remove()


def test_a_watched_loop_is_rolled_back() -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    watcher = steadystep.watch(model, optimizer, config={"recovery": {"trust_steps": 4}})
    step, restored = plain_step(model, optimizer, scaler_for("fp32")), []
    for i, batch in enumerate(BATCHES[:32]):
        if i == 30:
            flip(model)
        step(batch)
        restored.append(watcher.outcome.restored is not None)
    assert restored.index(True) == 30
    assert is_finite(full_state(model, optimizer))


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_run_that_was_stopped_ends_with_the_same_bits(precision: str, tmp_path: Path) -> None:
    config = {"training": {"mixed_precision": precision}, "monitoring": {"checkpoint_frequency": 4}}
    expected, *_ = train({"training": config["training"]}, until=12)
    train(config, until=9, run_dir=tmp_path)
    store._finish()
    got, outcomes, _ = train(config, until=12, run_dir=tmp_path)
    assert len(outcomes) == 4
    assert_same(expected, got)


def test_bad_micro_batches_are_left_out() -> None:
    model = net(dropout=0.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    guard = steadystep.Guard(model, optimizer, config={"training": {"gradient_accumulation_steps": 3}})
    closure = closure_of(model)

    def shaky(batch: Batch) -> Tensor:
        return closure(batch) * (math.nan if batch is BATCHES[1] else 1.0)

    for batch in BATCHES[:3]:
        outcome = guard.step(shaky, batch=batch)
    assert outcome.stepped
    assert outcome.left_out == (1,)
    assert is_finite(full_state(model, optimizer))
