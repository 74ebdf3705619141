"""Schedules: equal to their slow twins, bounded, pure, monotone where they should be, and joined without a jump."""

import math
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steadystep import ConfigError, schedule
from tests.reference import schedules as twin

steps = st.integers(0, 400)
lengths = st.integers(1, 200)
shares = st.floats(0.0, 1.0)
gammas = st.floats(0.01, 1.0)
powers = st.floats(0.1, 8.0)


def close(value: float) -> object:
    return pytest.approx(value, rel=1e-12, abs=1e-12)


@given(steps, lengths, shares)
def test_the_curves_of_a_length_are_their_twins(step: int, total: int, floor: float) -> None:
    assert schedule.linear(total, floor)(step) == close(twin.linear(step, total, floor))
    assert schedule.cosine(total, floor)(step) == close(twin.cosine(step, total, floor))
    assert schedule.one_minus_sqrt(total, floor)(step) == close(twin.one_minus_sqrt(step, total, floor))
    assert schedule.inverse_sqrt(total, floor)(step) == close(twin.inverse_sqrt(step, total, floor))


@given(steps, lengths, powers, shares)
def test_polynomial_is_its_twin(step: int, total: int, power: float, floor: float) -> None:
    assert schedule.polynomial(total, power, floor)(step) == close(twin.polynomial(step, total, power, floor))


@given(steps, st.integers(1, 40), gammas, shares)
def test_step_and_exponential_are_their_twins(step: int, every: int, gamma: float, floor: float) -> None:
    assert schedule.step_decay(every, gamma, floor)(step) == close(twin.step_decay(step, every, gamma, floor))
    assert schedule.exponential(gamma, floor)(step) == close(twin.exponential(step, gamma, floor))


@given(steps, st.integers(1, 40), st.integers(1, 4), shares)
def test_restarts_are_their_twin(step: int, period: int, mult: int, floor: float) -> None:
    assert schedule.cosine_restarts(period, mult, floor)(step) == close(twin.restarts(step, period, mult, floor))


@given(steps, st.integers(0, 50), shares)
def test_warmup_is_its_twin(step: int, length: int, start: float) -> None:
    assert schedule.warmup(length, start)(step) == close(twin.after_warmup(step, length, start, lambda _: 1.0))


@given(steps, st.integers(0, 50), st.integers(0, 50), lengths, shares, shares)
def test_wsd_is_its_three_parts(step: int, rise: int, flat: int, fall: int, floor: float, start: float) -> None:
    def stay_then_fall(passed: int) -> float:
        return 1.0 if passed < flat else twin.linear(passed - flat, fall, floor)

    made = schedule.wsd(rise, flat, fall, floor, start=start, curve=schedule.linear)
    assert made(step) == close(twin.after_warmup(step, rise, start, stay_then_fall))


FALLING = {
    "linear": schedule.linear,
    "cosine": schedule.cosine,
    "one_minus_sqrt": schedule.one_minus_sqrt,
    "inverse_sqrt": schedule.inverse_sqrt,
    "polynomial": lambda total, floor: schedule.polynomial(total, 1.7, floor),
    "step_decay": lambda total, floor: schedule.step_decay(total, 0.3, floor),
    "exponential": lambda total, floor: schedule.exponential(1 - 1 / (total + 1), floor),
}


@pytest.mark.parametrize("name", FALLING)
@given(total=lengths, floor=shares, at=st.lists(st.integers(-5, 10**9), min_size=2, max_size=20))
def test_a_decay_starts_at_one_never_rises_and_never_leaves_its_bounds(name, total, floor, at) -> None:
    made = FALLING[name](total, floor)
    values = [made(step) for step in sorted(at)]
    assert made(0) == made(-3) == 1.0
    assert all(floor <= value <= 1.0 for value in values)
    assert values == sorted(values, reverse=True)
    assert [made(step) for step in sorted(at, reverse=True)] == values[::-1]  # pure: no order, no memory


@pytest.mark.parametrize("name", ["linear", "cosine", "one_minus_sqrt", "polynomial"])
@given(total=lengths, floor=shares, later=steps)
def test_a_decay_with_an_end_holds_the_floor_exactly(name, total, floor, later) -> None:
    made = FALLING[name](total, floor)
    assert made(total) == made(total + later) == floor


