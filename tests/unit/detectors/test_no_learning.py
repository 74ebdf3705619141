"""Losses that stay where they began, or become too good: where exactly."""

import math

import pytest

from steadystep.detectors.no_learning import ConstantPrediction, NoLearning
from steadystep.detectors.vanishing_gradient import SuspiciousPerfection
from steadystep.records import Finding
from tests.unit.detectors.feeding import fed, rows, said


def still(*losses: float, lr: list[float] | float = 0.1) -> list[Finding]:
    return fed(NoLearning, rows(loss=list(losses), lr=lr))


class TestNoLearning:
    def test_once_after_300_losses(self) -> None:
        found = still(*[2.0] * 640)
        assert [(f.step, f.severity, f.value) for f in found] == [(319, "info", 2.0)]
        assert found[0].limit == pytest.approx(1.98)

    @pytest.mark.parametrize(("last", "told"), [(1.99, True), (1.981, True), (1.979, False), (3.0, True)])
    def test_one_percent_of_the_first_level(self, last: float, told: bool) -> None:
        assert bool(still(*[2.0] * 64, *[last] * 256)) == told
        assert bool(still(*[2.0] * 16, *[9.0] * 48, *[last] * 256)) == told  # of the first sixteen

    def test_the_median_of_the_first_sixteen_not_of_more(self) -> None:
        assert still(*[2.0] * 8, *[1.0] * 8, *[1.0] * 48, *[1.0] * 256) == []
        assert still(*[2.0] * 7, *[1.0] * 9, *[2.0] * 48, *[1.0] * 256) != []

    @pytest.mark.parametrize(("gain", "told"), [(0.95, True), (1.05, False)])
    def test_two_sigma_of_the_noise(self, gain: float, told: bool) -> None:
        """A median of n losses scatters by 1.2533 sigma / sqrt(n), and sigma is 1.4826 times the median distance."""
        needed = 2.0 * 1.4826 * 1.2533 * math.sqrt(1 / 16 + 1 / 64) * 0.1
        level = 2.0 - gain * needed
        assert bool(still(*[2.0] * 64, *[level + 0.1 * (-1) ** i for i in range(256)])) == told

    def test_losses_that_are_not_finite_do_not_count(self) -> None:
        assert said(still(*[2.0, math.nan] * 320)) == [(638, "info")]

    @pytest.mark.parametrize("low", [0.0, -1.0])
    def test_a_loss_that_is_not_positive_has_no_level(self, low: float) -> None:
        assert still(*[2.0] * 100, low, *[2.0] * 600) == []

    def test_it_waits_while_the_rate_warms_up(self) -> None:
        rising = [0.1 + 0.001 * i for i in range(400)] + [0.5] * 240
        assert [f.step for f in still(*[2.0] * 640, lr=rising)] == [511]
        broken = [0.1] * 300 + [math.nan] * 100 + [0.1] * 240
        assert [f.step for f in still(*[2.0] * 640, lr=broken)] == [319]

    @pytest.mark.parametrize(("level", "classes"), [(math.log(10), "10 classes"), (math.log(1000), "1000 classes")])
    def test_what_guessing_costs_is_named(self, level: float, classes: str) -> None:
        assert [classes in f.what for f in still(*[level] * 320)] == [True]
        assert ["classes" in f.what for f in still(*[math.log(2000)] * 320)] == [False]
        assert ["classes" in f.what for f in still(*[0.9] * 320)] == [False]


def rests(*parts: tuple[float, int]) -> list[Finding]:
    return fed(ConstantPrediction, rows(loss=[loss for loss, count in parts for _ in range(count)]))


