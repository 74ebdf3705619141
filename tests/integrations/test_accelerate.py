"""Real Accelerate runs: accumulation, clipping, a prepared scheduler, its checkpoints."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import steadystep

pytest.importorskip("accelerate")
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.state import AcceleratorState, GradientState

from steadystep.integrations import accelerate as accelerate_guard
from tests.integrations.task import data, held_out, loss_of
from tests.loops import assert_same, full_state, is_finite, small_net

BAD = 30


@pytest.fixture(autouse=True)
def _fresh() -> Any:
    yield
    AcceleratorState._reset_state(True)
    GradientState._reset_state()


def run(
    *, guarded: bool, bad: int | None = None, accumulate: int = 1, epochs: int = 1, precision: str = "no"
) -> tuple[torch.nn.Module, dict[str, Tensor], list[steadystep.Outcome], Any]:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulate, mixed_precision=precision)
    net = small_net(dropout=0.0)
    opt = torch.optim.AdamW(net.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(opt, lambda step: 1.0 - step / 400)
    loader = torch.utils.data.DataLoader(data(bad), batch_size=None)
    model, prepared, loader, scheduler = accelerator.prepare(net, opt, loader, scheduler)
    watcher = accelerate_guard.watch(accelerator, model, prepared) if guarded else None
    outcomes: list[steadystep.Outcome] = []
    for _ in range(epochs):
        for x in loader:
            with accelerator.accumulate(model):
                loss = loss_of(model, x)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                prepared.step()
                scheduler.step()
                prepared.zero_grad()
            if watcher is not None and accelerator.sync_gradients:
                assert watcher.outcome is not None
                outcomes.append(watcher.outcome)
                assert accelerator.optimizer_step_was_skipped == (not watcher.outcome.stepped)
    if watcher is not None:
        watcher.remove()
    return net, full_state(net, opt), outcomes, scheduler.scheduler


@pytest.mark.parametrize("way", [{}, {"accumulate": 3}, {"precision": "bf16"}])
def test_with_no_incident_it_is_bit_identical(way: dict[str, Any]) -> None:
    _, plain, _, _ = run(guarded=False, **way)
    _, guarded, outcomes, _ = run(guarded=True, **way)
    assert_same(plain, guarded)
    assert len(outcomes) == 60 // way.get("accumulate", 1)
    assert not any(o.plan.actions for o in outcomes)


def test_a_nan_sample_ends_near_the_clean_run() -> None:
    clean, _, _, _ = run(guarded=False, epochs=4)
    _, ruined, _, _ = run(guarded=False, bad=BAD)
    model, state, outcomes, scheduler = run(guarded=True, bad=BAD, epochs=4)
    assert not is_finite(ruined)
    assert is_finite(state)
    assert [o.step for o in outcomes if not o.stepped] == [BAD + 60 * epoch for epoch in range(4)]
    assert scheduler.last_epoch == 59 * 4
    assert held_out(model) == pytest.approx(held_out(clean), rel=0.02)


def test_the_guards_state_is_in_accelerates_checkpoint(tmp_path: Path) -> None:
    states = []
    for turn in range(2):
        accelerator = Accelerator(cpu=True)
        net = small_net()
        model, opt = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=1e-2))
        watcher = accelerate_guard.watch(accelerator, model, opt)
        if turn:
            accelerator.load_state(str(tmp_path / "saved"))
        for x in data(None, 5) if not turn else []:
            accelerator.backward(loss_of(model, x))
            opt.step()
            opt.zero_grad()
        if not turn:
            accelerator.save_state(str(tmp_path / "saved"))
        states.append(watcher.guard.state_dict())
        watcher.remove()
    assert states[0]["attempts"] == 5
    assert states[0] == states[1]


def test_an_overflow_counts_as_skipped_under_accelerates_scaler() -> None:
    Accelerator(cpu=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    net = small_net()
    raw = torch.optim.SGD(net.parameters(), lr=1e-2)
    opt = AcceleratedOptimizer(raw, scaler=scaler)
    watcher = steadystep.watching.Watcher(
        net, opt, scaler=scaler, tell=lambda outcome: accelerate_guard.mark_skipped(opt, outcome)
    )
    skipped = []
    for i, x in enumerate(data(None, 6)):
        loss = loss_of(net, x) * (1e37 if i == 3 else 1.0)
        scaler.scale(loss).backward()
        opt.step()
        opt.zero_grad()
        skipped.append(opt.step_was_skipped)
    watcher.remove()
    assert skipped == [False, False, False, True, False, False]
    assert scaler.get_scale() == 2.0**7
    assert is_finite(full_state(net, raw))


@pytest.mark.parametrize("scaled", [False, True])
def test_after_a_rollback_the_scheduler_moves_on_with_the_loop(scaled: bool) -> None:
    """It is where it was right after that update, and the loop's own call completes it."""
    Accelerator(cpu=True)
    net = small_net()
    scaler = torch.amp.GradScaler("cpu") if scaled else None
    opt = AcceleratedOptimizer(torch.optim.SGD(net.parameters(), lr=1e-2), scaler=scaler)
    opt._accelerate_step_called = True
    plan = steadystep.Plan(actions=("rollback",), to=4)
    taken = steadystep.Outcome(step=1, reading=1.0, stepped=True)
    refused = steadystep.Outcome(step=2, reading=1.0, stepped=False)
    back = steadystep.Outcome(step=3, reading=1.0, stepped=False, plan=plan, restored=5)
    skipped, called = [], []
    for outcome in (taken, refused, back):
        accelerate_guard.mark_skipped(opt, outcome)
        skipped.append(opt.step_was_skipped)
        called.append(opt._accelerate_step_called)
    assert skipped == [False, True, False]
    assert called == ([True, False, True] if scaled else [True] * 3)
