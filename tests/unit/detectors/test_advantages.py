"""What a policy is taught by: groups, the sign of advantages, their outliers."""

import random

import pytest

from steadystep.detectors import BadAdvantages, DeadGroups
from tests.unit.detectors.feeding import said
from tests.unit.detectors.test_policy import noisy, shown


class TestDeadGroups:
    def test_sixteen_readings(self) -> None:
        dead = [0.2] * 20 + [0.95] * 30
        assert said(shown(DeadGroups, zero_variance_groups=dead, reward=[0.1] * 50)) == [(35, "warn")]
        assert said(shown(DeadGroups, zero_variance_groups=dead, reward=[0.1] * 20 + [0.9] * 30)) == [(35, "info")]
        assert shown(DeadGroups, zero_variance_groups=[0.95, 0.8] * 40) == []

    def test_a_spread_that_is_gone_is_said_at_the_second_reading(self) -> None:
        spread, reward = noisy(0.2, 0.02, 80) + [1e-6] * 20, noisy(0.8, 0.05, 80) + [0.0] * 20
        found = shown(DeadGroups, reward_std=spread, reward=reward)
        assert [(f.step, f.severity, f.since) for f in found] == [(81, "warn", 80)]
        assert shown(DeadGroups, reward_std=[*spread[:81], 0.2] * 3, reward=reward[:82] * 3) == []
        assert shown(DeadGroups, reward_std=[1e-3 if s < 0.1 else s for s in spread], reward=reward) == []

    def test_a_spread_needs_a_past(self) -> None:
        spread, reward = noisy(0.2, 0.02, 31) + [1e-6] * 3, noisy(0.8, 0.05, 31) + [0.0] * 3
        assert shown(DeadGroups, reward_std=spread, reward=reward) == []
        assert len(shown(DeadGroups, reward_std=[0.2, *spread], reward=[0.8, *reward])) == 1

    def test_equal_answers_of_a_solved_task_are_no_fault(self) -> None:
        spread = noisy(0.2, 0.02, 60) + [0.0] * 40
        assert shown(DeadGroups, reward_std=spread, reward=noisy(0.6, 0.02, 60) + [1.0] * 40) == []
        after = shown(
            DeadGroups, reward_std=[*spread, *[1e-6] * 4], reward=noisy(0.6, 0.02, 60) + [1.0] * 40 + [0.0] * 4
        )
        assert said(after) == [(101, "warn")]

    @pytest.mark.parametrize(("short", "told"), [(0.019, []), (0.025, [(61, "warn")])])
    def test_a_policy_that_has_settled_beside_its_best_is_solved(
        self, short: float, told: list[tuple[int, str]]
    ) -> None:
        """A tenth of the usual spread of 0.2."""
        reward = [0.9] * 60 + [0.9 - short] * 12
        assert said(shown(DeadGroups, reward_std=[0.2] * 60 + [0.0] * 12, reward=reward)) == told

    def test_a_sparse_reward_is_without_a_spread_now_and_then(self) -> None:
        rng = random.Random(0)
        hits = [rng.random() < 0.5 for _ in range(300)]
        spread, reward = [0.1 * hit for hit in hits], [0.02 * hit for hit in hits]
        assert shown(DeadGroups, reward_std=spread, reward=reward) == []


class TestBadAdvantages:
    def test_advantages_that_turn_are_said_at_the_second_reading(self) -> None:
        found = shown(BadAdvantages, advantage_agreement=[0.9] * 40 + [-0.9] * 40 + [0.9] * 5 + [-0.9] * 5)
        assert said(found) == [(41, "warn"), (86, "warn")]
        assert found[0].what.startswith("the agreement of advantages with rewards is -0.90, its baseline is 0.90")

    @pytest.mark.parametrize(
        "readings",
        [
            [0.9] * 31 + [-0.9] * 2,  # too short a past
            [0.9] * 40 + [-0.9, 0.9] * 20,  # never two in a row
            [0.9] * 40 + [-0.29] * 20,  # hardly against them
            [0.29] * 40 + [-0.9] * 20,  # they never agreed
            noisy(0.0, 0.5, 300),
        ],
    )
    def test_what_says_nothing(self, readings: list[float]) -> None:
        assert shown(BadAdvantages, advantage_agreement=readings) == []

    def test_a_policy_that_is_trained_on_values_lowers_its_loss_by_raising_them(self) -> None:
        values, right = noisy(4.0, 0.2, 60), noisy(-4.0, 0.2, 40)
        assert said(shown(BadAdvantages, value_mean=values, policy_loss=right + noisy(4.0, 0.2, 20))) == [(41, "warn")]
        assert shown(BadAdvantages, value_mean=values, policy_loss=right + noisy(0.0, 0.2, 20)) == []
        surrogate = right + noisy(4.0, 0.2, 20)  # of ratios: its sign means nothing
        assert shown(BadAdvantages, value_mean=values, policy_loss=surrogate, ratio_max=[1.0] * 60) == []

    def test_outliers_are_said_at_the_third_reading(self) -> None:
        assert said(shown(BadAdvantages, advantage_peak=noisy(3.0, 0.3, 40) + [100.0] * 40)) == [(42, "warn")]
        assert shown(BadAdvantages, advantage_peak=noisy(3.0, 0.3, 40) + [100.0, 3.0] * 20) == []
        assert shown(BadAdvantages, advantage_peak=noisy(3.0, 0.3, 40) + [25.0] * 20) == []
        assert shown(BadAdvantages, advantage_peak=[3.0 * 1.02**i for i in range(300)]) == []
