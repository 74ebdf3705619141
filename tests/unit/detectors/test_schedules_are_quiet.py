"""No ordinary schedule is an alarm, whoever sets the learning rate: the guard, a torch scheduler or the loop itself."""

import math
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer, lr_scheduler

from steadystep.config import Config
from steadystep.detectors.build import build_detectors
from steadystep.engine.learning_rate import LearningRate
from steadystep.records import Finding, Signals

STEPS = 3000
EPOCH = 250
BASE = 1e-3


def hf_cosine(step: int) -> float:
    """The factor of transformers' `get_cosine_schedule_with_warmup`, 300 of 3,000 steps."""
    return step / 300 if step < 300 else max(0.0, 0.5 * (1.0 + math.cos(math.pi * (step - 300) / (STEPS - 300))))


def wsd(step: int) -> float:
    return min(1.0, (step + 1) / 200, max(0.01, (STEPS - step) / 600))


def noam(step: int) -> float:
    return 16.0 * min((step + 1) ** -0.5, (step + 1) * 400**-1.5)


def warmed_cosine(optimizer: Optimizer) -> Any:
    rise = lr_scheduler.LinearLR(optimizer, start_factor=1e-3, total_iters=500)
    fall = lr_scheduler.CosineAnnealingLR(optimizer, T_max=STEPS - 500)
    return lr_scheduler.SequentialLR(optimizer, [rise, fall], milestones=[500])


SCHEDULERS: dict[str, Callable[[Optimizer], Any]] = {
    "lambda, hf cosine": lambda o: lr_scheduler.LambdaLR(o, hf_cosine),
    "lambda, wsd": lambda o: lr_scheduler.LambdaLR(o, wsd),
    "lambda, noam beyond its base": lambda o: lr_scheduler.LambdaLR(o, noam),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, 30 * BASE, total_steps=STEPS + 1, cycle_momentum=False),
    "linear, then cosine": warmed_cosine,
    "step": lambda o: lr_scheduler.StepLR(o, 800, gamma=0.1),
    "multi step": lambda o: lr_scheduler.MultiStepLR(o, [900, 1800], gamma=0.3),
    "exponential": lambda o: lr_scheduler.ExponentialLR(o, 0.998),
    "plateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, factor=0.5, patience=300),
    "cyclic": lambda o: lr_scheduler.CyclicLR(o, BASE, 20 * BASE, step_size_up=400, cycle_momentum=False),
    "cyclic, triangular2": lambda o: lr_scheduler.CyclicLR(
        o, BASE, 20 * BASE, step_size_up=300, mode="triangular2", cycle_momentum=False
    ),
    "warm restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, T_0=400, T_mult=2, eta_min=1e-8),
}

BY_HAND: dict[str, Callable[[int], float]] = {
    "a line by epochs": lambda step: BASE * min(1.0, (step // EPOCH + 1) / 5),
    "a line by epochs, from zero": lambda step: BASE * min(1.0, step // EPOCH / 5),
    "a line by epochs, then a cosine": lambda step: BASE * hf_cosine(step // EPOCH * EPOCH + 60),
    "a line over half the run": lambda step: BASE * min(1.0, (step + 1) / 1500),
    "half a cosine upwards": lambda step: BASE * (1.01 - math.cos(math.pi * min(1.0, step / 700))),
    "a triangle": lambda step: BASE * (0.02 + abs((step / 300 + 1) % 2 - 1)),
    "a sawtooth with a short rise": lambda step: BASE * min((step % 1000 + 1) / 100, math.exp(-(step % 1000) / 100)),
    "cycles by epochs": lambda step: BASE * (1.0, 0.5, 0.2, 0.08)[step // EPOCH % 4],
    "restarts whose peaks fall": lambda step: BASE * 0.85 ** (step // 1000) * math.exp(-(step % 1000) / 150),
    "a second warm-up, to more": lambda step: (
        BASE * min(1.0, (step + 1) / 200) if step < 1500 else 4 * BASE * min(1.0, (step - 1499) / 300)
    ),
}


def optimizer() -> Optimizer:
    return torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=BASE)


def by_torch(make: Callable[[Optimizer], Any], losses: list[float]) -> Iterator[tuple[float, float]]:
    """Learning rate and what was announced, as the guard reads them from the groups."""
    stepped = optimizer()
    scheduler = make(stepped)
    (group,) = stepped.param_groups
    plateau = isinstance(scheduler, lr_scheduler.ReduceLROnPlateau)
    for loss in losses:
        yield float(group["lr"]), max(float(group.get("initial_lr", 0.0)), float(group.get("max_lr", 0.0)))
        stepped.step()
        scheduler.step(loss) if plateau else scheduler.step()


def by_guard(rates: list[float]) -> Iterator[tuple[float, float]]:
    placed = optimizer()
    owner = LearningRate(placed, start=None, schedule=lambda n: rates[n] / BASE)
    for step in range(len(rates)):
        owner.place(step)
        yield placed.param_groups[0]["lr"], owner.announced


def falling(seed: str) -> list[float]:
    rng = random.Random(seed)
    return [1.0 + 3.0 * (1.0 + step / 100) ** -0.4 + rng.gauss(0.0, 0.1) for step in range(STEPS)]


def alarms(rates: Iterator[tuple[float, float]], losses: list[float], *, scheduled: bool) -> list[Finding]:
    noticing = build_detectors(Config.load(None), scheduled=scheduled, beta2=0.999)
    rng = random.Random(0)
    found: list[Finding] = []
    for step, ((lr, announced), loss) in enumerate(zip(rates, losses, strict=True)):
        norm = math.exp(rng.gauss(0.0, 0.2))
        signals = Signals(step=step, loss=loss, losses=(loss,), grad_norm=norm, lr=lr, announced_lr=announced)
        for detector in noticing:
            found += [f for f in detector.update(signals) if f.severity != "info"]
    return found


@pytest.mark.parametrize("owner", ["torch", "guard", "hand"])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_schedule_of_torch(name: str, owner: str) -> None:
    losses = falling(f"{name} {owner}")
    played = list(by_torch(SCHEDULERS[name], losses))
    rates = [lr for lr, _ in played]
    who = {"torch": iter(played), "guard": by_guard(rates), "hand": ((lr, 0.0) for lr in rates)}
    assert alarms(who[owner], losses, scheduled=owner == "guard") == []


@pytest.mark.parametrize("owner", ["guard", "hand"])
@pytest.mark.parametrize("name", BY_HAND)
def test_a_schedule_made_by_hand(name: str, owner: str) -> None:
    rates = [BY_HAND[name](step) for step in range(STEPS)]
    who = {"guard": by_guard(rates), "hand": ((lr, 0.0) for lr in rates)}
    assert alarms(who[owner], falling(f"{name} {owner}"), scheduled=owner == "guard") == []
