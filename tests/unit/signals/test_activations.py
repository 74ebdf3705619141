"""Activations: hooks only while they are asked for, right shares, and never in the way of the forward pass."""

import copy
import gc
import pickle
import sys
import types
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from steadystep.signals import activations
from steadystep.signals.activations import Activations


def shares(model: nn.Module, x: Tensor) -> dict[str, tuple[float, float]]:
    watch = Activations(model)
    with watch.watching():
        model(x)
    rows = watch.pending()
    dead, saturated = watch.read(rows[0].tolist() if rows else [])
    return dict(zip(watch.modules, zip(dead, saturated, strict=True), strict=True))


def with_biases(activation: nn.Module, biases: list[float]) -> nn.Sequential:
    layer = nn.Linear(3, len(biases))
    with torch.no_grad():
        layer.weight.mul_(0.01)
        layer.bias.copy_(torch.tensor(biases))
    return nn.Sequential(layer, activation)


@pytest.mark.parametrize("activation", [nn.ReLU(), nn.ReLU(inplace=True), nn.ReLU6(), nn.GELU()])
@pytest.mark.parametrize("shape", [(32, 3), (4, 8, 3)])
def test_dead_units_are_counted(activation: nn.Module, shape: tuple[int, ...]) -> None:
    model = with_biases(activation, [-20.0, -20.0, -20.0, 1.0])
    assert shares(model, torch.randn(shape)) == {"1": (0.75, 0.0)}


def test_a_unit_that_wakes_once_is_not_dead() -> None:
    x = torch.full((32, 4), -1.0)
    x[7, 2] = 0.5
    assert shares(nn.ReLU(), x) == {"ReLU": (0.75, 0.0)}


def test_channels_are_the_units_of_images() -> None:
    x = torch.full((2, 4, 5, 5), -1.0)
    x[1, 3, 2, 2] = 1.0
    assert shares(nn.ReLU(), x) == {"ReLU": (0.75, 0.0)}


def test_saturated_values_are_counted() -> None:
    x = torch.tensor([[-9.0, 0.0], [9.0, 2.0]])
    assert shares(nn.Tanh(), x) == {"Tanh": (0.0, 0.5)}
    assert shares(nn.Sigmoid(), x) == {"Sigmoid": (0.0, 0.5)}


@pytest.mark.parametrize(
    ("kind", "inverse"), [(nn.Tanh, lambda y: torch.atanh(2.0 * y - 1.0)), (nn.Sigmoid, torch.logit)]
)
@pytest.mark.parametrize(("share", "saturated"), [(0.009, 1.0), (0.011, 0.0), (0.3, 0.0)])
def test_saturated_is_within_a_hundredth_of_the_end(
    kind: type[nn.Module], inverse: Callable[[Tensor], Tensor], share: float, saturated: float
) -> None:
    share = share / 2.0 if kind is nn.Tanh else share  # its values lie between -1 and 1
    x = inverse(torch.tensor([[share, 1.0 - share]] * 16))
    assert shares(kind(), x) == {kind.__name__: (0.0, saturated)}


def test_too_few_examples_say_nothing() -> None:
    assert shares(nn.ReLU(), torch.full((15, 4), -1.0)) == {}
    assert shares(nn.ReLU(), torch.full((16, 4), -1.0)) == {"ReLU": (1.0, 0.0)}
    assert shares(nn.ReLU(), torch.zeros(40)) == shares(nn.ReLU(), torch.zeros(0, 4)) == {}
    assert shares(nn.LeakyReLU(), torch.full((32, 4), -1.0)) == {}, "a gradient always passes"


def test_hooks_exist_only_inside() -> None:
    model = with_biases(nn.ReLU(), [1.0])
    watch = Activations(model)
    with watch.watching():
        assert model[1]._forward_hooks
        model(torch.randn(32, 3))
    assert not model[1]._forward_hooks
    with pytest.raises(ZeroDivisionError), watch.watching():
        raise ZeroDivisionError
    assert not model[1]._forward_hooks
    watch.start()
    watch.start()
    assert len(model[1]._forward_hooks) == 1
    watch.clear()
    assert not model[1]._forward_hooks
    assert watch.pending() == []


def test_a_module_that_runs_again_is_told_apart_up_to_a_limit() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.act = nn.ReLU()

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(9):
                x = self.act(x) - 0.5
            return x

    assert list(shares(Shared(), torch.ones(32, 2))) == ["act", "act (2)", "act (3)", "act (4)"]


def test_many_modules_are_sampled_from_first_to_last() -> None:
    seen = list(shares(nn.Sequential(*(nn.ReLU() for _ in range(200))), torch.ones(32, 2)))
    assert len(seen) == 64
    assert (seen[0], seen[-1]) == ("0", "199")


def test_a_failing_hook_never_breaks_the_forward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(module: nn.Module, output: Any) -> Tensor:
        raise RuntimeError("cannot be measured")

    model = nn.Sequential(nn.ReLU(), nn.Tanh())
    watch = Activations(model)
    monkeypatch.setattr(activations, "_measure", fail)
    with watch.watching():
        assert torch.equal(model(torch.ones(32, 2)), torch.ones(32, 2).tanh())
    monkeypatch.undo()
    with watch.watching():
        model(torch.ones(32, 2))
    assert watch.modules == (), "left out from then on"


