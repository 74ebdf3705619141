"""Loops in which somebody else takes the step: they work, or are refused when the guard is made, with the way out."""

import math
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

import steadystep
from steadystep import MisuseError, UnsupportedError
from tests.loops import assert_same, batches, small_net, squared

EACH: dict[Tensor, Optimizer] = {}


def hook_of_the_tutorial(parameter: Tensor) -> None:
    EACH[parameter].step()
    EACH[parameter].zero_grad()


def by_a_global_table(model: nn.Module) -> None:
    EACH.clear()
    for p in model.parameters():
        EACH[p] = SGD([p], lr=0.1)
        p.register_post_accumulate_grad_hook(hook_of_the_tutorial)


def by_closures(model: nn.Module) -> None:
    for p in model.parameters():
        own = SGD([p], lr=0.1)

        def hook(_: Tensor, own: Optimizer = own) -> None:
            own.step()
            own.zero_grad()

        p.register_post_accumulate_grad_hook(hook)


def by_torch(model: nn.Module) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of torch, about its own scripting
        from torch.distributed.optim import _apply_optimizer_in_backward
    _apply_optimizer_in_backward(SGD, model.parameters(), {"lr": 0.1})


@pytest.mark.parametrize("attach", [steadystep.Guard, steadystep.watch])
@pytest.mark.parametrize("way", [by_a_global_table, by_closures, by_torch])
def test_an_optimizer_inside_backward_is_refused_with_the_way_out(attach: Any, way: Any) -> None:
    model = small_net()
    way(model)
    with pytest.raises(UnsupportedError, match=r"inside backward.*call one optimizer.step\(\) after backward"):
        attach(model, SGD(model.parameters(), lr=0.1))


def test_one_that_was_not_recognised_is_refused_before_its_first_update() -> None:
    model = nn.Linear(2, 1, bias=False)
    optimizer = SGD(model.parameters(), lr=0.1)
    before = model.weight.detach().clone()
    with steadystep.watch(model, optimizer):
        model.weight.register_post_accumulate_grad_hook(lambda _: optimizer.step())  # made after the watcher
        with pytest.raises(UnsupportedError, match="inside backward"):
            model(torch.ones(1, 2)).sum().backward()
    assert torch.equal(model.weight, before)


def test_hooks_that_do_not_step_are_nobodys_business() -> None:
    model = small_net()
    optimizer = SGD(model.parameters(), lr=0.1)
    rates: list[float] = []
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda _: rates.append(optimizer.param_groups[0]["lr"]))
    assert steadystep.Guard(model, optimizer).step(lambda: squared(model, batches(1)[0])).stepped
    assert rates


def train_by_hand(model: nn.Module, guard: steadystep.Guard | None) -> list[bool]:
    """Plain gradient descent in two lines; without a guard the bad batch is left out by somebody who knows."""
    taken = []
    torch.manual_seed(1)
    for i, x in enumerate(batches(8)):
        if guard is None and i == 5:
            continue
        loss = squared(model, x * (math.nan if i == 5 else 1.0))
        loss.backward()
        proceeds = guard is None or guard.inspect(loss).proceeds
        with torch.no_grad():
            for p in model.parameters():
                if proceeds and p.grad is not None:
                    p -= 0.01 * p.grad
                p.grad = None
        if guard is not None:
            guard.commit(stepped=proceeds)
        taken.append(proceeds)
    return taken


def test_updates_by_hand_need_no_optimizer() -> None:
    plain, guarded = small_net(dropout=0.0), small_net(dropout=0.0)
    train_by_hand(plain, None)
    guard = steadystep.Guard(guarded, None)
    assert train_by_hand(guarded, guard) == [i != 5 for i in range(8)]
    assert (guard.attempts, guard.updates) == (8, 7)
    assert_same(plain.state_dict(), guarded.state_dict())
    again = steadystep.Guard(small_net(dropout=0.0), None)
    again.load_state_dict(guard.state_dict())
    assert again.updates == 7


def test_a_loop_without_an_optimizer_has_a_rate_of_its_own() -> None:
    model = small_net(dropout=0.0)
    guard = steadystep.Guard(model, None)
    for x in batches(60):
        loss = squared(model, x)
        model.zero_grad()
        loss.backward()
        assert guard.inspect(loss).proceeds
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.01 * parameter.grad
        guard.commit(stepped=True)
    assert [each.cause for each in guard.diagnose()] == ["healthy"]


def test_what_needs_an_optimizer_says_so() -> None:
    model = nn.Linear(2, 1)
    guard = steadystep.Guard(model, None)
    with pytest.raises(MisuseError, match=r"guard.inspect\(loss\).*guard.commit"):
        guard.step(lambda: model(torch.ones(1, 2)).sum())
    with pytest.raises(MisuseError, match="has no effect without an optimizer"):
        steadystep.Guard(nn.Linear(2, 1), None, schedule=lambda step: 1.0)
    with pytest.raises(MisuseError, match=r"Guard\(model, None\) with inspect and commit"):
        steadystep.watch(nn.Linear(2, 1), None)  # type: ignore[arg-type]
    with pytest.raises(MisuseError, match="no parameter of this model requires a gradient"):
        steadystep.Guard(nn.Tanh(), None)


@pytest.mark.parametrize("attach", [steadystep.Guard, steadystep.watch])
@pytest.mark.parametrize("which", ["engine", "optimizer"])
def test_deepspeed_is_named(attach: Any, which: str) -> None:
    """Not the package itself, which cannot be installed here: what its engine and its optimizer look like to us."""
    model = nn.Linear(2, 1)
    optimizer: Any = SGD(model.parameters(), lr=0.1)
    if which == "engine":
        model = type("DeepSpeedEngine", (nn.Linear,), {"__module__": "deepspeed.runtime.engine"})(2, 1)
    else:
        kind = type("DeepSpeedZeroOptimizer", (), {"__module__": "deepspeed.runtime.zero.stage_1_and_2"})
        inner, optimizer = optimizer, kind()
        optimizer.optimizer = inner
    with pytest.raises(UnsupportedError, match=r"DeepSpeed.*integrations.deepspeed.watch"):
        attach(model, optimizer)
