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


def calm(standouts: Standouts, steps: int) -> None:
    for step in range(steps):
        assert not standouts.call(of_step(step, 1.0))
        standouts.learn(of_step(step, 1.0))


def test_up_to_four_calls_are_saved_up() -> None:
    standouts = Standouts(4)
    calm(standouts, 70)
    # every step is larger than all before; a call costs 1, a step brings a quarter
    called = [standouts.call(of_step(70 + i, 2.0)) for i in range(13)]
    assert called == [True] * 5 + [False] * 3 + [True] + [False] * 3 + [True]


@pytest.mark.parametrize("every", [64, 128])
def test_nothing_is_saved_up_at_the_start(every: int) -> None:
    standouts = Standouts(every)
    calm(standouts, 70)
    called = [standouts.call(of_step(70 + i, 2.0)) for i in range(every)]
    assert called.index(True) == (0 if every == 64 else 127 - 70)


@pytest.mark.parametrize(("steps", "called"), [(63, False), (64, True)])
def test_nothing_is_called_before_64_steps_are_known(steps: int, *, called: bool) -> None:
    standouts = Standouts(20)
    calm(standouts, steps)
    assert standouts.call(of_step(steps, math.nan)) is called


@pytest.mark.parametrize("loss", [-1.0, 1.0])
def test_limits_last_for_64_to_128_steps(loss: float) -> None:
    standouts = Standouts(1)
    for step in range(64):
        standouts.learn(of_step(step, loss if step else loss + 0.5))
        standouts.call(of_step(step, loss))
    for step in range(64, 128):
        standouts.learn(of_step(step, loss))
        assert not standouts.call(of_step(step, loss + 0.5))
        assert standouts.call(of_step(step, loss + 0.6))
    standouts.learn(of_step(128, loss))
    assert standouts.call(of_step(129, loss + 0.5))


def test_what_was_not_seen_lately_is_compared_with_what_was_before() -> None:
    standouts = Standouts(1)
    for step in range(70):
        products = [("a", 1.0)] if step < 64 else []
        standouts.learn(of_step(step, 1.0), products)
        standouts.call(of_step(step, 1.0))
    assert not standouts.call(of_step(70, 1.0), [("a", 2.0), ("new", 9.0)])
    assert standouts.call(of_step(71, 1.0), [("a", 2.1)])


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


class OwnForward(nn.Linear):
    """Computes something else than its class does."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).relu()


def test_only_plain_linear_layers_are_checked() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), OwnForward(2, 2), nn.Conv1d(3, 3, 1))
    sums = ProductSums(1)
    sums.look_around(model)
    sums.listen(0)
    sums.listen(1)  # the pass before was never made
    model(torch.ones(2, 3, 2))  # of sequences, as of rows
    heard = sums.stop()
    assert set(heard) == {"0"}
    assert 0.0 <= float(heard["0"]) < 1e-5
    model(torch.ones(2, 3, 2))
    assert not sums.stop()


@pytest.mark.parametrize(("every", "turns"), [(1, 1), (19, 1), (20, 2), (100, 10)])
def test_turns_by_how_often_a_step_is_computed_again(every: int, turns: int) -> None:
    model = nn.Sequential(*(nn.Linear(1, 1) for _ in range(30)))
    sums = ProductSums(every)
    sums.look_around(model)
    sums.listen(0)
    model(torch.ones(1, 1))
    assert len(sums.stop()) == 30 // turns


def test_a_not_a_number_in_an_output_is_infinitely_off() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    sums = ProductSums(1)
    sums.look_around(model)
    sums.listen(0)
    model(torch.tensor([[1.0, math.nan]]))
    assert float(sums.stop()["0"]) == math.inf


@pytest.mark.parametrize("short", ["norms", "buffer_peaks"])
def test_each_number_has_a_name(short: str) -> None:
    signals = Signals(step=1, loss=1.0, grad_norm=1.0, **{short: (1.0,)})
    with pytest.raises(ValueError, match="zip"):
        Standouts(1).learn(signals)
