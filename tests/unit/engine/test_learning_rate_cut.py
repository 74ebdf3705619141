"""The ceiling over the learning rate of a run that recovers: how long it holds, how fast it lifts, when it ends."""

import json
import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from steadystep.engine.learning_rate import LearningRate
from steadystep.schedule.learning_rate_cut import WITHIN, Ceiling


def lifted_after(ceiling: Ceiling, asked: float) -> int:
    """Updates until it is higher than it is now."""
    start, updates = ceiling.lr, 0
    while ceiling.lr == start:
        ceiling.updated(asked)
        updates += 1
    return updates


def test_it_holds_for_100_updates_and_longer_each_time_trouble_comes_back() -> None:
    ceiling = Ceiling()
    ceiling.limit(0.07)
    assert lifted_after(ceiling, 1.0) == 101
    assert ceiling.lr == pytest.approx(0.07 * 1.02)
    for hold in (200, 400, 800, 1600, 1600):
        ceiling.limit(ceiling.lr / 2.0)
        assert lifted_after(ceiling, 1.0) == hold + 1


def test_it_may_be_lifted_sooner_or_later() -> None:
    for hold, held in ((10, 10), (None, 100), (1000, 1000)):
        ceiling = Ceiling()
        ceiling.limit(0.7, hold=hold)
        for _ in range(held):
            ceiling.updated(1.0)
        assert ceiling.lr == 0.7
        ceiling.updated(1.0)
        assert ceiling.lr == pytest.approx(0.7 * 1.02)


def test_it_is_never_raised_by_a_limit() -> None:
    ceiling = Ceiling()
    ceiling.limit(0.07)
    ceiling.limit(0.5)
    assert ceiling.lr == 0.07


def test_a_limit_of_nothing_is_none() -> None:
    """It could never be lifted again."""
    ceiling = Ceiling()
    ceiling.limit(0.0)
    assert not ceiling.low
    assert ceiling.multiplier(0.1) == 1.0


def growths(ceiling: Ceiling, asked: float) -> list[tuple[float, float]]:
    """Each level on its way up, and what it is then multiplied by; until it is gone."""
    seen = []
    while ceiling.lr is not None:
        before = ceiling.lr
        ceiling.updated(asked)
        if ceiling.lr not in (before, None):
            seen.append((before, ceiling.lr / before))
    return seen


def test_it_lifts_quickly_to_what_was_in_use_and_slowly_beyond() -> None:
    ceiling = Ceiling()
    ceiling.limit(0.1)
    seen = growths(ceiling, 1.0)
    assert all(growth == pytest.approx(1.02 if before < 0.15 else 1.003) for before, growth in seen)
    assert {round(growth, 3) for _, growth in seen} == {1.02, 1.003}


def test_where_trouble_came_back_it_is_slow_from_a_lower_level_on() -> None:
    ceiling = Ceiling()
    ceiling.limit(0.5)
    ceiling.limit(0.3)
    seen = growths(ceiling, 1.0)
    assert all(growth == pytest.approx(1.02 if before < 0.35 else 1.003) for before, growth in seen)  # and not 0.45
    assert {round(growth, 3) for _, growth in seen} == {1.02, 1.003}


@pytest.mark.parametrize(("cuts", "updates"), [([0.7], 119), ([0.5], 214), ([0.7, 0.35], 456)])
def test_how_long_it_takes(cuts: list[float], updates: int) -> None:
    ceiling = Ceiling()
    for lr in cuts:
        ceiling.limit(lr)
    taken = 0
    while ceiling.low:
        ceiling.updated(1.0)
        taken += 1
    assert taken == updates


def test_a_rate_a_thousand_times_too_high_is_reached_smoothly_in_800_updates_after_the_hold() -> None:
    ceiling = Ceiling()
    ceiling.limit(1e-3, hold=500)
    used = []
    while ceiling.low:
        used.append(ceiling.multiplier(1.0))
        ceiling.updated(1.0)
    assert len(used) == 1300
    assert max(after / before for before, after in pairwise(used)) <= 1.02 * (1 + 1e-9)
    assert used[-1] == pytest.approx(1.0, rel=0.02)


