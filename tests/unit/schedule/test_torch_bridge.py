"""Schedules and torch: the same numbers as torch's schedulers, ours as theirs, theirs as ours."""

import json
import warnings

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import Parameter
from torch.optim import SGD, Optimizer, lr_scheduler

from steadystep import ConfigError, MisuseError, schedule
from steadystep.schedule import as_torch, from_torch

LR = 0.5


def an_optimizer(*rates: float) -> SGD:
    return SGD([{"params": [Parameter(torch.zeros(1))], "lr": rate} for rate in rates or (LR,)], lr=LR)


def played(scheduler: lr_scheduler.LRScheduler, count: int) -> list[float]:
    """The first group's learning rate at steps 0 to count - 1."""
    rates = []
    for _ in range(count):
        rates.append(float(scheduler.optimizer.param_groups[0]["lr"]))
        scheduler.optimizer.step()
        scheduler.step()
    return rates


def close(values: list[float]) -> object:
    return pytest.approx(values, rel=1e-9, abs=1e-12)


def pairs(total: int, gamma: float, floor: float) -> list:
    return [
        (schedule.step_decay(total, gamma), lambda o: lr_scheduler.StepLR(o, total, gamma), 3 * total),
        (schedule.exponential(gamma), lambda o: lr_scheduler.ExponentialLR(o, gamma), 3 * total),
        (
            schedule.cosine(total, floor),
            lambda o: lr_scheduler.CosineAnnealingLR(o, total, eta_min=floor * LR),
            total + 1,
        ),
        (
            schedule.cosine_restarts(total, 2, floor),
            lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, total, 2, eta_min=floor * LR),
            8 * total,
        ),
        (schedule.polynomial(total, 2.5), lambda o: lr_scheduler.PolynomialLR(o, total, 2.5), 2 * total),
        (
            schedule.warmup(total, max(floor, 0.01)),
            lambda o: lr_scheduler.LinearLR(o, max(floor, 0.01), 1.0, total),
            2 * total,
        ),
        (schedule.constant(), lambda o: lr_scheduler.ConstantLR(o, 1.0), total),
    ]


@given(st.integers(1, 20), st.floats(0.1, 0.99), st.floats(0.0, 0.9))
def test_the_same_rates_as_torchs_schedulers(total: int, gamma: float, floor: float) -> None:
    for ours, make, count in pairs(total, gamma, floor):
        theirs = played(make(an_optimizer()), count)
        assert [LR * ours(step) for step in range(count)] == close(theirs)
        assert played(as_torch(ours, an_optimizer()), count) == close(theirs)


@given(st.integers(1, 12), st.floats(0.1, 0.99), st.floats(0.0, 0.9), st.lists(st.integers(0, 30), min_size=1))
def test_torchs_schedulers_as_schedules_in_any_order(total: int, gamma: float, floor: float, at: list[int]) -> None:
    for _, make, _ in pairs(total, gamma, floor):
        theirs = played(make(an_optimizer()), 31)
        built = from_torch(make, lr=LR)
        assert [LR * built(step) for step in at] == close([theirs[step] for step in at])


def test_a_scheduler_object_is_copied_and_its_optimizer_left_alone() -> None:
    optimizer = an_optimizer(0.5, 0.05)
    given_ = lr_scheduler.SequentialLR(
        optimizer,
        [lr_scheduler.ConstantLR(optimizer, 1.0, 3), lr_scheduler.ExponentialLR(optimizer, 0.5)],
        milestones=[3],
    )
    made = from_torch(given_)
    assert [made(step) for step in (5, 0, 3, 4)] == close([0.25, 1.0, 1.0, 0.5])
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.05]
    assert given_.last_epoch == 0
    assert played(given_, 6) == close([LR * made(step) for step in range(6)])


def test_one_cycle_ends_where_torch_ends_it() -> None:
    def one_cycle(optimizer: Optimizer) -> lr_scheduler.LRScheduler:
        return lr_scheduler.OneCycleLR(optimizer, max_lr=LR, total_steps=20, cycle_momentum=False)

    made = from_torch(one_cycle, lr=LR)
    theirs = one_cycle(an_optimizer())
    assert [LR * made(step) for step in range(19)] == close(played(theirs, 19))
    made(20)
    with pytest.raises(MisuseError, match=r"OneCycleLR has no step 21 .*then\(\)"):
        made(21)


def _warming(optimizer: Optimizer) -> lr_scheduler.LRScheduler:
    return lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 4))


