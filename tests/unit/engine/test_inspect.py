"""Loops that update by themselves: the guard looks and says, the loop does."""

import math

import pytest
import torch
from torch import nn

import steadystep
from tests.loops import assert_same, batches, full_state, small_net, squared


def test_a_loop_by_hand_is_judged_and_stays_bit_identical() -> None:
    model, twin = small_net(), small_net()
    optimizers = [torch.optim.AdamW(m.parameters()) for m in (model, twin)]
    guard = steadystep.Guard(model, optimizers[0])
    for m, optimizer in zip((model, twin), optimizers, strict=True):
        torch.manual_seed(1)
        for x in batches(6):
            loss = squared(m, x)
            loss.backward()
            if m is model:
                assert guard.inspect(loss).proceeds
            optimizer.step()
            optimizer.zero_grad()
            if m is model:
                outcome = guard.commit(stepped=True)
                assert outcome.loss == loss.item()
    assert (guard.attempts, guard.updates) == (6, 6)
    assert_same(full_state(model, optimizers[0]), full_state(twin, optimizers[1]))


def test_a_bad_batch_is_told_before_the_update_and_leaves_no_trace() -> None:
    model = small_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard = steadystep.Guard(model, optimizer)
    x = batches(1)[0]
    guard.step(lambda: squared(model, x))
    before = full_state(model, optimizer)
    loss = squared(model, x * math.nan)
    loss.backward()
    plan = guard.inspect(loss)
    assert plan.actions == ("skip-step",)
    optimizer.zero_grad()
    outcome = guard.commit(stepped=False)
    assert not outcome.stepped
    assert outcome.diagnosis.cause == "non-finite-loss"
    assert_same(before, full_state(model, optimizer))
    assert guard.step(lambda: squared(model, x)).stepped


def test_commit_without_inspect_is_told() -> None:
    model = nn.Linear(6, 1)
    guard = steadystep.Guard(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(steadystep.MisuseError, match="inspect"):
        guard.commit(stepped=True)


def test_refusals_by_hand_count_towards_the_budget() -> None:
    model = nn.Linear(6, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard = steadystep.Guard(model, optimizer, config={"recovery": {"max_skips_in_a_row": 2}})
    for _ in range(2):
        optimizer.zero_grad()
        loss = model(batches(1)[0] * math.nan).mean()
        loss.backward()
        plan = guard.inspect(loss)
        if "stop" in plan.actions:
            with pytest.raises(steadystep.TrainingHalted):
                guard.commit(stepped=False)
        else:
            guard.commit(stepped=False)
    assert guard.attempts == 2


def test_refusals_do_not_count_as_signs_of_damage() -> None:
    """Nothing is run again for a loop of one's own, so a row of them says nothing about the weights."""
    model = nn.Linear(2, 1)
    guard = steadystep.Guard(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(4):
        loss = model(torch.full((4, 2), float("nan"))).mean()
        loss.backward()
        guard.inspect(loss)
        assert guard.commit(stepped=False).signals.refused_in_a_row == 0
