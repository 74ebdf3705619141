"""Who owns the learning rate, and where the schedule stands."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.loops import batches, squared
from torch import nn

import steadystep


def test_without_a_schedule_the_users_value_is_read_and_left_alone() -> None:
    model = nn.Linear(6, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard = steadystep.Guard(model, optimizer)
    x = batches(1)[0]
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    seen = []
    for _ in range(4):
        seen.append(guard.step(lambda: squared(model, x)).signals.lr)
        scheduler.step()
    assert seen == [0.1, 0.05, 0.025, 0.0125]
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.00625)


@given(st.lists(st.booleans(), max_size=20))
def test_the_schedule_stands_at_the_number_of_updates(good: list[bool]) -> None:
    model = nn.Linear(6, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    guard = steadystep.Guard(
        model, optimizer, schedule=lambda n: 1.0 / (n + 1), config={"recovery": {"max_skips_in_a_row": 99}}
    )
    x = batches(1)[0]
    updates = 0
    for fine in good:
        outcome = guard.step(lambda fine=fine: squared(model, x) * (1.0 if fine else math.nan))
        assert outcome.signals.lr == 0.5 / (updates + 1)
        updates += fine
    assert guard.updates == updates


def test_groups_keep_their_own_base_also_those_added_later() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 1), nn.Linear(1, 1))
    optimizer = torch.optim.SGD(
        [{"params": model[0].parameters(), "lr": 0.1}, {"params": model[1].parameters()}], lr=1.0
    )
    guard = steadystep.Guard(model, optimizer, schedule=lambda n: 0.5)
    x = batches(1)[0]
    guard.step(lambda: squared(model, x))
    optimizer.add_param_group({"params": model[2].parameters(), "lr": 8.0})
    model.zero_grad()
    guard.step(lambda: squared(model, x))
    assert [group["lr"] for group in optimizer.param_groups] == [0.05, 0.5, 4.0]


def test_a_learning_rate_in_a_tensor_is_filled_not_replaced() -> None:
    model = nn.Linear(6, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=torch.tensor(0.5))
    held = optimizer.param_groups[0]["lr"]
    steadystep.Guard(model, optimizer, config={"training": {"learning_rate": 0.25}})
    assert optimizer.param_groups[0]["lr"] is held
    assert held.item() == 0.25
