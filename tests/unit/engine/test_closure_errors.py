"""`recovery.max_exceptions`: an exception in the step is caught, counted, and answered with half the learning rate."""

import pytest
import torch
from torch import nn

import steadystep
from steadystep import Guard


def guarded(*, most: int = 3, size: int = 1, mode: str = "autopilot") -> tuple[Guard, nn.Module]:
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    config = {
        "mode": mode,
        "recovery": {"max_exceptions": most, "rewarm_steps": 0},
        "training": {"gradient_accumulation_steps": size},
    }
    return Guard(model, torch.optim.SGD(model.parameters(), lr=0.1), config=config), model


def step(guard: Guard, model: nn.Module, *, fails: bool = False, value: float = 1.0) -> steadystep.Outcome:
    def loss(x: torch.Tensor) -> torch.Tensor:
        made = model(x).square().mean()
        if fails:
            raise ValueError("index 7 is out of range")
        return made

    return guard.step(loss, batch=torch.full((2, 4), value))


def test_three_are_caught_and_the_fourth_is_raised() -> None:
    guard, model = guarded()
    step(guard, model)
    before = [p.clone() for p in model.parameters()]
    rates = []
    for _ in range(3):
        outcome = step(guard, model, fails=True)
        assert not outcome.stepped
        assert outcome.diagnosis.cause == "exception-in-step"
        assert "ValueError: index 7 is out of range" in outcome.diagnosis.evidence
        assert outcome.plan.actions == ("skip-step", "cut-lr")
        rates.append(outcome.plan.lr)
    assert rates == pytest.approx([0.05, 0.025, 0.0125])
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
    assert all(p.grad is None for p in model.parameters())
    with pytest.raises(ValueError, match="out of range") as raised:
        step(guard, model, fails=True)
    assert "4 exceptions in the last 1,000 steps" in raised.value.__notes__[0]
    after = step(guard, model)
    assert after.stepped
    assert after.lr == pytest.approx(0.0125)


def test_the_rate_never_falls_below_a_hundredth() -> None:
    guard, model = guarded(most=50)
    step(guard, model)
    assert [step(guard, model, fails=True).plan.lr for _ in range(12)][-1] == pytest.approx(0.001)


def test_without_the_setting_and_in_observe_every_exception_is_raised() -> None:
    for most, mode in ((0, "autopilot"), (3, "observe")):
        guard, model = guarded(most=most, mode=mode)
        with pytest.raises(ValueError, match="out of range"):
            step(guard, model, fails=True)
        assert step(guard, model).lr == 0.1


def test_errors_of_use_are_never_caught() -> None:
    guard, _ = guarded()
    with pytest.raises(steadystep.MisuseError):
        guard.step(lambda: torch.zeros(()))


def test_the_other_micro_batches_of_its_group_are_kept() -> None:
    values = (1.0, 2.0, 3.0)
    guard, model = guarded(size=3)
    step(guard, model, value=1.0)
    outcome = step(guard, model, value=9.0, fails=True)
    assert (outcome.stepped, outcome.pending) == (False, True)
    step(guard, model, value=2.0)
    assert step(guard, model, value=3.0).stepped
    plain = guarded()[1]
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.05)
    for value in values:
        (plain(torch.full((2, 4), value)).square().mean() / 3).backward()
    optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))


def test_what_was_counted_survives_a_resume() -> None:
    guard, model = guarded(most=1)
    step(guard, model, fails=True)
    saved = guard.state_dict()
    guard.close()
    again, model = guarded(most=1)
    again.load_state_dict(saved)
    with pytest.raises(ValueError, match="out of range"):
        step(again, model, fails=True)
