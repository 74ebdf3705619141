"""Promise 4: a state is good only after later steps stayed healthy; a rollback goes before the first sign."""

import copy
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import steadystep
from steadystep.policy import Budget, Limits, decide
from steadystep.records import Damage, Diagnosis, Finding, Signals
from tests.loops import assert_same, batches, full_state, small_net, squared

pytestmark = pytest.mark.core

REPLAY = {"trust_steps": 4, "lr_mult": 1.0, "rewarm_steps": 0, "skip_batches": False}


def break_weights(model: nn.Module) -> None:
    with torch.no_grad():
        next(model.parameters()).mul_(1e30)


def test_detectors_are_armed_within_32_accepted_steps() -> None:
    model = small_net(dropout=0.0)
    guard = steadystep.Guard(model, torch.optim.SGD(model.parameters(), lr=1e-2))
    for x in batches(32):
        assert guard.step(lambda x=x: squared(model, x)).plan.proceeds
    x = batches(1, seed=9)[0]
    outcome = guard.step(lambda: squared(model, x) * 1e6)
    assert not outcome.stepped
    assert outcome.findings[0].detector == "gradient-spike"


class Ema:
    """Averaged weights, as people keep them."""

    def __init__(self, model: nn.Module) -> None:
        self.model = copy.deepcopy(model)

    def update(self, model: nn.Module) -> None:
        with torch.no_grad():
            for mine, theirs in zip(self.model.parameters(), model.parameters(), strict=True):
                mine.lerp_(theirs, 0.1)

    def state_dict(self) -> dict[str, Tensor]:
        return self.model.state_dict()

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.model.load_state_dict(state)


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", ["AdamW", "SGD"])
def test_a_rollback_and_the_same_batches_are_bit_identical_to_no_fault(
    name: str, precision: str, accumulate: int
) -> None:
    data = batches(40 * accumulate)
    config = {
        "training": {
            "mixed_precision": precision,
            "gradient_accumulation_steps": accumulate,
            "lr_scheduler": "plateau",
            "scheduler_options": {"patience": 1, "factor": 0.5},
        },
        "recovery": REPLAY,
    }

    def run(fault_at: int | None) -> tuple[dict[str, Tensor], dict[str, Tensor], list[int]]:
        model = small_net()
        make = {"AdamW": torch.optim.AdamW, "SGD": torch.optim.SGD}[name]
        options = {"momentum": 0.9} if name == "SGD" else {}
        optimizer = make(model.parameters(), lr=1e-2, **options)
        guard = steadystep.Guard(model, optimizer, config=config)
        ema = Ema(model)
        guard.keep("ema", ema)
        torch.manual_seed(5)
        position, went_to = 0, []
        while position < 40:
            if guard.attempts == fault_at:
                break_weights(model)
            for x in data[position * accumulate : (position + 1) * accumulate]:
                outcome = guard.step(lambda x=x: squared(model, x))
            if outcome.restored is not None:
                went_to.append(outcome.plan.to)
                position = outcome.restored
                continue
            position += 1
            if outcome.stepped:
                ema.update(model)
                if guard.updates % 5 == 0:
                    guard.validate(1.0)
        return full_state(model, optimizer), {k: v.clone() for k, v in ema.state_dict().items()}, went_to

    expected, expected_ema, never = run(None)
    got, ema, went_to = run(26)
    assert never == []
    assert len(went_to) == 1
    assert went_to[0] <= 26 - REPLAY["trust_steps"]
    assert_same(expected, got)
    assert_same(expected_ema, ema)


def test_a_rollback_takes_everything_along() -> None:
    model = small_net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    guard = steadystep.Guard(model, optimizer, config={"recovery": {"trust_steps": 4}})
    states: dict[int, dict[str, Tensor]] = {-1: full_state(model, optimizer)}
    detectors = {-1: guard.state_dict()}
    for i, x in enumerate(batches(80)):
        if i == 50:
            break_weights(model)
        outcome = guard.step(lambda x=x: squared(model, x))
        if outcome.restored is not None:
            break
        states[i], detectors[i] = full_state(model, optimizer), guard.state_dict()
    else:
        pytest.fail("no rollback")
    to = outcome.plan.to
    assert to is not None
    assert 0 <= to <= 50 - 4
    assert outcome.diagnosis.damage is Damage.WEIGHTS
    assert_same(states[to], full_state(model, optimizer))
    assert guard.updates == detectors[to]["updates"] == outcome.restored
    for part, saved in detectors[to].items():
        if part.startswith("detector "):
            assert guard.state_dict()[part] == saved, part


def test_bad_data_alone_is_no_reason_to_go_back() -> None:
    """The witness: an old batch that does as well as ever acquits the weights."""
    model = small_net(dropout=0.0)
    guard = steadystep.Guard(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    for x in batches(60):
        guard.step(lambda x=x: squared(model, x))
    updates = guard.updates
    for x in batches(6, seed=3):
        outcome = guard.step(lambda x=x: squared(model, x * math.nan))
        assert outcome.plan.actions == ("skip-step",)
    assert outcome.signals.counterfactual is not None
    assert guard.updates == updates


@given(
    steps=st.lists(st.integers(-1, 500), min_size=1, max_size=4, unique=True).map(sorted),
    first_sign=st.integers(1, 500),
    trust=st.integers(1, 60),
    at=st.sampled_from([30, 510]),
)
def test_the_newest_good_state_before_the_first_sign(steps: list[int], first_sign: int, trust: int, at: int) -> None:
    """What the user came with counts only while hardly anything can have been learned since."""
    first_sign, steps = min(first_sign, at), [step for step in steps if step < at]
    found = (Finding(detector="weight-jump", step=at, severity="act", value=9.0, limit=1.0, since=first_sign),)
    diagnosis = Diagnosis(cause="damaged-weights", damage=Damage.WEIGHTS, findings=found)
    budget = Budget()
    budget.see(diagnosis)
    states = [type("State", (), {"step": step, "lr": 0.1})() for step in steps]
    signals = Signals(step=at, loss=9.0, grad_norm=1.0, lr=0.1)
    plan = decide(signals, diagnosis, budget=budget, states=states, limits=Limits(trust_steps=trust))
    good = [step for step in steps if (step + trust <= first_sign if step >= 0 else at < 64)]
    assert plan.to == (good[-1] if good else None)
    assert ("rollback" in plan.actions) == bool(good)
