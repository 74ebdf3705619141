"""The same multipliers as transformers' schedules, step for step; needs transformers."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from steadystep.schedule import from_torch, linear, named, one_minus_sqrt, wsd

optimization = pytest.importorskip("transformers.optimization")

LR = 0.25


@st.composite
def runs(draw: st.DrawFn) -> tuple[int, int]:
    total = draw(st.integers(2, 300))
    return draw(st.integers(0, total - 1)), total


def multipliers(make, *arguments, count: int, **options) -> object:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=LR)
    function = make(optimizer, *arguments, **options).lr_lambdas[0]
    return pytest.approx([function(step) for step in range(count)], rel=1e-12, abs=1e-12)


def ours(name: str, run: tuple[int, int], *, count: int, **options) -> list[float]:
    made = named(name, warmup_steps=run[0], total_steps=run[1], **options)
    return [made(step) for step in range(count)]


@given(runs())
def test_linear_and_constant(run: tuple[int, int]) -> None:
    rise, total = run
    count = total + 20
    theirs = multipliers(optimization.get_linear_schedule_with_warmup, rise, total, count=count)
    assert ours("linear", run, count=count) == theirs
    theirs = multipliers(optimization.get_constant_schedule_with_warmup, rise, count=count)
    assert ours("constant_with_warmup", run, count=count) == theirs


@given(runs(), st.floats(0.0, 1.0))
def test_cosine_up_to_its_end(run: tuple[int, int], floor: float) -> None:
    """Beyond the end theirs rises again; ours holds the floor."""
    rise, total = run
    theirs = multipliers(optimization.get_cosine_schedule_with_warmup, rise, total, count=total + 1)
    assert ours("cosine", run, count=total + 1) == theirs
    make = optimization.get_cosine_with_min_lr_schedule_with_warmup
    theirs = multipliers(make, rise, total, min_lr_rate=floor, count=total + 1)
    assert ours("cosine", run, count=total + 1, floor=floor) == theirs


@given(runs(), st.integers(1, 9))
def test_cosine_with_restarts(run: tuple[int, int], cycles: int) -> None:
    rise, total = run
    cycles, count = min(cycles, total - rise), total + 20
    make = optimization.get_cosine_with_hard_restarts_schedule_with_warmup
    theirs = multipliers(make, rise, total, num_cycles=cycles, count=count)
    assert ours("cosine_with_restarts", run, num_cycles=cycles, count=count) == theirs


@given(runs(), st.floats(0.2, 5.0), st.floats(0.0, 0.9))
def test_polynomial(run: tuple[int, int], power: float, floor: float) -> None:
    rise, total = run
    make, count = optimization.get_polynomial_decay_schedule_with_warmup, total + 20
    theirs = multipliers(make, rise, total, lr_end=floor * LR, power=power, count=count)
    assert ours("polynomial", run, power=power, floor=floor, count=count) == theirs


@given(runs(), st.none() | st.integers(1, 500))
def test_inverse_sqrt(run: tuple[int, int], timescale: int | None) -> None:
    rise, total = run
    theirs = multipliers(optimization.get_inverse_sqrt_schedule, rise, timescale=timescale, count=total + 20)
    options = {} if timescale is None else {"timescale": timescale}
    assert ours("inverse_sqrt", run, count=total + 20, **options) == theirs


@given(runs(), st.data(), st.floats(0.0, 1.0), st.sampled_from(["cosine", "linear", "1-sqrt"]))
def test_wsd(run: tuple[int, int], data: st.DataObject, floor: float, kind: str) -> None:
    rise, total = run
    fall, count = data.draw(st.integers(1, total - rise)), total + 20
    make = optimization.get_wsd_schedule
    theirs = multipliers(make, rise, fall, total, decay_type=kind, min_lr_ratio=floor, count=count)
    made = ours("wsd", run, decay_steps=fall, decay_type=kind, floor=floor, warmup_start=floor, count=count)
    assert made == theirs
    assert ours("wsd", run, decay_steps=fall, count=count) == multipliers(make, rise, fall, total, count=count)


def test_wsd_by_hand() -> None:
    theirs = multipliers(optimization.get_wsd_schedule, 3, 4, None, 5, decay_type="1-sqrt", count=20)
    assert [wsd(3, 5, 4, curve=one_minus_sqrt)(step) for step in range(20)] == theirs
    theirs = multipliers(optimization.get_wsd_schedule, 3, 4, None, 5, decay_type="linear", count=20)
    assert [wsd(3, 5, 4, curve=linear)(step) for step in range(20)] == theirs


def test_a_warmup_fraction_rounds_up_as_theirs() -> None:
    for total in (10, 33, 100, 999):
        count = math.ceil(0.1 * total)
        assert named("constant", total_steps=total, warmup_steps=0.1)(count) == 1.0
        assert named("constant", total_steps=total, warmup_steps=0.1)(count - 1) < 1.0


def test_their_scheduler_as_our_schedule() -> None:
    made = from_torch(lambda optimizer: optimization.get_linear_schedule_with_warmup(optimizer, 3, 20), lr=LR)
    assert [made(step) for step in range(25)] == pytest.approx(ours("linear", (3, 20), count=25), abs=1e-12)
