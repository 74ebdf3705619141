"""Learning rates that leap, creep, or rise by plan: where exactly."""

import math
from typing import Any

import pytest

from steadystep.detectors import LearningRateCreep, LearningRateJump
from steadystep.detectors.learning_rate_jump import PlannedRise
from steadystep.records import Finding
from tests.unit.detectors.feeding import fed, rows


def jumps(*rates: float, **more: Any) -> list[Finding]:
    return fed(LearningRateJump, rows(lr=list(rates), **more))


DECAYED = [1.0] * 40 + [1e-3] * 100


class TestJump:
    @pytest.mark.parametrize(("before", "rate", "told"), [(32, 10.0, False), (32, 10.1, True), (31, 99.0, False)])
    def test_ten_times_the_recent_rate_after_32_steps(self, before: int, rate: float, told: bool) -> None:
        found = jumps(*[1.0] * before, rate, rate)
        assert [(f.step, f.severity, f.value, f.limit, f.baseline) for f in found] == (
            [(32, "act", rate, 10.0, 1.0)] if told else []
        )

    def test_steps_without_a_rate_do_not_count(self) -> None:
        assert jumps(*[0.0, math.nan, math.inf, -1.0] * 10, *[1.0] * 31, 99.0) == []
        assert jumps(*[0.0] * 40, *[1.0] * 32, math.inf, 99.0) != []

    @pytest.mark.parametrize(("rate", "told"), [(0.8, False), (0.79, True), (1.1, False), (1.11, True), (0.5, True)])
    def test_a_return_to_the_largest_is_a_restart(self, rate: float, told: bool) -> None:
        assert bool(jumps(*DECAYED, rate)) == told
        assert bool(jumps(*[4.0 * before for before in DECAYED], 4.0 * rate)) == told  # whatever the scale

    @pytest.mark.parametrize(("rate", "told"), [(0.099, False), (0.1, True)])
    def test_less_than_a_tenth_of_the_largest_is_harmless(self, rate: float, told: bool) -> None:
        assert bool(jumps(*DECAYED, rate)) == told

    @pytest.mark.parametrize(("restart", "rate", "told"), [(0.9, 0.9, False), (0.9, 0.99, False), (0.09, 0.5, True)])
    def test_where_a_restart_led_before_is_known(self, restart: float, rate: float, told: bool) -> None:
        assert bool(jumps(*DECAYED, restart, *[1e-3] * 100, rate)) == told

    def test_less_than_where_a_restart_led_is_known_too(self) -> None:
        assert jumps(*DECAYED, 0.9, *[1e-3] * 100, 0.5) == []
        assert jumps(*DECAYED, 0.09, *[1e-4] * 100, 0.0991) == []  # harmless
        assert jumps(*DECAYED, *[1e-3] * 100, 0.5) != []

    @pytest.mark.parametrize(("steps", "told"), [(63, False), (64, True)])
    def test_recent_is_one_to_two_windows_of_32(self, steps: int, told: bool) -> None:
        assert bool(jumps(*[1.0] * 32, *[0.01] * steps, 0.5)) == told

    def test_the_largest_of_a_window_counts(self) -> None:
        assert jumps(*[0.01] * 40, 0.1, *[0.01] * 10, 0.9) == []
        assert jumps(*[0.01] * 40, 0.05, *[0.01] * 10, 0.9) != []

    @pytest.mark.parametrize(("announced", "told"), [(50.0, False), (49.0, True)])
    def test_what_was_announced_is_a_plan(self, announced: float, told: bool) -> None:
        assert bool(jumps(*[1.0] * 40, 50.0, announced_lr=announced)) == told

    def test_a_leap_beyond_a_leap(self) -> None:
        found = jumps(*[1.0] * 40, 50.0, 500.0, 501.0, 501.0)
        assert [(f.step, f.value, f.limit, f.baseline) for f in found] == [
            (40, 50.0, 10.0, 1.0),
            (42, 501.0, 500.0, 1.0),
        ]

    def test_one_that_is_withdrawn_is_told_again_three_times(self) -> None:
        assert [f.step for f in jumps(*[1.0] * 40, *[50.0, 50.0, 1.0] * 5)] == [40, 43, 46]
        assert [f.step for f in jumps(*[1.0] * 40, *[50.0, 10.0, 1.0] * 5)] == [40]  # ten times is in use then
        assert [f.step for f in jumps(*[1.0] * 40, *[50.0, 11.0, 9.0] * 2)] == [40]

    @pytest.mark.parametrize(("lasted", "told"), [(999, True), (1000, False)])
    def test_one_that_lasts_a_thousand_steps_is_a_rate_like_any_other(self, lasted: int, told: bool) -> None:
        """Then a return to it is a restart."""
        stream = rows(lr=[*[1.0] * 40, *[50.0] * (1 + lasted), *[1.0] * 100, 45.0])
        detector = LearningRateJump()
        steps = [f.step for signals in stream for f in detector.update(signals)]
        assert steps == [40, *([141 + lasted] if told else [])]


def creeps(*rates: float, **more: Any) -> list[Finding]:
    return fed(LearningRateCreep, rows(lr=list(rates), **more))


CLIMB = (1.5, 2.25, 3.0, 3.1, 4.0)


