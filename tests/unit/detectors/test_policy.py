"""Detectors of a policy: where exactly each speaks, and that healthy noise says nothing."""

import random
from typing import Any

import pytest

from steadystep.detectors import (
    PolicyMismatch,
    RatioExplosion,
    RewardCollapse,
    RewardHacking,
    ValueDivergence,
)
from steadystep.records import Finding, Signals
from tests.unit.detectors.feeding import fed, row, said


def shown(make: Any, **metrics: list[float]) -> list[Finding]:
    count = len(next(iter(metrics.values())))
    return fed(make, [row(i, metrics={name: values[i] for name, values in metrics.items()}) for i in range(count)])


def noisy(level: float, noise: float, count: int, seed: int = 0) -> list[float]:
    rng = random.Random(seed)
    return [level + rng.gauss(0.0, noise) for _ in range(count)]


class TestRatioExplosion:
    @pytest.mark.parametrize(
        ("ratio", "severities"), [(4.9, []), (6.0, ["warn"]), (99.0, ["warn"]), (101.0, ["act"] * 5)]
    )
    def test_far_beyond_the_largest_so_far(self, ratio: float, severities: list[str]) -> None:
        found = shown(RatioExplosion, ratio_max=[1.5] * 40 + [ratio] * 5)
        assert [f.severity for f in found] == severities
        assert all(f.where == ("ratio_max",) for f in found)

    def test_refuses_the_rest_of_a_rollout_and_then_lets_go(self) -> None:
        found = shown(RatioExplosion, ratio_max=[1.5] * 40 + [130.0] * 40)
        assert [f.step for f in found if f.severity == "act"] == list(range(40, 56))

    def test_not_before_32_readings(self) -> None:
        assert shown(RatioExplosion, ratio_max=[1.1] * 31 + [1e6]) == []

    def test_epochs_over_one_rollout_are_usual(self) -> None:
        assert shown(RatioExplosion, ratio_max=[1.0, 1.4, 1.9, 2.6] * 40, kl_old=[0.0, 0.01, 0.02, 0.04] * 40) == []


class TestPolicyMismatch:
    def test_extreme_disagreement_is_refused_for_as_long_as_it_lasts(self) -> None:
        found = shown(PolicyMismatch, mismatch=[0.01] * 40 + [0.6] * 30)
        assert [f.step for f in found if f.severity == "act"] == list(range(40, 70))

    def test_above_the_level_three_times(self) -> None:
        found = shown(PolicyMismatch, mismatch=[0.01] * 40 + [0.08] * 5)
        assert said(found) == [(42, "warn")]
        assert found[0].since == 40

    def test_disagreement_from_the_start(self) -> None:
        assert said(shown(PolicyMismatch, mismatch=[0.2] * 60)) == [(31, "warn")]
        assert said(shown(PolicyMismatch, ess=[0.3] * 60)) == [(31, "warn")]
        assert shown(PolicyMismatch, mismatch=noisy(0.03, 0.005, 200), ess=noisy(0.95, 0.01, 200, 1)) == []


class TestRewardCollapse:
    def test_where_values_are_learned_without_a_policy_it_is_a_note(self) -> None:
        curve = [i / 40 for i in range(40)] + noisy(0.2, 0.02, 30)
        for more, severities in (({}, {"info"}), ({"entropy": 1.0}, {"info", "warn"})):
            detector, found = RewardCollapse(), []
            for step, reward in enumerate(curve):
                metrics = {"reward": reward, "value_loss": 0.1, **more}
                found += detector.update(Signals(step=step, loss=0.0, grad_norm=1.0, metrics=metrics))
            assert {f.severity for f in found} == severities

    def test_a_loss_of_what_was_gained(self) -> None:
        rise = [0.1 + 0.8 * min(i / 60, 1.0) + noise for i, noise in enumerate(noisy(0.0, 0.02, 100))]
        found = shown(RewardCollapse, reward=rise + noisy(0.2, 0.02, 30))
        assert [f.severity for f in found if f.severity == "warn"] == ["warn"]
        warned = next(f for f in found if f.severity == "warn")
        assert warned.step <= 110
        assert warned.since is not None
        assert warned.since < 104

    @pytest.mark.parametrize("seed", range(10))
    def test_noise_and_plateaus_give_no_warning(self, seed: int) -> None:
        rise = [min(i / 100, 1.0) for i in range(400)]
        curve = [level + noise for level, noise in zip(rise, noisy(0.0, 0.3, 400, seed), strict=True)]
        found = shown(RewardCollapse, reward=curve) + shown(RewardCollapse, reward=noisy(0.0, 1.0, 400, seed))
        assert [f for f in found if f.severity != "info"] == []

    def test_repeated_readings_count_once(self) -> None:
        rise = [0.1 + 0.8 * min(i / 60, 1.0) + noise for i, noise in enumerate(noisy(0.0, 0.02, 100))]
        once = [f.value for f in shown(RewardCollapse, reward=rise + noisy(0.2, 0.02, 30))]
        each = [value for value in rise + noisy(0.2, 0.02, 30) for _ in range(4)]
        assert [f.value for f in shown(RewardCollapse, reward=each)] == once