def test_cuts_that_follow_each_other_do_not_lead_to_nothing() -> None:
    ceiling = Ceiling()
    ceiling.updated(1e-3)
    for _ in range(30):
        ceiling.limit(0.5 * 1e-3 * ceiling.multiplier(1e-3))
        ceiling.rewarm(50)
        assert ceiling.lr >= 0.9e-3 * 0.005
    ceiling = Ceiling()
    ceiling.updated(1e-3)
    ceiling.limit(1e-9)
    assert ceiling.lr == pytest.approx(1e-5)


def test_under_a_held_leap_there_is_still_room_for_a_cut() -> None:
    ceiling = Ceiling()
    ceiling.updated(1e-3)
    ceiling.limit(1e-3, hold=500)
    ceiling.updated(10.0)  # what is asked for now says nothing about what is too low
    ceiling.limit(0.7e-3)
    assert ceiling.lr == pytest.approx(0.7e-3)


rates = st.floats(1e-12, 1e6)
events = st.lists(
    st.one_of(
        st.tuples(st.just("limit"), st.one_of(rates, st.just(0.0)), st.sampled_from([None, 0, 10, 500, 10**6])),
        st.tuples(st.just("rewarm"), st.integers(0, 200)),
        st.tuples(st.just("updated"), st.one_of(rates, st.just(0.0)), st.integers(1, 2000)),
        st.tuples(st.just("resume")),
    ),
    max_size=12,
)


def after(events: list[tuple]) -> Ceiling:
    ceiling = Ceiling()
    for kind, *what in events:
        match kind:
            case "limit":
                ceiling.limit(what[0], hold=what[1])
            case "rewarm":
                ceiling.rewarm(what[0])
            case "updated":
                for _ in range(what[1]):
                    ceiling.updated(what[0])
            case "resume":
                state = json.loads(json.dumps(ceiling.state_dict(), allow_nan=False))
                ceiling = Ceiling()
                ceiling.load_state_dict(state)
    return ceiling


@given(events, rates)
def test_from_anywhere_what_is_asked_for_is_in_use_again_after_2400_healthy_updates(
    events: list[tuple], asked: float
) -> None:
    ceiling = after(events)
    multipliers = []
    for _ in range(WITHIN):
        multipliers.append(ceiling.multiplier(asked))
        ceiling.updated(asked)
    assert WITHIN == 2400
    assert ceiling.multiplier(asked) == 1.0
    assert not ceiling.low
    assert multipliers == sorted(multipliers)  # and there is no way back down
    assert all(0.0 < multiplier <= 1.0 for multiplier in multipliers)


def test_a_learning_rate_that_is_no_number_ends_it() -> None:
    for asked in (math.nan, math.inf):
        ceiling = Ceiling()
        ceiling.limit(0.1, hold=0)
        for _ in range(25):
            ceiling.updated(asked)
        assert not ceiling.low


def test_it_ends_when_nothing_above_it_is_asked_for() -> None:
    ceiling = Ceiling()
    ceiling.limit(0.1)
    for _ in range(101):
        assert ceiling.low
        ceiling.updated(0.05)
    assert not ceiling.low
    ceiling.limit(0.07)
    assert lifted_after(ceiling, 1.0) == 101  # and the next one begins from the start


def test_a_rewarm_rises_in_a_line_and_counts_updates() -> None:
    ceiling = Ceiling()
    ceiling.rewarm(3)
    seen = []
    for _ in range(5):
        seen.append(ceiling.multiplier(1.0))
        ceiling.updated(1.0)
    assert seen == pytest.approx([0.1, 0.4, 0.7, 1.0, 1.0])
    assert not ceiling.low


def test_both_multiply() -> None:
    ceiling = Ceiling()
    ceiling.limit(0.05)
    ceiling.rewarm(2)
    assert ceiling.multiplier(0.1) == pytest.approx(0.5 * 0.1)
    assert ceiling.multiplier(0.01) == pytest.approx(0.1)