class TestCreep:
    def test_three_times_the_largest_before_the_climb(self) -> None:
        found = creeps(*[1.0] * 65, *CLIMB)
        assert [(f.step, f.severity, f.value, f.limit, f.baseline, f.since) for f in found] == [
            (68, "act", 3.1, 3.0, 1.0, 65)
        ]

    @pytest.mark.parametrize(("rested", "told"), [(64, False), (65, True)])
    def test_it_comes_from_rest(self, rested: int, told: bool) -> None:
        assert bool(creeps(*[1.0] * rested, *CLIMB)) == told

    def test_it_may_pause_on_its_way(self) -> None:
        found = creeps(*[1.0] * 65, 1.5, 1.5, 1.5, 2.0, 2.9, math.nan, 0.0, 3.1)
        assert [(f.step, f.since) for f in found] == [(72, 65)]
        assert [f.since for f in creeps(*[1.0] * 65, *[1.5] * 65, 2.0, 2.9, 4.3, 5.0)] == [130]

    @pytest.mark.parametrize("rates", [(1.51, 2.2, 3.1), (1.4, 2.2, 3.31, 4.0), (1.4, 1.3, 1.9, 2.8, 3.5)])
    def test_one_large_rise_or_a_fall_ends_it(self, rates: tuple[float, ...]) -> None:
        assert creeps(*[1.0] * 65, *rates) == []

    @pytest.mark.parametrize(("announced", "told"), [(0.9, True), (1.5, False)])
    def test_torch_schedulers_announce_where_they_go(self, announced: float, told: bool) -> None:
        assert bool(creeps(*[1.0] * 65, *CLIMB, announced_lr=announced)) == told

    def test_a_slow_decay_is_rest_and_a_sudden_fall_is_none(self) -> None:
        decay = [1.0 * 0.99**i for i in range(70)]
        low = decay[-1]
        climb = [low * 1.4**i for i in range(1, 8)]
        found = creeps(*decay, *climb)
        assert [f.baseline for f in found] == [1.0]
        assert creeps(*decay, 0.5 * low, *[0.5 * low] * 5, *climb) == []
        assert creeps(*decay, 0.51 * low, *[0.51 * low * 1.4**i for i in range(1, 9)]) != []

    def test_once_for_each_climb(self) -> None:
        assert [f.step for f in creeps(*[1.0] * 65, *CLIMB, *[4.0] * 64, 6.0, 9.0, 12.0, 12.1)] == [68, 137]


def planned(*rates: float, announced: float = 0.0) -> list[int]:
    """The positions at which a planned rise was seen; once more with a state that is handed on."""
    rise, other, found = PlannedRise(), PlannedRise(), []
    for i, rate in enumerate(rates):
        now = rise.update(rate, announced)
        other.load_state_dict(rise.state_dict())
        assert other.state_dict() == rise.state_dict()
        assert other.climbing == rise.climbing
        rise, other = other, rise
        if now:
            found.append(i)
    return found


class TestPlannedRise:
    @pytest.mark.parametrize(
        ("rates", "at"),
        [
            ((1.0, 0.1, 0.15, 0.16), [3]),  # 1.5 times the low
            ((1.0, 0.5, 1.0), [2]),
            ((1.0, 0.5, 1.001), [2]),
            ((1.0, 0.5, 1.01), []),  # beyond what was known
            ((1.0, 0.1, 0.9, 1.0), [2]),  # once
            ((1.0, 0.1, 0.5, 0.9), [2, 3]),
            ((1.0, 0.1, 2.0, 0.09, 1.9), [4]),
            ((0.1, 0.2, 0.4), []),  # a warm-up
            ((1.0, 0.1, math.nan, math.inf, 0.9), [4]),
            ((1.0, 0.1, 0.1, 0.9), [3]),
        ],
    )
    def test_a_rise_from_a_low_to_what_was_known(self, rates: tuple[float, ...], at: list[int]) -> None:
        assert planned(*rates) == at

    def test_what_was_announced_is_known(self) -> None:
        assert planned(0.1, 0.2, 0.4, announced=0.4) == [1, 2]
        assert planned(0.1, 0.2, 0.4, announced=0.3) == [1]

    def climbs(self, *rates: float, announced: float = 0.0) -> bool:
        rise = PlannedRise()
        for rate in rates:
            rise.update(rate, announced)
        return rise.climbing

    @pytest.mark.parametrize(
        ("rates", "told"),
        [
            ((*[1.0] * 65, 1.2, 1.4, 1.5), False),
            ((*[1.0] * 65, 1.2, 1.4, 1.51), True),
            ((*[1.0] * 64, 1.2, 1.4, 1.51), False),  # it did not come from rest
            ((*[1.0] * 65, 1.2, *[1.6] * 101), True),
            ((*[1.0] * 65, 1.2, *[1.6] * 102), False),  # over for a hundred steps
            ((*[1.0] * 65, 2.5, 3.0), False),  # up to 2.5 times at once is a decision
            ((*[1.0] * 65, 2.51), True),
            ((*[1.0] * 65, 1.5, 2.0), True),  # and so is none of less than 1.5
            ((*[1.0] * 65, 1.6, 2.0), False),
            ((*[1.0] * 65, 1.6, 2.5), True),
            ((*[1.0] * 65, 1.2, 0.6, 1.0, 1.7), False),  # after a sudden fall it is a warm-up
            ((*[1.0] * 65, 1.2, 0.61, 1.0, 1.7), True),
            ((*[0.0] * 65, 1.0, 2.0), False),
            ((*[1.0 - 0.001 * i for i in range(70)], 1.2, 1.51), True),  # a slow decay is rest
        ],
    )
    def test_an_unannounced_climb_from_rest(self, rates: tuple[float, ...], told: bool) -> None:
        assert self.climbs(*rates) == told

    def test_an_announced_climb_is_none(self) -> None:
        rates = (*[1.0] * 65, 1.2, 1.6)
        assert self.climbs(*rates, announced=1.0)
        assert not self.climbs(*rates, announced=1.1)