class TestConstantPrediction:
    def test_a_leap_and_three_windows_at_rest(self) -> None:
        found = rests((2.0, 1), (9.0, 10), (2.0, 400))
        assert [(f.step, f.severity, f.value, f.limit, f.baseline) for f in found] == [(191, "warn", 2.0, 1.4, 2.0)]

    @pytest.mark.parametrize(
        ("parts", "told"),
        [
            (((2.0, 1), (3.0, 10), (2.0, 400)), False),  # no leap
            (((2.0, 1), (3.1, 10), (2.0, 400)), True),
            (((2.0, 1), (9.0, 2), (2.0, 400)), False),  # less than three of five
            (((2.0, 1), (9.0, 3), (2.0, 400)), True),
            (((2.0, 61), (9.0, 3), (2.0, 400)), True),
            (((2.0, 62), (9.0, 3), (2.0, 400)), False),  # not in the first 64 steps
            (((2.0, 1), (9.0, 10), (1.39, 400)), False),  # something was learned
            (((2.0, 1), (9.0, 10), (1.41, 400)), True),
            (((2.0, 1), (9.0, 10), (1.5, 53), (1.53, 400)), True),  # at rest later
            (((0.0, 1), (9.0, 10), (2.0, 400)), False),
            (((-1.0, 1), (9.0, 10), (2.0, 400)), False),
            (((2.0, 1), (9.0, 10), (6.0, 400)), False),  # the leap is not over
            (((2.0, 1), (9.0, 10), (5.9, 400)), True),
        ],
    )
    def test_where(self, parts: tuple[tuple[float, int], ...], told: bool) -> None:
        assert bool(rests(*parts)) == told

    @pytest.mark.parametrize(("between", "told"), [(0.019, True), (0.021, False)])
    def test_at_rest_is_one_percent_of_the_first_loss(self, between: float, told: bool) -> None:
        found = rests((2.0, 1), (9.0, 10), (2.0, 53), (2.0 + between, 64), (2.0, 64))
        assert bool(found) == told

    @pytest.mark.parametrize(("moving", "told"), [(4, True), (5, False)])
    def test_after_512_steps_it_is_something_else(self, moving: int, told: bool) -> None:
        levels = [(2.0 + 0.1 * i, 64) for i in range(moving - 1)]
        assert bool(rests((2.0, 1), (9.0, 10), (2.0, 53), *levels, (3.0, 64 * 3), (3.0, 64 * 4))) == told

    def test_losses_that_are_not_finite_do_not_count(self) -> None:
        assert [f.step for f in rests((math.nan, 3), (2.0, 1), (9.0, 10), (math.inf, 2), (2.0, 400))] == [196]


def perfect(*losses: float) -> list[Finding]:
    return fed(SuspiciousPerfection, rows(loss=list(losses)))


class TestSuspiciousPerfection:
    @pytest.mark.parametrize("tiny", [0.0, 1e-12, -1e-12, 1e-15])
    def test_sixteen_in_a_row_once(self, tiny: float) -> None:
        found = perfect(1.0, *[tiny] * 15, 0.5, *[tiny] * 20, 1.0, *[tiny] * 20)
        assert [(f.step, f.severity, f.value, f.limit) for f in found] == [(32, "info", tiny, 1e-12)]

    @pytest.mark.parametrize(
        ("first", "value", "told"), [(1e-3, 1e-13, False), (1.1e-3, 1e-13, True), (0.0, 0.0, True)]
    )
    def test_a_run_that_began_with_something(self, first: float, value: float, told: bool) -> None:
        assert bool(perfect(first, *[value] * 16)) == told

    @pytest.mark.parametrize("value", [1.1e-12, -1.1e-12, -1.0])
    def test_what_is_no_zero(self, value: float) -> None:
        assert perfect(1.0, *[value] * 30) == []
        assert perfect(1.0, *[0.0] * 15, value, *[0.0] * 15) == []

    def test_exact_zeros_count_from_the_first(self) -> None:
        assert said(perfect(*[0.0] * 20)) == [(15, "info")]
        assert said(perfect(*[0.0] * 8, math.nan, math.inf, *[0.0] * 8)) == [(17, "info")]
        assert perfect(math.nan, *[1e-13] * 30) == []
        assert perfect(*[0.0] * 8, 1e-13, *[0.0] * 8) == []
