"""Activations: hooks only while they are asked for, right shares, and never in the way of the forward pass."""

import gc
import weakref
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