def _stepped() -> lr_scheduler.LRScheduler:
    scheduler = lr_scheduler.StepLR(an_optimizer(), 3)
    played(scheduler, 1)
    return scheduler


def _stepped_chain() -> lr_scheduler.LRScheduler:
    optimizer = an_optimizer()
    scheduler = lr_scheduler.ChainedScheduler([lr_scheduler.StepLR(optimizer, 3), lr_scheduler.StepLR(optimizer, 5)])
    played(scheduler, 1)
    return scheduler


@pytest.mark.parametrize(
    ("use", "says"),
    [
        (lambda: from_torch(lambda o: lr_scheduler.StepLR(o, 3)), "lr = None"),
        (lambda: from_torch(lambda o: lr_scheduler.StepLR(o, 3), lr=0.0), "lr = 0.0"),
        (lambda: from_torch(lr_scheduler.StepLR(an_optimizer(), 3), lr=0.1), "lr= is for a function"),
        (lambda: from_torch(lambda o: None, lr=0.1), "returned a NoneType"),
        (lambda: from_torch("cosine", lr=0.1), "got str"),
        (lambda: from_torch(lambda o: lr_scheduler.ReduceLROnPlateau(o), lr=0.1), "use steadystep.schedule.Plateau"),
        (lambda: from_torch(lr_scheduler.ReduceLROnPlateau(an_optimizer())), "use steadystep.schedule.Plateau"),
        (lambda: from_torch(_stepped()), "has already been stepped"),
        (lambda: from_torch(_stepped_chain()), "has already been stepped"),
        (lambda: from_torch(_warming(an_optimizer())), "has set the learning rate from 0.5 to 0.0"),
        (lambda: from_torch(_warming, lr=LR)(2) and from_torch(lr_scheduler.StepLR(an_optimizer(0.0), 3)), "is 0"),
        (
            lambda: from_torch(lr_scheduler.LambdaLR(an_optimizer(1.0, 1.0), [lambda s: 1.0, lambda s: 1 / (s + 1)]))(
                1
            ),
            "treats groups differently (multipliers [1.0, 0.5] at step 1)",
        ),
        (
            lambda: from_torch(lr_scheduler.CosineAnnealingLR(an_optimizer(1.0, 0.1), 9, eta_min=0.01))(5),
            "treats groups differently",
        ),
        (lambda: from_torch(lambda o: lr_scheduler.OneCycleLR(o, 0.1, 20), lr=0.1)(1), "set cycle_momentum=False"),
    ],
)
def test_what_cannot_be_a_schedule_says_so(use, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        use()
    assert says in str(caught.value)


def test_replaying_is_silent() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert from_torch(lr_scheduler.StepLR(an_optimizer(), 3, 0.5))(7) == 0.25


@given(st.integers(0, 12), st.integers(0, 12))
def test_the_adapter_resumes_where_it_stood(before: int, after: int) -> None:
    ours = schedule.named("cosine", total_steps=20, warmup_steps=4)
    whole = played(as_torch(ours, an_optimizer()), before + after)
    first, second = (as_torch(ours, an_optimizer()) for _ in range(2))
    played(first, before)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    second.optimizer.load_state_dict(first.optimizer.state_dict())
    assert second.get_last_lr() == first.get_last_lr()
    assert played(second, after) == whole[before:]


def test_the_adapter_saves_a_plateaus_memory() -> None:
    first, second = schedule.Plateau(patience=0), schedule.Plateau(patience=0)
    theirs, ours = as_torch(first, an_optimizer()), as_torch(second, an_optimizer())
    first.update(1.0)
    first.update(1.0)
    ours.load_state_dict(json.loads(json.dumps(theirs.state_dict())))
    assert second(0) == 0.1
    with pytest.raises(ConfigError, match="keeps a state"):
        ours.load_state_dict(as_torch(schedule.constant(), an_optimizer()).state_dict())


def test_the_adapter_keeps_each_groups_base_and_fills_a_tensor() -> None:
    optimizer = SGD(
        [{"params": [Parameter(torch.zeros(1))]}, {"params": [Parameter(torch.zeros(1))], "lr": 0.1}], lr=1.0
    )
    optimizer.param_groups[0]["lr"] = held = torch.tensor(1.0)
    scheduler = as_torch(schedule.linear(2), optimizer)
    optimizer.step()
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] is held
    assert [float(group["lr"]) for group in optimizer.param_groups] == [0.5, 0.05]
