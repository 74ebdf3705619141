"""The ceiling over the learning rate of a run that recovers: how long it holds, how fast it lifts, when it ends."""

import pytest
import torch
from torch import nn

from steadystep.actions import LearningRate
from steadystep.actions.ceiling import Ceiling


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


def test_it_lifts_quickly_to_what_was_in_use_and_slowly_beyond() -> None:
    ceiling = Ceiling()
    ceiling.limit(0.1)
    for _ in range(100):
        ceiling.updated(9.0)
    seen = []
    while ceiling.lr < 0.2:
        before = ceiling.lr
        ceiling.updated(9.0)
        seen.append((before, ceiling.lr / before))
    assert all(growth == pytest.approx(1.02 if before < 0.15 else 1.003) for before, growth in seen)
    assert {round(growth, 3) for _, growth in seen} == {1.02, 1.003}


def test_where_trouble_came_back_it_stays_below() -> None:
    ceiling = Ceiling()
    ceiling.limit(0.1)
    ceiling.limit(0.05)
    for _ in range(4000):
        ceiling.updated(1.0)
    assert ceiling.lr == pytest.approx(0.07)


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