def test_groups_are_lowered_alike_for_one_update_and_get_their_own_back() -> None:
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1), nn.Linear(1, 1))
    shared = torch.tensor(0.2)
    groups = [{"params": part.parameters(), "lr": lr} for part, lr in zip(model, (0.4, shared, shared), strict=True)]
    optimizer = torch.optim.SGD(groups)
    rates = LearningRate(optimizer, start=None, schedule=None)
    assert rates.lower(0.4) == 1.0
    assert rates.ceiling.asked == 0.4
    rates.ceiling.limit(0.1)
    assert rates.lower(0.4) == pytest.approx(0.25)
    assert [float(group["lr"]) for group in optimizer.param_groups] == pytest.approx([0.1, 0.05, 0.05])
    rates.put_back()
    assert [float(group["lr"]) for group in optimizer.param_groups] == pytest.approx([0.4, 0.2, 0.2])
    assert optimizer.param_groups[1]["lr"] is shared
    optimizer.param_groups[0]["lr"] = 0.3
    rates.put_back()
    assert optimizer.param_groups[0]["lr"] == 0.3  # said once


def test_it_is_saved_with_the_learning_rate() -> None:
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
    first, second = (LearningRate(optimizer, start=None, schedule=None) for _ in range(2))
    first.ceiling.limit(0.05)
    first.ceiling.rewarm(7)
    second.load_state_dict(first.state_dict())
    assert second.ceiling.state_dict() == first.ceiling.state_dict()
    assert second.ceiling.low


class TestWhetherItMayBeLow:
    def test_a_limit_that_ends_leaves_a_rewarm_going(self) -> None:
        for left, low in ((2, True), (1, True), (0, False)):
            ceiling = Ceiling()
            ceiling.limit(0.99, hold=3 - left)
            ceiling.rewarm(4)
            for _ in range(4 - left):  # the hold, and the one update that lifts it beyond what is asked for
                assert ceiling.low
                ceiling.updated(1.0)
            assert ceiling.lr is None
            assert ceiling.low is low, left

    def test_a_rewarm_ends_with_its_last_update(self) -> None:
        ceiling = Ceiling()
        ceiling.rewarm(2)
        seen = []
        for _ in range(3):
            seen.append((ceiling.low, round(ceiling.multiplier(1.0), 6)))
            ceiling.updated(1.0)
        assert seen == [(True, 0.1), (True, 0.55), (False, 1.0)]
        ceiling.rewarm(0)
        assert not ceiling.low
        ceiling.limit(0.5)
        ceiling.rewarm(0)
        assert ceiling.low

    def test_what_is_loaded_may_be_low_for_either_reason(self) -> None:
        for limit, rewarm, low in ((0.5, 0, True), (None, 1, True), (0.5, 3, True), (None, 0, False)):
            ceiling, again = Ceiling(), Ceiling()
            ceiling.updated(1.0)
            if limit is not None:
                ceiling.limit(limit)
            ceiling.rewarm(rewarm)
            again.load_state_dict(json.loads(json.dumps(ceiling.state_dict())))
            assert again.low is ceiling.low is low
            assert again.multiplier(1.0) == ceiling.multiplier(1.0)
            assert again.state_dict() == ceiling.state_dict()


def test_a_limit_above_what_is_asked_for_changes_nothing() -> None:
    ceiling = Ceiling()
    ceiling.limit(0.5)
    assert [ceiling.multiplier(asked) for asked in (0.25, 0.5, 1.0)] == [1.0, 1.0, 0.5]
    assert math.isnan(Ceiling().asked) is False


def test_a_longer_hold_than_the_longest_is_that_one() -> None:
    ceiling = Ceiling()
    ceiling.limit(0.5, hold=5000)
    assert lifted_after(ceiling, 1.0) == 1601


def test_a_limit_ends_at_once_when_what_is_asked_for_falls_to_it() -> None:
    ceiling = Ceiling()
    ceiling.limit(0.5, hold=0)
    ceiling.updated(0.51)  # exactly where it is lifted to
    assert ceiling.lr is None
    ceiling.limit(0.5, hold=0)
    ceiling.updated(0.52)
    assert ceiling.lr == pytest.approx(0.51)