def test_outputs_that_are_no_tensors_do_no_harm() -> None:
    class Pair(nn.ReLU):
        def forward(self, input: Tensor) -> Any:
            return (input, input)

    assert shares(Pair(), torch.ones(32, 2)) == {}


def test_activations_and_their_graph_are_not_kept_alive() -> None:
    kept: list[weakref.ref[Tensor]] = []
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    model[1].register_forward_hook(lambda _m, _i, out: kept.append(weakref.ref(out)))
    watch = Activations(model)
    with watch.watching():
        model(torch.randn(32, 2))
    gc.collect()
    assert kept[0]() is None
    assert not watch.pending()[0].requires_grad


def test_transforms_get_no_number_out() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    watch = Activations(model)
    with watch.watching():
        torch.func.vmap(model)(torch.randn(32, 3, 2))
    assert watch.modules == ()


def test_a_compiled_module_is_not_watched() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    model._compiled_call_impl = model.__call__  # what nn.Module.compile() leaves behind
    watch = Activations(model)
    watch.start()
    assert not model[1]._forward_hooks


def test_spread_is_even_and_keeps_both_ends() -> None:
    for count, most, expected in (
        (0, 3, []),
        (3, 3, [0, 1, 2]),
        (4, 3, [0, 1, 3]),
        (5, 3, [0, 2, 4]),
        (100, 5, [0, 24, 49, 74, 99]),
        (10, 2, [0, 9]),
    ):
        assert activations.evenly_chosen(range(count), most) == expected, (count, most)


def test_modules_by_name_and_none_of_a_compiled_model() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    assert [name for name, _ in activations.open_modules(model)] == ["Sequential", "0", "1"]
    model[1]._compiled_call_impl = model[1].__call__
    assert activations.open_modules(model) == []
    compiled = type("OptimizedModule", (nn.Module,), {})()  # what torch.compile makes of a module
    assert activations.open_modules(nn.Sequential(compiled)) == []


def test_whether_something_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    utils, frames = types.SimpleNamespace(counters={"frames": {}}), types.SimpleNamespace(cached_backends={1: None})
    monkeypatch.setitem(sys.modules, "torch._dynamo.utils", utils)
    monkeypatch.setitem(sys.modules, "torch._dynamo.eval_frame", frames)
    assert not activations.compiles()
    utils.counters["frames"] = {"ok": 1}
    assert activations.compiles()
    utils.counters["frames"] = {}
    frames.cached_backends[2] = print
    assert activations.compiles()
    monkeypatch.delitem(sys.modules, "torch._dynamo.eval_frame")
    assert not activations.compiles()
    monkeypatch.delitem(sys.modules, "torch._dynamo.utils")
    assert not activations.compiles()


def test_shares_at_their_limits() -> None:
    x = torch.tensor([[0.98, 0.995, -0.995, -0.98]])
    assert shares(nn.Sequential(nn.Tanh()), x.atanh()) == {"0": (0.0, 0.5)}
    x = torch.tensor([[0.985, 0.995, 0.005, 0.015]])
    assert shares(nn.Sequential(nn.Sigmoid()), x.logit()) == {"0": (0.0, 0.5)}
    quiet = torch.full((16, 2), -1.0)
    assert shares(nn.Sequential(nn.SiLU()), quiet) == {"0": (0.0, 0.0)}, "small is not zero"


def test_units_by_the_number_of_dimensions() -> None:
    for shape, dead in (((32, 4), (3,)), ((4, 8, 4), (3,)), ((4, 4, 2, 2), (1,)), ((2, 4, 2, 2, 2), (1,))):
        x = torch.ones(shape)
        unit = 1 if len(shape) > 3 else len(shape) - 1
        x.select(unit, dead[0]).fill_(-1.0)
        assert shares(nn.ReLU(), x) == {"ReLU": (0.25, 0.0)}, shape
    assert shares(nn.ReLU(), torch.full((1, 4, 3, 5), -1.0)) == {}, "15 values per unit"
    assert shares(nn.ReLU(), torch.full((1, 4, 4, 4), -1.0)) == {"ReLU": (1.0, 0.0)}


def test_a_hook_that_raises_stays_silent() -> None:
    told: list[tuple[int, ...]] = []

    def tell(*args: int) -> None:
        told.append(args)
        raise ValueError

    hook = activations.SilentHook(tell)
    assert hook(1, 2) is None
    assert told == [(1, 2)]
    copy.deepcopy(hook)(3)
    pickle.loads(pickle.dumps(hook))(4, 5, 6)
    activations.SilentHook()(7)
    assert told == [(1, 2)]


def test_no_more_than_64_are_seen_whoever_runs_twice() -> None:
    acts = nn.ModuleList([nn.ReLU() for _ in range(40)])
    watch = Activations(acts)
    with watch.watching():
        for _ in range(2):
            for act in acts:
                act(torch.ones(32, 2))
    assert len(watch.modules) == 64
    assert watch.modules[-1] == "23 (2)"