class TestRewardHacking:
    def test_reward_up_and_held_out_down(self) -> None:
        reward = [i / 200 + noise for i, noise in enumerate(noisy(0.0, 0.01, 200))]
        good = [min(i, 100) / 200 - max(0, i - 120) / 100 for i in range(200)]
        stream = [
            row(i, metrics={"reward": reward[i]} | ({"held_out_reward": good[i]} if i % 5 == 0 else {}))
            for i in range(200)
        ]
        found = fed(RewardHacking, stream)
        assert [f.severity for f in found if f.severity != "info"] == ["warn"]
        assert 120 < found[0].step < 160

    def test_both_down_is_no_hacking(self) -> None:
        curve = [min(i, 100) / 200 - max(0, i - 120) / 100 for i in range(200)]
        assert shown(RewardHacking, reward=curve, held_out_reward=curve) == []

    @pytest.mark.parametrize(
        ("more", "severities"), [({"value_loss": 1.0}, {"info"}), ({"value_loss": 1.0, "entropy": 1.0}, {"warn"})]
    )
    def test_values_that_explore_less_and_less_are_a_note(self, more: dict[str, float], severities: set[str]) -> None:
        """Rewards of episodes that are over rise, while what is greedy now falls."""
        reward = [i / 200 + noise for i, noise in enumerate(noisy(0.0, 0.01, 200))]
        good = [min(i, 100) / 200 - max(0, i - 120) / 100 for i in range(200)]
        stream = [
            row(i, metrics={"reward": reward[i]} | more | ({"held_out_reward": good[i]} if i % 5 == 0 else {}))
            for i in range(200)
        ]
        assert {f.severity for f in fed(RewardHacking, stream)[:1]} == severities

    def test_responses_that_fill_up(self) -> None:
        found = shown(RewardHacking, truncated_share=[0.05] * 30 + [0.9] * 30)
        assert [f.severity for f in found] == ["warn"]


class TestValueDivergence:
    def test_values_and_errors_that_multiply(self) -> None:
        loss = [1.0] * 150 + [1.1**i for i in range(120)]
        mean = [5.0] * 150 + [5.0 * 1.05**i for i in range(120)]
        found = shown(ValueDivergence, value_loss=loss, value_mean=mean, reward=[1.0] * 270)
        assert [f.severity for f in found] == ["warn"]
        rising = [1.0] * 150 + [1.0 + 0.1 * i for i in range(120)]
        assert shown(ValueDivergence, value_loss=loss, value_mean=mean, reward=rising) == []

    def test_the_beginning_of_a_critic(self) -> None:
        loss = [min(10.0, 0.1 + 0.1 * i) for i in range(400)]
        mean = [min(50.0, 0.5 * i) for i in range(400)]
        assert shown(ValueDivergence, value_loss=loss, value_mean=mean, reward=[i / 4 for i in range(400)]) == []

    def test_a_break_is_said_within_four_readings(self) -> None:
        loss, mean, reward = [0.01] * 200 + [0.013] * 60, [4.0] * 200 + [4.0 + i for i in range(60)], [1.0] * 260
        found = shown(ValueDivergence, value_loss=loss, value_mean=mean, reward=reward)
        assert [(f.step, f.severity, f.since) for f in found] == [(203, "warn", 199)]
        assert found[0].what == "the error of the value function grew from 0.01 to 0.013, its values from 4 to 7"

    @pytest.mark.parametrize(
        ("loss", "mean", "reward"),
        [
            (0.0119, 8.0, 0.0),  # the error is within 1.2 times the largest
            (1.0, 4.3, 0.0),  # the values are a tenth beyond their range, and no more
            (1.0, 8.0, 0.2),  # there is more reward
        ],
    )
    def test_a_value_function_that_learns_something_new(self, loss: float, mean: float, reward: float) -> None:
        losses, means = [0.01] * 200 + [loss] * 20, [4.0] * 200 + [mean] * 20
        rewards = [*(i / 200 for i in range(200)), *[1.0 + reward] * 20]
        assert shown(ValueDivergence, value_loss=losses, value_mean=means, reward=rewards) == []
        known = [*(min(i / 150, 1.0) for i in range(220))]  # at rest
        assert bool(shown(ValueDivergence, value_loss=losses, value_mean=means, reward=known)) == (reward > 0.0)

    def test_one_large_error_is_no_break(self) -> None:
        losses = [0.01] * 200 + [1.0, 1.0, 1.0, 0.01] * 5
        means = [4.0] * 200 + [8.0] * 20
        assert shown(ValueDivergence, value_loss=losses, value_mean=means, reward=[1.0] * 220) == []

    def test_a_break_is_not_said_where_no_reward_is_known(self) -> None:
        loss, mean = [0.01] * 200 + [1.0] * 20, [4.0] * 200 + [9.0] * 20
        assert shown(ValueDivergence, value_loss=loss, value_mean=mean) == []
