"""A weight that is NaN or infinite ends in a rollback, a checkpoint put back, or a halt, whatever the loss says."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import steadystep

# Checkpoints are due between the damage and the look that finds it, and are refused.
pytestmark = pytest.mark.filterwarnings("ignore:steadystep. (the state of step|checkpoints are being written to)")

SAVES: dict[str, Any] = {"monitoring": {"save_checkpoints": True, "checkpoint_frequency": 5}}


class Gated(nn.Module):
    """The gate turns an infinite bias into a one: loss and gradients stay finite."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.g, self.out = nn.Linear(6, 8), nn.Linear(6, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.a(x)) * torch.sigmoid(self.g(x))).squeeze(-1)


def batch(step: int) -> Tensor:
    return torch.randn(16, 6, generator=torch.Generator().manual_seed(step))


class Run:
    """A guarded loop whose gate is damaged before certain steps."""

    def __init__(self, folder: Path | None, config: dict[str, Any], *, resume: bool = False, **more: Any) -> None:
        self.model = Gated()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        start = steadystep.Guard.resume if resume else steadystep.Guard
        self.guard = start(self.model, self.optimizer, run_dir=folder, config=config, **more)
        self.outcomes: list[steadystep.Outcome] = []

    def go(self, until: int, *, damage: tuple[int, ...] = ()) -> None:
        while self.guard.attempts < until:
            step = self.guard.attempts
            if step in damage:
                self.model.g.bias.data[3] = math.inf
            x = batch(step)
            self.outcomes.append(self.guard.step(lambda x=x: (self.model(x) - x.sum(-1)).square().mean()))

    @property
    def is_finite(self) -> bool:
        return all(bool(p.isfinite().all()) for p in self.model.parameters())


@pytest.mark.parametrize("at", [3, 8, 48, 68])
def test_without_batches_a_masked_weight_costs_no_more_than_47_updates(at: int) -> None:
    """Found at the next look, 20 steps later at most; the state it goes back to is 20 to 40 steps older than that."""
    run = Run(None, {})
    run.go(at + 20, damage=(at,))
    (acted,) = [o for o in run.outcomes if o.plan.actions]
    assert acted.restored is not None
    assert acted.step - at < 20
    assert acted.step - acted.restored <= 47
    assert run.is_finite


@pytest.mark.parametrize("value", [1e38, -1e100])
def test_a_huge_weight_is_broken_where_its_norm_is_finite(value: float) -> None:
    """In fp64, behind a gate, before enough looks were made to know what updates change."""
    run = Run(None, {})
    run.model.double()
    for step in range(60):
        if step == 12:
            run.model.g.bias.data[3] = value
        x = batch(step).double()
        run.outcomes.append(run.guard.step(lambda x: (run.model(x) - x.sum(-1)).square().mean(), batch=x))
    (acted,) = [o for o in run.outcomes if o.plan.actions]
    assert (acted.step, acted.plan.actions) == (27, ("rollback", "replay"))
    assert "implausibly large for a weight" in acted.findings[0].what
    assert all(float(p.detach().abs().max()) < 10.0 for p in run.model.parameters())


@pytest.mark.parametrize("kind", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("value", [1e25, -3.3e38, -math.inf])
def test_weights_that_are_huge_from_the_start_are_meant(value: float, kind: torch.dtype) -> None:
    model = nn.Linear(3, 1)
    model.mask = nn.Parameter(torch.full((3,), value, dtype=kind))
    guard = steadystep.Guard(model, torch.optim.SGD(model.parameters(), lr=0.01))
    outcomes = [guard.step(lambda: model(torch.ones(2, 3)).square().mean()) for _ in range(30)]
    assert all(o.stepped and not o.findings for o in outcomes)


def test_at_a_resume_the_state_just_loaded_is_restored(tmp_path: Path) -> None:
    first = Run(tmp_path, SAVES)
    first.go(42)
    first.guard.close()
    second = Run(tmp_path, SAVES, resume=True)
    second.go(60, damage=(44,))
    second.guard.close()
    back = [o for o in second.outcomes if o.restored is not None]
    assert [(o.step, o.plan.to) for o in back] == [(47, 41)]
    assert second.is_finite
    assert math.isfinite(second.outcomes[-1].loss)


def test_right_after_a_rollback_the_same_state_serves_again() -> None:
    run = Run(None, {})
    run.go(147, damage=(141,))
    at = run.guard.attempts
    run.go(at + 22, damage=(at + 1,))
    assert [o.restored is not None for o in run.outcomes].count(True) == 2
    run.go(200)
    assert run.is_finite
    assert all(o.stepped for o in run.outcomes[-20:])


def test_with_nothing_in_memory_the_newest_finite_checkpoint_is_restored(tmp_path: Path) -> None:
    run = Run(tmp_path, SAVES | {"recovery": {"snapshot_memory_gb": 1e-9, "snapshot_disk_gb": 0.0}})
    with pytest.warns(UserWarning, match="none is kept"):
        run.go(84)
    run.optimizer.param_groups[0]["lr"] = 5e-3  # the user's: it stays
    run.guard.save()
    run.go(90, damage=(86,))
    (back,) = [o for o in run.outcomes if o.restored is not None]
    assert (back.step, back.plan.to, back.restored) == (87, 84, 84)
    assert run.guard.updates == 84 + 2
    assert run.optimizer.param_groups[0]["lr"] == 5e-3
    assert run.is_finite
    run.guard.close()


@pytest.mark.parametrize(
    "settings", [{"mode": "careful"}, {"training": {"auto_recovery": False}}], ids=["careful", "off"]
)
@pytest.mark.parametrize("saves", [False, True])
def test_whoever_does_not_roll_back_halts_at_once(tmp_path: Path, settings: dict[str, Any], saves: bool) -> None:
    run = Run(tmp_path if saves else None, (SAVES if saves else {}) | settings)
    run.go(20)
    if saves:
        run.guard.save()
    with pytest.raises(steadystep.TrainingHalted) as halted:
        run.go(60, damage=(25,))
    assert halted.value.step == 27
    assert run.is_finite == saves
    said = "the weights of step 2[05] are in place" if saves else "no better weights are in memory or in a checkpoint"
    assert halted.match(said)
    run.guard.close()


def test_an_older_run_in_the_same_folder_is_not_rolled_back_to(tmp_path: Path) -> None:
    first = Run(tmp_path, SAVES)
    first.go(40)
    first.guard.close()
    other = Run(tmp_path, {"monitoring": {"save_checkpoints": True}, "mode": "careful"})
    with pytest.raises(steadystep.TrainingHalted, match="no better weights"):
        other.go(20, damage=(3,))
    other.guard.close()


def test_infinity_on_purpose_is_left_alone() -> None:
    torch.manual_seed(0)
    model = Gated()
    model.g.bias.data[3] = math.inf
    guard = steadystep.Guard(model, torch.optim.SGD(model.parameters(), lr=1e-2))
    data = [batch(i) for i in range(60)]
    outcomes = [guard.step(lambda x=x: (model(x) - x.sum(-1)).square().mean()) for x in data]
    assert all(outcome.stepped and not outcome.findings for outcome in outcomes)


def test_watch_too() -> None:
    model = Gated()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    watcher = steadystep.watch(model, optimizer)
    for step in range(60):
        if step == 45:
            model.g.bias.data[3] = math.inf
        optimizer.zero_grad()
        x = batch(step)
        (model(x) - x.sum(-1)).square().mean().backward()
        optimizer.step()
    watcher.remove()
    assert all(bool(p.isfinite().all()) for p in model.parameters())