@given(st.integers(1, 200), shares, st.lists(st.integers(-5, 300), min_size=2, max_size=20))
def test_a_warmup_never_falls_and_reaches_one(length: int, start: float, at: list[int]) -> None:
    made = schedule.warmup(length, start)
    values = [made(step) for step in sorted(at)]
    assert values == sorted(values)
    assert all(start <= value <= 1.0 for value in values)
    assert (made(0), made(length), made(length + 9)) == (start, 1.0, 1.0)


@given(st.integers(1, 30), st.integers(1, 3), shares, steps)
def test_restarts_stay_in_their_bounds_and_come_back_to_one(period: int, mult: int, floor: float, step: int) -> None:
    made = schedule.cosine_restarts(period, mult, floor)
    assert floor <= made(step) <= 1.0
    starts = [0, period, period * (1 + mult), period * (1 + mult + mult**2)]
    assert [made(start) for start in starts] == [1.0] * 4


@given(st.integers(0, 50), steps)
def test_then_plays_the_first_before_the_boundary_and_the_second_from_its_own_start(boundary: int, step: int) -> None:
    seen = []
    made = schedule.then(
        lambda s: seen.append(("first", s)) or 0.25, boundary, lambda s: seen.append(("second", s)) or 1.0
    )
    assert made(step) == (0.25 if step < boundary else 1.0)
    assert seen == [("first", step) if step < boundary else ("second", step - boundary)]


@given(st.integers(1, 100), st.integers(1, 100), shares, shares)
def test_a_warmup_and_a_decay_meet_without_a_jump(rise: int, fall: int, start: float, floor: float) -> None:
    made = schedule.then(schedule.warmup(rise, start), rise, schedule.linear(fall, floor))
    jumps = [abs(made(step + 1) - made(step)) for step in range(rise + fall + 5)]
    assert max(jumps) <= max((1 - start) / rise, (1 - floor) / fall) + 1e-12


NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: schedule.warmup(-1), "warmup: steps = -1"),
        (lambda: schedule.warmup(2.5), "steps = 2.5: must be an integer"),
        (lambda: schedule.warmup(100.0), "write 100"),
        (lambda: schedule.warmup(True), "steps = True"),
        (lambda: schedule.warmup(10, start=1e3), "not a learning rate"),
        (lambda: schedule.warmup(10, start=NAN), "start = nan"),
        (lambda: schedule.constant(INF), "value = inf"),
        (lambda: schedule.linear(0), "linear: total = 0"),
        (lambda: schedule.linear(10, -0.1), "floor = -0.1"),
        (lambda: schedule.cosine(NAN), "cosine: total = nan"),
        (lambda: schedule.cosine(10, 1.1), "floor = 1.1"),
        (lambda: schedule.cosine_restarts(0), "period = 0"),
        (lambda: schedule.cosine_restarts(5, mult=0), "mult = 0"),
        (lambda: schedule.inverse_sqrt(0), "timescale = 0"),
        (lambda: schedule.polynomial(5, power=0.0), "power = 0.0: must be a finite number greater than 0"),
        (lambda: schedule.polynomial(5, power=INF), "power = inf"),
        (lambda: schedule.polynomial(5, power="2"), "power = '2'"),
        (lambda: schedule.step_decay(0), "every = 0"),
        (lambda: schedule.step_decay(5, gamma=1.5), "gamma = 1.5: must be at most 1"),
        (lambda: schedule.exponential(0.0), "gamma = 0.0"),
        (lambda: schedule.exponential(NAN), "gamma = nan"),
        (lambda: schedule.wsd(1, -1, 1), "stable_steps = -1"),
        (lambda: schedule.wsd(1, 1, 0), "decay_steps = 0"),
        (lambda: schedule.then(schedule.constant(), -1, schedule.constant()), "boundary = -1"),
    ],
)
def test_numbers_that_mean_nothing(make, says: str) -> None:
    with pytest.raises(ConfigError, match=r"^schedule") as caught:
        make()
    assert says in str(caught.value)


def test_the_pure_functions_import_and_run_without_torch() -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from steadystep import schedule\n"
        "made = schedule.named('cosine', total_steps=10, warmup_steps=2)\n"
        "plateau = schedule.Plateau(patience=0); plateau.update(1.0); plateau.update(2.0)\n"
        "print(made(1), plateau(0))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "0.5 0.1\n"


def test_every_public_name_loads() -> None:
    assert all(getattr(schedule, name) is not None for name in schedule.__all__)
    with pytest.raises(AttributeError, match="no attribute 'cosin'"):
        schedule.cosin  # noqa: B018
