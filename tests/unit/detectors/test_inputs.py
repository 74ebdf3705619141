"""Batches of another scale, batches that repeat, learning rates out of bounds: where exactly."""

import math
from collections.abc import Callable

import pytest

from steadystep.detectors.inputs import InputScale, LearningRateBounds, SameBatch
from steadystep.errors import ConfigError
from steadystep.records import Finding
from tests.unit.detectors.feeding import fed, rows, said


def batches(*sizes: float | None) -> list[Finding]:
    return fed(InputScale, rows(batch_rms=list(sizes)))


class TestInputScale:
    @pytest.mark.parametrize(("size", "told"), [(2000.0, False), (2001.0, True), (math.inf, True)])
    def test_a_thousand_times_the_largest(self, size: float, told: bool) -> None:
        found = batches(*[1.0] * 20, 2.0, *[1.0] * 20, size)
        assert bool(found) == told
        for finding in found:
            assert (finding.step, finding.severity, finding.value) == (41, "act", size)
            assert (finding.limit, finding.baseline) == (2000.0, 2.0)

    @pytest.mark.parametrize(("before", "told"), [(31, False), (32, True)])
    def test_after_32_batches(self, before: int, told: bool) -> None:
        assert bool(batches(*[1.0] * before, 1e4)) == told
        assert bool(batches(*[None, 0.0, math.nan] * 40, *[1.0] * before, 1e4)) == told

    def test_three_in_a_row_and_then_it_is_the_scale(self) -> None:
        assert said(batches(*[1.0] * 32, *[1e4] * 6)) == [(32, "act"), (33, "act"), (34, "act")]
        assert len(batches(*[1.0] * 32, *[1e4, 1e4, 1.0] * 3)) == 6
        assert [f.baseline for f in batches(*[1.0] * 32, *[1e4] * 5, 1e8)][-1] == 1e4

    def test_what_is_infinite_is_not_learned(self) -> None:
        assert batches(math.inf, *[1.0] * 40, 1e4) != []
        assert batches(*[1.0] * 32, *[math.inf] * 4, 1e4) != []


def same(*sizes: float | None) -> list[Finding]:
    return fed(SameBatch, rows(batch_rms=list(sizes)))


DISTINCT = [1.0 + 0.01 * i for i in range(64)]


class TestSameBatch:
    def test_the_fourth_in_a_row(self) -> None:
        (found,) = same(*DISTINCT, *[9.0] * 8)
        assert (found.step, found.severity, found.value, found.limit, found.since) == (67, "warn", 4.0, 3.0, 64)
        assert same(*DISTINCT, *[9.0] * 3, 1.0) == []

    @pytest.mark.parametrize(("before", "told"), [(62, False), (63, True)])
    def test_64_different_ones_come_first(self, before: int, told: bool) -> None:
        assert bool(same(*DISTINCT[:before], *[9.0] * 4)) == told

    def test_after_a_repetition_it_counts_anew(self) -> None:
        later = [20.0 + 0.01 * i for i in range(64)]
        warned = [(67, "warn"), (68, "act")]
        assert said(same(*DISTINCT, *[9.0] * 4, *later[:63], *[9.0] * 4)) == warned
        assert said(same(*DISTINCT, *[9.0] * 4, *later[:64], *[9.0] * 4)) == [*warned, (135, "warn")]
        assert same(*DISTINCT[:40], DISTINCT[39], *DISTINCT[40:], *[9.0] * 4) == []

    def test_its_end_is_told_with_the_steps_it_lasted(self) -> None:
        over = same(*DISTINCT, *[9.0] * 20, 1.0, 2.0)[-1]
        assert (over.step, over.severity, over.value, over.since) == (84, "act", 20.0, 64)
        assert same(*DISTINCT[:40], *[9.0] * 20, 1.0) == []  # it had not shown that batches differ

    def test_batches_that_were_not_given_or_not_finite_do_not_count(self) -> None:
        assert said(same(*DISTINCT, 9.0, None, 9.0, math.nan, 9.0, math.inf, 9.0)) == [(70, "warn")]


def bounds(low: float | None, high: float | None, *rates: float) -> list[Finding]:
    make: Callable[[], LearningRateBounds] = lambda: LearningRateBounds(low, high)  # noqa: E731
    return fed(make, rows(lr=list(rates)))


class TestLearningRateBounds:
    def test_bounds_that_leave_room(self) -> None:
        for low, high in ((2.0, 1.0), (-1.0, None), (None, -1.0), (math.nan, None)):
            with pytest.raises(ConfigError):
                LearningRateBounds(low, high)
        LearningRateBounds(0.0, 0.0)
        LearningRateBounds(1.0, 1.0)

    def test_above_once(self) -> None:
        found = bounds(None, 1.0, 0.5, 1.0, 1.5, 0.5, 2.0)
        assert [(f.step, f.severity, f.value, f.limit) for f in found] == [(2, "warn", 1.5, 1.0)]
        assert len(bounds(None, 1.0, 5.0)) == 1
        assert len(bounds(0.1, 1.0, 0.5, 5.0, 0.5, 0.5, 0.01)) == 2

    @pytest.mark.parametrize(
        ("rates", "told"),
        [
            ((1.0, 1.0, 0.05), True),
            ((1.0, 0.05), True),
            ((0.16, 0.16, 0.08), True),  # to half
            ((0.16, 0.16, 0.0801), False),
            ((0.16, 0.16, 0.1), False),  # at the bound
            ((0.05, 0.01), False),  # it was below before
            ((0.1, 0.04), True),
            ((0.05,), False),
            ((1.0, 0.6, 0.04), False),  # a line on its way down
            ((1.0, 0.75, 0.25, 0.0), False),
            ((1.0, 0.75, 0.05), True),  # more than twice as steep as before
            ((0.5, 0.4, 0.05), True),
            ((1.0, 0.5, 0.5, 0.05), True),
            ((1.0, math.nan, 0.05), True),
        ],
    )
    def test_below_where_no_plan_leads_there(self, rates: tuple[float, ...], told: bool) -> None:
        found = bounds(0.1, None, *rates)
        assert [(f.step, f.value, f.limit) for f in found] == ([(len(rates) - 1, rates[-1], 0.1)] if told else [])

    def test_twice_as_steep_as_before_is_still_a_plan(self) -> None:
        assert bounds(0.1, None, 1.0, 0.75, 0.25, 0.0) == []
        assert bounds(0.25, None, 1.0, 0.75, 0.25, 0.0) == []
        assert bounds(0.3, None, 1.0, 0.75, 0.25) == []
        assert bounds(0.3, None, 1.0, 0.75, 0.24) != []

    @pytest.mark.parametrize(("steps", "told"), [(99, False), (100, True), (150, True)])
    def test_a_run_that_never_left_the_floor(self, steps: int, told: bool) -> None:
        found = bounds(0.1, None, *[0.05] * steps)
        assert said(found) == ([(99, "warn")] if told else [])
        assert bounds(0.1, None, *[0.1] * 150) == []
        assert bounds(0.1, None, *[0.04] * 10, *[0.05] * 150) == []  # it moved

    def test_below_is_told_once(self) -> None:
        assert len(bounds(0.1, None, 1.0, 0.01, 1.0, 1.0, 0.01)) == 1
        assert len(bounds(0.1, None, *[0.05] * 100, 1.0, 1.0, 0.01)) == 1
