"""Weights that the loop replaces on purpose are not put back."""

import copy
import gc
import io
import math
import pickle
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import steadystep
from steadystep.signals import Gradients
from steadystep.signals.weights import WeightEdits
from tests.loops import assert_same, full_state

STEPS, AT = 140, 90
Edit = Callable[[nn.Module, Any], None]


def net() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 24), nn.ReLU(), nn.Linear(24, 1))


def run(way: str, edit: Edit) -> tuple[dict[str, Any], list[str], str]:
    """A regression whose loop changes the weights at step 90."""
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    guard = steadystep.Guard(model, optimizer) if way == "guard" else None
    watcher = steadystep.watch(model, optimizer) if way == "watch" else None
    told: list[str] = []
    rng = torch.Generator().manual_seed(5)
    for step in range(STEPS):
        if step == AT:
            edit(model, guard or (watcher and watcher.guard))
        x = torch.randn(32, 6, generator=rng)
        if guard is not None:
            outcome = guard.step(lambda b: (model(b).squeeze(-1) - b.sum(-1)).square().mean(), batch=x)
        else:
            optimizer.zero_grad()
            (model(x).squeeze(-1) - x.sum(-1)).square().mean().backward()
            optimizer.step()
            outcome = watcher.outcome if watcher is not None else None
        if outcome is not None:
            told += [f"{step} {found.detector}" for found in outcome.findings if found.severity != "info"]
            told += [] if outcome.plan.proceeds else [f"{step} {outcome.plan.actions}"]
    state = full_state(model, optimizer)
    by = guard or (watcher.guard if watcher is not None else None)
    cause = by.diagnose()[0].cause if by is not None else ""
    if guard is not None:
        guard.close()
    if watcher is not None:
        watcher.remove()
    return state, told, cause


def rewind(model: nn.Module, _: Any) -> None:
    model.load_state_dict(net().state_dict())


def rewind_a_part(model: nn.Module, _: Any) -> None:
    assert isinstance(model, nn.Sequential)
    model[0].load_state_dict(net()[0].state_dict())


def reset_and_say_so(model: nn.Module, guard: Any) -> None:
    if guard is None:
        return reset(model)
    with guard.editing():
        return reset(model)


def reset(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4.0)


@pytest.mark.parametrize("way", ["guard", "watch"])
@pytest.mark.parametrize("edit", [rewind, rewind_a_part, reset_and_say_so])
def test_what_the_loop_loads_stays(way: str, edit: Edit) -> None:
    expected, *_ = run("plain", edit)
    state, told, cause = run(way, edit)
    assert told == []
    assert_same(state, expected)
    assert cause == "healthy"


def test_what_nobody_announced_is_still_damage() -> None:
    _, told, _ = run("guard", lambda model, _: reset(model))
    assert told


def test_a_swap_that_is_undone_is_none() -> None:
    """Averaged weights loaded for a validation, and the trained ones again: the states in memory are still good."""

    def swap(model: nn.Module, guard: steadystep.Guard) -> None:
        trained = copy.deepcopy(model.state_dict())
        model.load_state_dict(net().state_dict())
        model.load_state_dict(trained)
        assert guard._recovery.states

    model = net()
    guard = steadystep.Guard(model, torch.optim.Adam(model.parameters(), lr=1e-2))
    for step in range(60):
        x = torch.randn(8, 6)
        if step == 50:
            swap(model, guard)
        guard.step(lambda b: model(b).square().mean(), batch=x)
        assert step < 25 or guard._recovery.states


def test_loaded_weights_that_are_not_finite_are_damage() -> None:
    def broken(model: nn.Module, _: Any) -> None:
        spoiled = {name: torch.full_like(value, torch.nan) for name, value in model.state_dict().items()}
        model.load_state_dict(spoiled)

    state, told, _ = run("guard", broken)
    assert any("rollback" in line for line in told)
    assert all(bool(value.isfinite().all()) for value in state.values())


def test_the_hooks_stay_behind() -> None:
    model = net()
    guard = steadystep.Guard(model, torch.optim.SGD(model.parameters(), lr=0.1))
    copied = copy.deepcopy(model)
    copied.load_state_dict(net().state_dict())
    torch.save(model, io.BytesIO())
    assert guard._parts.edits.count() == 0
    guard.close()
    assert not hooks(model)


def hooks(model: nn.Module) -> int:
    return sum(len(module._load_state_dict_pre_hooks) for module in model.modules())


def test_a_saved_model_loads_without_this_package() -> None:
    model = net()
    guard = steadystep.Guard(model, torch.optim.SGD(model.parameters(), lr=0.1))
    saved = pickle.dumps(model)
    guard.close()
    assert b"steadystep" not in saved
    loaded = pickle.loads(saved)
    loaded.load_state_dict(net().state_dict())
    torch.testing.assert_close(loaded.state_dict(), net().state_dict())


def test_a_model_keeps_no_guard_that_was_dropped() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    gone = weakref.ref(optimizer)
    guard = steadystep.Guard(model, optimizer)
    guard.step(lambda: model(torch.ones(2, 6)).square().mean())
    del guard, optimizer
    gc.collect()
    assert gone() is None
    assert not hooks(model)


