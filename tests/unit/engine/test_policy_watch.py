"""Metrics that move before rollouts do, or against them: entropy that rises, rewards that pay for something else."""

import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from steadystep.engine.policy_watch import EntropyWatch, GraderWatch, earns_more
from steadystep.records import Finding
from steadystep.rl.earned_series import EarnedSeries


def risen(readings: list[float]) -> list[int]:
    watch = EntropyWatch()
    return [step for step, entropy in enumerate(readings) if watch.hear(step, entropy)]


def test_an_entropy_above_all_of_64_readings_in_the_mean_of_four() -> None:
    rng = random.Random(0)
    usual = [0.1 + 0.02 * rng.random() for _ in range(90)]
    assert risen([*usual, *[0.17] * 4]) == [93]
    assert risen([*usual, 0.2, 0.1, 0.1, 0.1, 0.2, 0.1]) == []
    assert risen([*usual, *[0.15] * 20]) == []
    assert risen([*usual[:70], *[0.2] * 4]) == []
    assert risen([1.01**i for i in range(300)]) == []
    assert risen([each / 20.0 for each in [*usual, *[0.2] * 20]]) == []  # too little to matter
    assert risen([*[-1.0] * 90, *[0.2] * 8]) == []  # of a density: times something negative means nothing


def test_an_entropy_that_stays_high_begins_once() -> None:
    usual = [0.1] * 90
    assert risen([*usual, *[0.1 + 0.05 * i for i in range(40)]]) == [92]
    assert len(risen([*usual, *[0.2] * 6, *[0.1] * 100, *[0.4] * 6])) == 2


def test_how_long_ago_it_was() -> None:
    watch = EntropyWatch()
    for step in range(94):
        watch.hear(step, 0.1 if step < 90 else 0.5)
    assert watch.is_recent(105, 12)
    assert not watch.is_recent(106, 12)
    assert not watch.hear(94, None)
    assert not EntropyWatch().is_recent(0, 60)


def jump(value: float, *, step: int = 150, baseline: float = 0.9) -> Finding:
    known = {"baseline": baseline, "since": step - 8, "where": ("reward",)}
    return Finding(
        detector="reward-hacking", step=step, severity="info", value=value, limit=0.2, what="the reward jumped", **known
    )


def series(level: Callable[[int], float], *, until: int = 150) -> EarnedSeries:
    """Looks every five steps, with a little noise."""
    return EarnedSeries([[float(at), level(at) + 0.002 * (at % 3)] for at in range(0, until + 1, 5)])


def learned(step: int) -> float:
    return min(0.1 + 0.008 * step, 0.9)


@pytest.mark.parametrize(
    ("value", "now", "severity"),
    [
        (2.0, 0.9, "warn"),
        (2.0, 0.6, "warn"),  # more reward, and the policy earns less
        (2.0, 1.2, "info"),
        (0.2, 0.9, "warn"),
        (0.2, 0.6, "info"),
        (0.2, 1.0, "warn"),
    ],
)
def test_a_jump_that_the_newest_look_does_not_show_is_the_grader(value: float, now: float, severity: str) -> None:
    found = GraderWatch().changed(jump(value), series(lambda step: now if step == 150 else learned(step)))
    assert found.severity == severity
    assert ("rollouts earn" in found.what) == (severity == "warn")


@pytest.mark.parametrize(("value", "severity"), [(0.7, "info"), (0.95, "warn"), (0.3, "warn")])
def test_a_reward_that_comes_closer_to_what_rollouts_earn_is_late(value: float, severity: str) -> None:
    """From 0.4, beside rollouts at 0.9: a mean over episodes that are over."""
    late = replace(jump(value), baseline=0.4)
    assert GraderWatch().changed(late, series(learned)).severity == severity


def test_a_policy_that_came_to_rest_a_moment_ago_does_not_accuse_the_grader() -> None:
    """Rewards of a replay buffer rise 30 steps after the policy has."""
    assert GraderWatch().changed(jump(2.0), series(lambda step: 0.1 if step < 110 else 0.9)).severity == "info"


def test_a_policy_that_comes_and_goes_does_not_accuse_the_grader() -> None:
    assert GraderWatch().changed(jump(2.0), series(lambda step: 0.9 if step % 10 else 0.2)).severity == "info"


def test_other_findings_pass_unchanged() -> None:
    note = Finding(detector="reward-hacking", step=150, severity="info", value=2.0, limit=0.2, what="held-out")
    assert GraderWatch().changed(note, series(learned)) is note


def parted(rewards: list[float], level: Callable[[int], float], *, value: float, at: int = 160) -> Finding | None:
    """A jump at step 150, with these rewards from there on, and rollouts at step `at`."""
    watch = GraderWatch()
    for step in range(142, 150):
        watch.hear(step, 0.9 + 0.001 * (step % 2))
    watch.changed(jump(value), series(level))
    for step, reward in enumerate(rewards, 150):
        watch.hear(step, reward)
    found = watch.parted(at, [level(at)] * 8, series(level, until=at))
    watch.hear(at, None)
    return found


def falls(step: int) -> float:
    return learned(step) if step <= 150 else max(0.9 - 0.04 * (step - 150), 0.0)


def test_a_reward_that_rises_after_a_jump_while_rollouts_fall() -> None:
    rising = [0.3 + 0.04 * i + 0.01 * (i % 2) for i in range(10)]
    found = parted(rising, falls, value=0.3)
    assert found is not None
    assert (found.detector, found.severity, found.since) == ("reward-hacking", "warn", 150)
    assert "it pays for something else" in found.what
    assert parted([2.0 + 0.01 * (i % 3) for i in range(10)], falls, value=2.0) is not None  # it stays above


@pytest.mark.parametrize(
    ("rewards", "level", "value", "at"),
    [
        ([0.3 + 0.01 * (i % 3) for i in range(10)], falls, 0.3, 160),  # it does not rise
        ([0.3 - 0.02 * i for i in range(10)], falls, 0.3, 160),
        ([0.3 + 0.04 * i for i in range(10)], learned, 0.3, 160),  # rollouts do not fall
        ([0.3 + 0.04 * i for i in range(5)], falls, 0.3, 155),  # too few readings
        ([0.3 + 0.04 * i for i in range(40)], falls, 0.3, 195),  # long ago
        ([2.0, 0.8] * 5, falls, 2.0, 160),  # it does not stay above
    ],
)
def test_what_is_no_proof_of_another_grader(
    rewards: list[float], level: Callable[[int], float], value: float, at: int
) -> None:
    assert parted(rewards, level, value=value, at=at) is None


def test_without_a_jump_nothing_parts() -> None:
    watch = GraderWatch()
    for step in range(150, 160):
        watch.hear(step, 0.3 + 0.04 * step)
    assert watch.parted(160, [0.1] * 8, series(falls, until=160)) is None
    assert not watch.is_close(160)


def test_equal_and_uncertain_scores_prove_nothing() -> None:
    assert not earns_more([1.0] * 8, [1.0] * 8)
    assert not earns_more([0.0] * 8, [1.0] * 8)
    assert earns_more([1.0] * 8, [0.5] * 8)
    assert not earns_more([9.0, *[0.5] * 7], [0.5] * 8)
