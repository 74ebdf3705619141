"""RL scalars given as metrics: what is wrong with them is said, and what is healthy is not."""

import math
import random

import pytest
import torch
from torch import nn

import steadystep
from steadystep.detectors import EntropyCollapse, FlatReward, KlBlowUp, MetricBounds
from steadystep.records import Finding, Signals


def feed(detector: object, name: str, values: list[float], **others: list[float]) -> list[Finding]:
    found: list[Finding] = []
    for step, value in enumerate(values):
        metrics = {name: value} | {other: series[step] for other, series in others.items()}
        found += detector.update(Signals(step=step, loss=0.0, grad_norm=1.0, metrics=metrics))  # type: ignore[attr-defined]
    return found


def noisy(level: float, count: int, seed: int = 0) -> list[float]:
    rng = random.Random(seed)
    return [level * math.exp(rng.gauss(0.0, 0.3)) for _ in range(count)]


@pytest.mark.parametrize("name", ["kl", "objective/kl", "approx_kl"])
def test_a_kl_that_blows_up_is_warned_of_once(name: str) -> None:
    found = feed(KlBlowUp(), name, [*noisy(0.05, 100), *[5.0 * 1.3**i for i in range(10)]])
    assert [(f.detector, f.severity, f.step, f.since) for f in found] == [("kl-blow-up", "warn", 102, 100)]


def test_a_kl_that_grows_as_it_may_is_not() -> None:
    rising = [0.02 * i * math.exp(random.Random(i).gauss(0.0, 0.2)) for i in range(600)]
    assert feed(KlBlowUp(), "kl", rising) == []
    assert feed(KlBlowUp(), "kl", [*noisy(1e-4, 100), *noisy(5e-3, 100)]) == []
    assert feed(KlBlowUp(), "kl", [*noisy(0.05, 100), 9.0, *noisy(0.05, 100)]) == []  # one odd batch
    assert feed(KlBlowUp(), "tickle", [*noisy(0.05, 100), *noisy(50.0, 10)]) == []


def test_an_entropy_that_collapses_is_warned_of_and_noted_when_the_reward_rose() -> None:
    falling = [2.0 * math.exp(-i / 20) for i in range(120)]
    assert [f.severity for f in feed(EntropyCollapse(), "policy/entropy", falling)] == ["warn"]
    better = feed(EntropyCollapse(), "entropy", falling, reward=[i / 120 for i in range(120)])
    assert [f.severity for f in better] == ["info"]
    assert feed(EntropyCollapse(), "entropy", noisy(1.0, 300)) == []
    assert feed(EntropyCollapse(), "entropy", [-v for v in noisy(1.0, 300)]) == []


def test_a_flat_reward_is_warned_of() -> None:
    assert [(f.severity, f.step) for f in feed(FlatReward(), "reward", [0.0] * 200)] == [("warn", 47)]
    assert [f.severity for f in feed(FlatReward(), "reward", [*[i / 50 for i in range(51)], *[1.0] * 60])] == ["info"]
    assert [f.step for f in feed(FlatReward(), "reward_std", [0.0] * 40)] == [15]
    assert feed(FlatReward(), "reward", noisy(1.0, 300)) == []
    assert feed(FlatReward(), "frac_reward_zero_std", [0.0] * 100) == []


def test_bounds() -> None:
    detector = MetricBounds({"kl": (0.0, 1.0)})
    found = feed(detector, "kl", [0.5, 1.5, 1.6, 0.5, -1.0, math.nan])
    assert [(f.step, f.limit) for f in found] == [(1, 1.0), (4, 0.0)]
    assert [f.what for f in feed(MetricBounds(), "ratio", [1.0, math.inf, math.nan, 1.0])] == ["ratio is inf"]


def test_the_guard_says_what_is_wrong_and_takes_the_step_all_the_same() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    guard = steadystep.Guard(model, torch.optim.SGD(model.parameters(), lr=1e-3))
    causes = set()
    for step in range(80):
        x = torch.randn(16, 4)
        advantage = torch.randn(16)
        kl = 0.02 + 0.001 * (step % 7) if step < 60 else 4.0 * 1.2 ** (step - 60)
        outcome = guard.step(
            lambda x=x, a=advantage: -(a * model(x).log_softmax(-1)[:, 0]).mean(), metrics={"kl": kl, "reward": 0.0}
        )
        assert outcome.stepped
        causes.add(outcome.diagnosis.cause)
    assert causes == {"healthy", "policy-drift", "flat-reward"}
    assert {d.cause for d in guard.diagnose()} >= {"policy-drift", "flat-reward"}