def test_models_that_cannot_be_hooked_or_measured_are_guarded_all_the_same() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scripted = torch.jit.script(nn.Linear(6, 6))
            self.out = nn.Linear(6, 1)
            self.scale = nn.Parameter(torch.ones(2).to(torch.float8_e4m3fn), requires_grad=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.out(self.scripted(x))
            return out

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, about its own scripting
        model = Mixed()
    guard = steadystep.Guard(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with guard.editing():
        model.out.reset_parameters()
    assert guard.step(lambda: model(torch.ones(2, 6)).square().mean()).stepped


def test_double_precision_is_no_obstacle() -> None:
    model = net().double()
    guard = steadystep.Guard(model, torch.optim.SGD(model.parameters(), lr=0.1))
    model.load_state_dict(net().double().state_dict())
    assert guard._parts.edits.count() == 0  # the same weights
    with guard.editing():
        reset(model)
    assert guard._parts.edits.count() == 1


def test_a_part_of_the_model_that_is_kept_is_no_edit_after_a_rollback() -> None:
    model = net()
    guard = steadystep.Guard(model, torch.optim.Adam(model.parameters(), lr=1e-2))
    guard.keep("head", model[2])
    for step in range(100):
        if step == 80:
            with torch.no_grad():
                model[0].weight[0, 0] = math.nan
        outcome = guard.step(lambda b: model(b).square().mean(), batch=torch.randn(8, 6))
        if step == 80:
            assert outcome.restored is not None
        if step == 81:
            assert guard._recovery.states
            assert guard._parts.edits.count() == 0


def test_every_judge_of_several_optimizers_hears_of_it() -> None:
    model = net()
    halves = [torch.optim.SGD(model[0].parameters(), lr=0.1), torch.optim.SGD(model[2].parameters(), lr=0.1)]
    watcher = steadystep.watch(model, halves)
    judges = watcher._judges if hasattr(watcher, "_judges") else [watcher.guard._parts.judge]
    edits = watcher.guard._parts.edits
    edits.expect()
    reset(model)
    assert [edits.count() for _ in range(2)] == [1, 1]  # asking does not use it up
    assert all(judge.edition == 0 for judge in judges)
    watcher.remove()


class TestEdits:
    """The record itself, without a guard."""

    def edits(self, model: nn.Module, **more: Any) -> tuple[WeightEdits, torch.optim.Optimizer]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        return WeightEdits(model, Gradients(model, optimizer), [optimizer], **more), optimizer

    def test_weights_that_are_loaded_and_differ_count_once(self) -> None:
        model = net()
        edits, _ = self.edits(model)
        assert (edits.count(), edits.suspected) == (0, False)
        model.load_state_dict(net().state_dict())
        assert edits.suspected
        assert edits.count() == 0, "the same weights"
        assert not edits.suspected
        scaled = {name: 2.0 * value for name, value in net().state_dict().items()}
        model.load_state_dict(scaled)
        assert [edits.count() for _ in range(3)] == [1, 1, 1]
        model.load_state_dict(net().state_dict())
        model.load_state_dict(scaled)
        assert edits.count() == 1, "as before the first of them"
        model.load_state_dict(net().state_dict())
        assert edits.count() == edits.edition == 2

    def test_weights_that_are_not_finite_are_no_edit(self) -> None:
        model = net()
        edits, _ = self.edits(model)
        model.load_state_dict({name: value * math.nan for name, value in net().state_dict().items()})
        assert edits.count() == 0

    def test_a_state_of_the_optimizer_counts_whatever_it_is(self) -> None:
        model = net()
        edits, optimizer = self.edits(model)
        optimizer.load_state_dict(optimizer.state_dict())
        assert edits.suspected
        assert [edits.count() for _ in range(2)] == [1, 1]
        assert not edits.suspected
        optimizer.load_state_dict(optimizer.state_dict())
        model.load_state_dict(model.state_dict())
        assert edits.count() == 2, "the weights are the same"

    def test_of_one_weight_and_of_none_that_has_a_norm(self) -> None:
        one = nn.Linear(2, 1, bias=False)
        edits, _ = self.edits(one)
        one.load_state_dict({"weight": torch.ones(1, 2)})
        assert edits.count() == 1
        whole = nn.Linear(2, 1, bias=False, dtype=torch.complex64)
        edits, _ = self.edits(whole)
        whole.load_state_dict({"weight": torch.ones(1, 2)})
        assert edits.count() == 0

    def test_forgotten_it_is_no_edit(self) -> None:
        model = net()
        edits, optimizer = self.edits(model)
        model.load_state_dict({name: 2.0 * value for name, value in net().state_dict().items()})
        optimizer.load_state_dict(optimizer.state_dict())
        edits.forget()
        assert not edits.suspected
        assert edits.count() == 0

    def test_a_weight_more_or_less_is_an_edit(self) -> None:
        model = net()
        edits, optimizer = self.edits(model)
        edits.expect()
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
        edits._trained.collect()
        assert edits.count() == 1

    def test_hooks_where_they_are_wanted(self) -> None:
        model = net()
        edits, optimizer = self.edits(model, hooked=False)
        assert hooks(model) == 0
        model.load_state_dict({name: 2.0 * value for name, value in net().state_dict().items()})
        optimizer.load_state_dict(optimizer.state_dict())
        assert (edits.suspected, edits.count()) == (False, 0)
        edits.expect()
        reset(model)
        assert edits.count() == 1, "announced"
        hooked, optimizer = self.edits(model)
        assert hooks(model) == 4
        hooked.remove()
        assert hooks(model) == 0
        optimizer.load_state_dict(optimizer.state_dict())
        assert not hooked.suspected

    def test_norms_of_every_precision(self) -> None:
        for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
            model = net().to(dtype)
            edits, _ = self.edits(model)
            edits.expect()
            assert edits.count() == 0
            edits.expect()
            with torch.no_grad():
                model[0].weight.mul_(2.0)
            assert edits.count() == 1, dtype
        large = net().half()
        edits, _ = self.edits(large)
        with torch.no_grad():
            large[0].weight.fill_(6e4)
        edits.expect()
        with torch.no_grad():
            large[0].weight.fill_(5e4)
        assert edits.count() == 1, "a norm beyond 65504 is finite all the same"
