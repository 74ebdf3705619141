"""Moments of any optimizer and kept objects that something else than updates has spoiled are put back."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import steadystep
from tests.loops import batches, small_net, squared

DATA = batches(120)


class Lion(Optimizer):
    """Updates by the sign of a momentum."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 1e-3, "betas": (0.9, 0.99)})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    average = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                    p.sub_(group["lr"] * torch.sign(0.9 * average + 0.1 * p.grad))
                    average.lerp_(p.grad, 0.01)


class Muon(Optimizer):
    """Updates by the direction of a momentum."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 1e-2})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    momentum = self.state[p].setdefault("momentum_buffer", torch.zeros_like(p))
                    momentum.mul_(0.95).add_(p.grad)
                    p.sub_(group["lr"] * momentum / momentum.abs().max().clamp(min=1e-12))


def run(
    make: Callable[[Any], Optimizer],
    steps: int,
    before: Callable[[int, nn.Module, Optimizer], None],
    **settings: Any,
) -> tuple[nn.Module, Optimizer, list[steadystep.Outcome]]:
    model = small_net(dropout=0.0)
    optimizer = make(model.parameters())
    guard = steadystep.Guard(model, optimizer, config=settings)
    outcomes = []
    for step in range(steps):
        before(step, model, optimizer)
        outcomes.append(guard.step(lambda x=DATA[step]: squared(model, x)))
    return model, optimizer, outcomes


@pytest.mark.parametrize("value", [math.nan, math.inf, 1e38, -1e38])
@pytest.mark.parametrize("make", [Lion, Muon], ids=["sign", "direction"])
def test_moments_of_any_optimizer_are_put_back(make: Callable[[Any], Optimizer], value: float) -> None:
    def damage(step: int, model: nn.Module, optimizer: Optimizer) -> None:
        if step == 64:
            (moment,) = optimizer.state[model[0].weight].values()
            moment[0, 0] = value

    model, optimizer, outcomes = run(make, 100, damage)
    held = [*model.parameters(), *(t for slots in optimizer.state.values() for t in slots.values())]
    assert all(float(t.detach().abs().max()) < 1e6 for t in held)
    assert [o.step for o in outcomes if o.plan.actions] in ([65], [67])
    assert math.isfinite(outcomes[-1].loss)


def test_a_moment_that_takes_no_part_in_updates_is_put_back_too() -> None:
    spare = nn.Parameter(torch.ones(4))

    def damage(step: int, model: nn.Module, optimizer: Optimizer) -> None:
        if step == 1:
            optimizer.add_param_group({"params": [spare]})
            optimizer.state[spare]["momentum_buffer"] = torch.ones(4)
        if step == 50:
            optimizer.state[spare]["momentum_buffer"][1] = math.nan

    _, optimizer, outcomes = run(lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9), 80, damage)
    (acted,) = [o for o in outcomes if o.plan.actions]
    assert (acted.step, acted.plan.actions, acted.stepped) == (67, ("restore-moments",), True)
    assert acted.diagnosis.cause == "poisoned-moments"
    assert optimizer.state[spare]["momentum_buffer"].tolist() == [1.0] * 4


@pytest.mark.parametrize("check", [None, True, False])
def test_kept_objects_are_put_back_where_that_is_asked(check: bool | None) -> None:
    model = small_net(dropout=0.0)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    guard = steadystep.Guard(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    guard.keep("average", average, check=check)
    outcomes = []
    for step in range(80):
        if step == 60:
            average.module[0].weight.data[0, 0] = math.nan
        outcomes.append(guard.step(lambda x=DATA[step]: squared(model, x)))
        average.update_parameters(model)
    finite = all(bool(p.isfinite().all()) for p in average.parameters())
    assert finite == (check is not False)
    acted = [(o.step, o.plan.actions, o.stepped) for o in outcomes if o.plan.actions]
    assert acted == ([(67, ("restore-kept",), True)] if finite else [])


OPTIMIZERS = ["ASGD", "Adadelta", "Adagrad", "Adam", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD", "Adafactor"]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_healthy_state_is_left_alone(name: str) -> None:
    _, _, outcomes = run(lambda p: getattr(torch.optim, name)(p, lr=1e-3), 50, lambda *_: None)
    assert not [f for o in outcomes for f in o.findings if f.detector == "damaged-state"]


def test_gradients_as_large_as_that_explain_it() -> None:
    model = nn.Linear(3, 1)
    guard = steadystep.Guard(model, torch.optim.Adam(model.parameters(), lr=1e-3))
    x = torch.ones(2, 3)
    outcomes = [guard.step(lambda: model(x).mean() * 1e18) for _ in range(40)]
    assert all(o.stepped and not o.findings for o in outcomes)


def test_an_optimizer_that_holds_infinity_is_told_of_twice() -> None:
    def keeps(step: int, model: nn.Module, optimizer: Optimizer) -> None:
        optimizer.state[model[0].weight]["bound"] = torch.full((2,), math.inf)

    _, _, outcomes = run(lambda p: torch.optim.SGD(p, lr=1e-2), 120, keeps)
    assert all(o.stepped for o in outcomes)
    assert [o.step for o in outcomes if o.findings] == [7, 27]
