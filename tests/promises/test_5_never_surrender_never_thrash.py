"""Promise 5: escalation is bounded by budgets; at the end it stops with a clear error and never just accepts."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import steadystep
from steadystep.policy import Budget
from steadystep.policy.budget import _ROLLBACK_WINDOW, _SKIP_WINDOW
from steadystep.records import Outcome, Plan
from tests.loops import batches, full_state, is_finite, small_net, squared

pytestmark = pytest.mark.core


def damage(model: nn.Module) -> None:
    with torch.no_grad():
        model[6].weight.fill_(math.inf)


def test_damage_that_comes_back_ends_in_a_clear_error_with_good_weights() -> None:
    model = small_net(dropout=0.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    config = {"recovery": {"trust_steps": 4}, "training": {"max_recovery_attempts": 2}}
    guard = steadystep.Guard(model, optimizer, config=config)
    rollbacks = []

    def train() -> None:
        for i, x in enumerate(batches(400)):
            if i >= 60 and i % 15 == 0:
                damage(model)
            outcome = guard.step(lambda x=x: squared(model, x))
            rollbacks.extend([i] if outcome.restored is not None else [])

    with pytest.raises(steadystep.TrainingHalted) as halted:
        train()
    assert len(rollbacks) == 2
    assert "rolled back" in halted.value.did
    assert halted.value.try_next
    assert halted.value.what


def test_nothing_but_nan_stops_with_the_last_good_weights() -> None:
    model = small_net(dropout=0.0)
    optimizer = torch.optim.AdamW(model.parameters())
    guard = steadystep.Guard(model, optimizer, config={"recovery": {"max_skips_in_a_row": 7}})
    for x in batches(40):
        guard.step(lambda x=x: squared(model, x))
    x = batches(1)[0] * math.nan
    for _ in range(6):
        guard.step(lambda: squared(model, x))
    with pytest.raises(steadystep.TrainingHalted):
        guard.step(lambda: squared(model, x))
    assert is_finite(full_state(model, optimizer))
    assert guard.updates == 40


def test_every_second_batch_bad_stops_too() -> None:
    model = small_net(dropout=0.0)
    guard = steadystep.Guard(
        model, torch.optim.AdamW(model.parameters()), config={"recovery": {"max_skips": 10, "max_skips_in_a_row": 9}}
    )
    data = batches(20)
    for i, x in enumerate(data[:-1]):
        guard.step(lambda x=x, i=i: squared(model, x) * (math.nan if i % 2 else 1.0))
    with pytest.raises(steadystep.TrainingHalted):
        guard.step(lambda: squared(model, data[-1]) * math.nan)
    assert guard.attempts == 20


def outcome(step: int, kind: str) -> Outcome:
    plan = Plan(actions=("rollback",), to=max(step - 30, 0)) if kind == "rollback" else Plan(actions=("skip-step",))
    return Outcome(
        step=step,
        reading=1.0,
        stepped=kind == "step",
        plan=Plan() if kind == "step" else plan,
        restored=0 if kind == "rollback" else None,
    )


@given(st.lists(st.sampled_from(["step", "step", "skip", "rollback"]), max_size=300), st.integers(1, 5))
def test_a_budget_is_never_overdrawn(kinds: list[str], max_rollbacks: int) -> None:
    """Whoever asks before each refusal stays within the limits, whatever the order."""
    budget = Budget(max_skips_in_a_row=6, max_skips=20, max_rollbacks=max_rollbacks)
    skips, rollbacks = [], []
    for step, kind in enumerate(kinds):
        if kind == "skip" and budget.skips_spent(step):
            break
        if kind == "rollback" and budget.rollbacks_spent(step):
            break
        budget.count(outcome(step, kind))
        (skips if kind == "skip" else rollbacks if kind == "rollback" else []).append(step)
        assert sum(step - s < _SKIP_WINDOW for s in skips) < 20
        assert sum(step - s < _ROLLBACK_WINDOW for s in rollbacks) <= max_rollbacks
        assert skips[-6:] != list(range(step - 5, step + 1))
        again = Budget(max_skips_in_a_row=6, max_skips=20, max_rollbacks=max_rollbacks)
        again.load_state_dict(budget.state_dict())
        assert again.state_dict() == budget.state_dict()
