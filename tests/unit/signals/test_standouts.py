"""Steps that stand out are called, within the budget; a wrong product stands out of rounding."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from steadystep.records import Signals
from steadystep.signals.standouts import ProductSums, Standouts


def of_step(step: int, loss: float, norm: float = 1.0, peak: float = 1.0) -> Signals:
    more: dict[str, Any] = {"names": ("w", "b"), "norms": (norm, 0.1), "buffers": ("var",), "buffer_peaks": (peak,)}
    return Signals(step=step, loss=loss, grad_norm=math.hypot(norm, 0.1), **more)


@pytest.mark.parametrize(
    ("loss", "norm", "peak", "called"),
    [
        (1.0, 1.0, 1.0, False),
        (1.01, 1.0, 1.0, True),
        (math.nan, 1.0, 1.0, True),
        (1.0, 1.01, 1.0, True),
        (1.0, 1.0, 1.19, False),
        (1.0, 1.0, 1.21, True),
        (0.5, 0.5, 0.5, False),
    ],
)
def test_a_step_larger_than_all_lately_is_called(loss: float, norm: float, peak: float, *, called: bool) -> None:
    standouts = Standouts(20)
    for step in range(70):
        assert not standouts.call(of_step(step, 1.0 - 0.001 * step))
        standouts.learn(of_step(step, 1.0 - 0.001 * step))
    assert standouts.call(of_step(70, loss, norm, peak)) is called


def test_one_gradient_of_many_is_called() -> None:
    standouts = Standouts(20)
    named: dict[str, Any] = {"loss": 1.0, "grad_norm": 10.0, "names": ("w", "b")}
    for step in range(70):
        standouts.learn(Signals(step=step, norms=(10.0, 0.1), **named))
        standouts.call(Signals(step=step, norms=(10.0, 0.1), **named))
    assert not standouts.call(Signals(step=70, norms=(9.99, 0.14), **named))
    assert standouts.call(Signals(step=71, norms=(9.99, 0.16), **named))


@given(st.lists(st.floats(0.0, 1e6), min_size=80, max_size=300), st.integers(1, 100))
def test_no_more_steps_are_called_than_the_budget_has(losses: list[float], every: int) -> None:
    standouts, called = Standouts(every), 0
    for step, loss in enumerate(losses):
        called += standouts.call(of_step(step, loss, norm=loss))
        standouts.learn(of_step(step, loss, norm=loss))
    assert called <= len(losses) / every


def test_a_wrong_product_is_further_off_than_rounding() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 60), nn.ReLU(), nn.Linear(60, 50, bias=False))
    wrong: list[float] = []

    def hit(module: nn.Module, inputs: Any, output: Tensor) -> None:
        output.data[0, 0] += wrong.pop() if wrong else 0.0

    model[2].register_forward_hook(hit)
    sums = ProductSums(10)
    sums.look_around(model)
    usual: dict[str, float] = {"0": 0.0, "2": 0.0}
    for _ in range(20):
        sums.listen(0)
        model(torch.randn(8, 40))
        usual = {name: max(usual[name], float(off)) for name, off in sums.stop().items()}
    assert 0.0 < max(usual.values()) < 1e-5
    sums.listen(0)
    wrong.append(1e-3)
    model(torch.randn(8, 40))
    model(torch.randn(8, 40))  # another micro-batch
    off = sums.stop()
    assert 0.9e-3 < float(off["2"]) < 1.1e-3
    assert float(off["0"]) < 2 * usual["0"]
    model(torch.randn(8, 40))
    assert not sums.stop()


def test_a_product_that_is_off_is_called_and_infinity_is_not_learned() -> None:
    standouts = Standouts(20)
    for step in range(70):
        products = [("a", 1.0), ("b", math.inf if step == 3 else 1e-6)]
        assert not standouts.call(of_step(step, 1.0), products)
        standouts.learn(of_step(step, 1.0), products)
    assert not standouts.call(of_step(70, 1.0), [("a", 1.0), ("b", 1.9e-6)])
    assert standouts.call(of_step(71, 1.0), [("a", 1.0), ("b", 2.1e-6)])
    assert standouts.call(of_step(72, 1.0), [("a", math.inf), ("b", 1e-6)])


def test_layers_take_turns() -> None:
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(5)))
    sums, heard = ProductSums(40), list[set[str]]()
    sums.look_around(model)
    for step in range(4):
        sums.listen(step)
        model(torch.ones(1, 2))
        heard.append({*sums.stop()})
    assert heard == [{"0", "4"}, {"1"}, {"2"}, {"3"}]
