"""Promise 9: position = updates in the weights; recovery lowers the learning rate for a while and never moves it."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import steadystep
from steadystep.schedule.learning_rate_cut import Ceiling
from tests.loops import batches, small_net, squared

pytestmark = pytest.mark.core


def break_weights(model: nn.Module) -> None:
    with torch.no_grad():
        model[6].weight.fill_(math.inf)


@pytest.mark.parametrize("trouble", ["nan", "x1e3"])
def test_one_bad_batch_never_changes_the_learning_rate(trouble: str) -> None:
    model = small_net(dropout=0.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    guard = steadystep.Guard(model, optimizer)
    factor = {"nan": math.nan, "x1e3": 1e6}[trouble]
    for i, x in enumerate(batches(60)):
        outcome = guard.step(lambda x=x, i=i: squared(model, x) * (factor if i == 40 else 1.0))
        assert outcome.lr_mult == 1.0
        assert optimizer.param_groups[0]["lr"] == 1e-2
        assert outcome.stepped == (i != 40)


def run_with_a_rollback(schedule: bool) -> list[tuple[float, float, int]]:
    """Asked for, used, position; for every update."""
    model = small_net(dropout=0.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    config = {"recovery": {"trust_steps": 4, "rewarm_steps": 10}}
    guard = steadystep.Guard(model, optimizer, config=config, schedule=(lambda n: 1.0 / (1 + n)) if schedule else None)
    seen = []
    for i, x in enumerate(batches(400)):
        if i == 60:
            break_weights(model)
        before = guard.updates
        outcome = guard.step(lambda x=x: squared(model, x))
        if schedule:
            assert outcome.signals.lr == pytest.approx(1e-2 / (1 + before))
        else:
            assert optimizer.param_groups[0]["lr"] == 1e-2  # what the user set is what the user sees
        seen.append((outcome.signals.lr, outcome.signals.lr * outcome.lr_mult, guard.updates))
    return seen


def test_damage_that_no_update_did_leaves_the_rate_alone() -> None:
    """What updates did is cut for: test_recovery_guard.py, and how it is given back: test_ceiling.py."""
    seen = run_with_a_rollback(schedule=False)
    assert any(seen[i][2] < seen[i - 1][2] for i in range(1, len(seen)))  # it was rolled back
    assert {lr for _, lr, _ in seen} == {1e-2}


def test_the_schedule_goes_back_with_the_weights() -> None:
    positions = [updates for _, _, updates in run_with_a_rollback(schedule=True)]
    falls = [i for i in range(1, len(positions)) if positions[i] < positions[i - 1]]
    assert len(falls) == 1


@given(
    events=st.lists(st.sampled_from(["update", "update", "update", "cut", "rewarm"]), max_size=400),
    asked=st.floats(1e-6, 10.0),
)
def test_a_ceiling_never_raises_and_ends_by_itself(events: list[str], asked: float) -> None:
    ceiling = Ceiling()
    for event in events:
        if event == "cut":
            ceiling.limit(0.7 * asked * ceiling.multiplier(asked))
        elif event == "rewarm":
            ceiling.rewarm(50)
        multiplier = ceiling.multiplier(asked)
        assert 0.0 < multiplier <= 1.0
        if event == "update":
            ceiling.updated(asked)
        twin = Ceiling()
        twin.load_state_dict(ceiling.state_dict())
        assert twin.state_dict() == ceiling.state_dict()
    for _ in range(6000):
        ceiling.updated(asked * 1e-9)  # the schedule has decayed far below it
    assert not ceiling.low
    assert ceiling.multiplier(asked) == 1.0


def test_a_leap_of_the_learning_rate_is_held_until_it_is_withdrawn() -> None:
    model = small_net(dropout=0.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    guard = steadystep.Guard(model, optimizer)
    for i, x in enumerate(batches(140)):
        asked = 0.3 if 60 <= i < 90 else 1e-3
        optimizer.param_groups[0]["lr"] = asked
        outcome = guard.step(lambda x=x: squared(model, x))
        assert optimizer.param_groups[0]["lr"] == asked
        assert asked * outcome.lr_mult == pytest.approx(1e-3)
        assert outcome.stepped
        assert outcome.plan.actions == (("hold-lr",) if i == 60 else ())


@pytest.mark.parametrize("mode", ["careful", "observe"])
def test_careful_and_observe_leave_the_learning_rate_alone(mode: str) -> None:
    model = small_net(dropout=0.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    guard = steadystep.Guard(model, optimizer, config={"mode": mode})
    found = []
    for i, x in enumerate(batches(60)):
        optimizer.param_groups[0]["lr"] = 5e-3 if i >= 50 else 1e-4
        outcome = guard.step(lambda x=x: squared(model, x))
        assert outcome.lr_mult == 1.0
        assert outcome.plan.proceeds
        found += outcome.findings
    assert [f.detector for f in found] == ["learning-rate-jump"]
    assert not guard._recovery.states
