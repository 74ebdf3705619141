"""Metrics of a policy: where exactly each of them is worth a word."""

import math
from typing import Any

import pytest

from steadystep.detectors import EntropyCollapse, FlatReward, KlBlowUp, MetricBounds
from steadystep.detectors.metrics import words
from steadystep.records import Finding
from tests.unit.detectors.feeding import fed, row, said


def test_the_words_of_a_name() -> None:
    assert words("train/KL_div2.Policy") == {"train", "kl", "div", "policy"}


def shown(make: Any, **metrics: list[float]) -> list[Finding]:
    count = len(next(iter(metrics.values())))
    return fed(make, [row(i, metrics={name: values[i] for name, values in metrics.items()}) for i in range(count)])


class TestEntropyCollapse:
    @pytest.mark.parametrize(("now", "told"), [(0.1, True), (0.11, False)])
    def test_a_twentieth_of_the_first_sixteen(self, now: float, told: bool) -> None:
        found = shown(EntropyCollapse, entropy=[2.0] * 16 + [now] * 10)
        assert [(f.step, f.severity, f.value, f.limit, f.baseline) for f in found] == (
            [(23, "warn", 0.1, 0.1, 2.0)] if told else []
        )

    def test_medians_of_the_first_and_the_last(self) -> None:
        first = [9.0] * 7 + [2.0] * 9
        assert [f.baseline for f in shown(EntropyCollapse, entropy=first + [0.1] * 8)] == [2.0]
        assert shown(EntropyCollapse, entropy=[2.0] * 16 + [0.1] * 4 + [1.0] * 4) == []
        assert [f.step for f in shown(EntropyCollapse, entropy=[2.0] * 16 + [1.0] * 3 + [0.1] * 5)] == [23]
        assert [f.step for f in shown(EntropyCollapse, entropy=[2.0] * 16 + [1.0] * 20 + [0.1] * 8)] == [40]

    def test_again_after_it_has_come_back(self) -> None:
        collapsed, half = [0.05] * 8, [0.4] * 8
        assert len(shown(EntropyCollapse, entropy=[2.0] * 16 + collapsed + half + collapsed)) == 1
        assert len(shown(EntropyCollapse, entropy=[2.0] * 16 + collapsed + [0.41] * 8 + collapsed)) == 2

    def test_what_is_not_finite_or_not_positive_does_not_count(self) -> None:
        assert [f.step for f in shown(EntropyCollapse, entropy=[math.nan, *[2.0] * 16, math.inf, *[0.05] * 8])] == [25]
        assert shown(EntropyCollapse, entropy=[0.0] * 40) == []
        assert shown(EntropyCollapse, entropy=[-2.0] * 16 + [-9.0] * 10) == []
        assert shown(EntropyCollapse, accuracy=[2.0] * 16 + [0.0] * 10) == []

    @pytest.mark.parametrize(
        ("reward", "severity"),
        [
            ([1.0] * 16 + [2.0] * 10, "info"),
            ([1.0] * 26, "warn"),
            ([1.0] * 16 + [0.0] * 10, "warn"),
            ([1.0] * 15 + [3.0] + [2.0] * 10, "warn"),  # it has been higher before
            ([1.0] * 15 + [1.5] + [2.0] * 10, "info"),
        ],
    )
    def test_a_note_when_a_reward_has_risen(self, reward: list[float], severity: str) -> None:
        entropy = [2.0] * 16 + [0.05] * 10
        assert [f.severity for f in shown(EntropyCollapse, reward=reward, entropy=entropy)] == [severity]
        assert [f.severity for f in shown(EntropyCollapse, reward_std=reward, entropy=entropy)] == ["warn"]
        assert [f.severity for f in shown(EntropyCollapse, score=reward, entropy=entropy)] == ["warn"]

    @pytest.mark.parametrize(("spread", "severity"), [(0.9, "info"), (1.0, "warn")])
    def test_a_task_is_not_solved_while_rewards_differ_by_more_than_was_gained(
        self, spread: float, severity: str
    ) -> None:
        entropy, reward = [2.0] * 16 + [0.05] * 10, [1.0] * 16 + [2.0] * 10
        found = shown(EntropyCollapse, entropy=entropy, reward=reward, reward_std=[0.2] * 16 + [spread] * 10)
        assert [f.severity for f in found] == [severity]

    def test_each_entropy_by_itself(self) -> None:
        found = shown(EntropyCollapse, entropy=[2.0] * 16 + [0.05] * 8, head_entropy=[1.0] * 16 + [0.01] * 8)
        assert [f.baseline for f in found] == [2.0, 1.0]


class TestFlatReward:
    def test_48_readings_that_are_the_same(self) -> None:
        found = shown(FlatReward, reward=[1.0, *[0.5] * 60])
        assert [(f.step, f.severity, f.value, f.limit) for f in found] == [(48, "warn", 0.5, 48.0)]
        assert shown(FlatReward, reward=[1.0, *[0.5] * 47, 0.6, *[0.5] * 47]) == []
        assert [f.step for f in shown(FlatReward, reward=[0.5] * 48)] == [47]
        assert [f.step for f in shown(FlatReward, reward=[*[0.5] * 20, math.nan, *[0.5] * 28])] == [48]

    def test_again_after_another_value(self) -> None:
        assert len(shown(FlatReward, reward=[*[0.5] * 50, 0.6, *[0.5] * 50])) == 2

    def test_a_note_above_the_first_value(self) -> None:
        assert [f.severity for f in shown(FlatReward, reward=[0.1, *[0.5] * 48])] == ["info"]
        assert [f.severity for f in shown(FlatReward, reward=[0.5] * 48)] == ["warn"]

    def test_a_spread_of_zero_for_sixteen(self) -> None:
        found = shown(FlatReward, reward_std=[0.3, *[0.0] * 20])
        assert [(f.step, f.severity, f.limit) for f in found] == [(16, "warn", 16.0)]
        assert shown(FlatReward, reward_std=[0.3] * 60) == []
        assert [f.severity for f in shown(FlatReward, reward_std=[-1.0, *[0.0] * 20])] == ["warn"]

    @pytest.mark.parametrize(("last", "severity"), [(1.0, "info"), (0.1, "warn")])
    def test_no_spread_in_a_solved_task_is_a_note(self, last: float, severity: str) -> None:
        rewards = [0.2, *[last + 1e-6 * i for i in range(20)]]
        found = shown(FlatReward, reward=rewards, reward_std=[0.3, *[0.0] * 20])
        assert [f.severity for f in found] == [severity]

    @pytest.mark.parametrize("name", ["accuracy", "reward_frac", "reward/zero", "reward_count", "fraction_reward"])
    def test_other_metrics_are_none(self, name: str) -> None:
        assert shown(FlatReward, **{name: [0.5] * 60}) == []


class TestKlBlowUp:
    @pytest.mark.parametrize(
        ("usual", "value", "told"), [(0.1, 1.0, False), (0.1, 1.01, True), (0.001, 0.1, False), (0.001, 0.11, True)]
    )
    def test_ten_times_the_usual_and_above_the_floor(self, usual: float, value: float, told: bool) -> None:
        found = shown(KlBlowUp, kl=[usual] * 16 + [value] * 5)
        assert [(f.step, f.severity, f.value, f.baseline, f.since) for f in found] == (
            [(18, "warn", value, usual, 16)] if told else []
        )
        assert all(f.limit == max(0.1, 10 * usual) for f in found)

    def test_eight_sigma(self) -> None:
        wide = [0.1, 0.1, 0.35] * 10
        assert shown(KlBlowUp, kl=wide + [2.05] * 4) == []
        assert shown(KlBlowUp, kl=wide + [2.15] * 4) != []

    def test_three_in_a_row_after_sixteen(self) -> None:
        assert shown(KlBlowUp, kl=[0.1] * 16 + [5.0, 5.0, 0.1] * 5) == []
        assert shown(KlBlowUp, kl=[0.1] * 15 + [5.0] * 3) == []
        assert [f.step for f in shown(KlBlowUp, kl=[0.1] * 16 + [5.0, math.nan, 5.0, math.inf, 5.0])] == [20]
        assert shown(KlBlowUp, loss=[0.1] * 16 + [5.0] * 5) == []

    def test_twelve_that_agree_are_a_new_level(self) -> None:
        assert [f.step for f in shown(KlBlowUp, kl=[0.1] * 16 + [5.0] * 12 + [5.0] * 20 + [60.0] * 3)] == [18, 50]


class TestMetricBounds:
    def test_once_until_it_has_come_back(self) -> None:
        bounds = lambda: MetricBounds({"kl": (0.0, 0.5)})  # noqa: E731
        found = shown(bounds, kl=[0.0, 0.5, 0.6, 0.7, 0.4, 0.6, 0.4, -0.1, 0.4, math.nan, math.inf])
        assert said(found) == [(2, "warn"), (5, "warn"), (7, "warn"), (9, "warn")]
        assert [f.limit for f in found] == [0.5, 0.5, 0.0, 0.5]
        assert [f.value for f in found[:3]] == [0.6, 0.6, -0.1]

    def test_others_only_have_to_be_finite(self) -> None:
        assert said(shown(MetricBounds, a=[1e300, -1e300, math.nan, 1.0, -math.inf])) == [(2, "warn"), (4, "warn")]
        assert len(shown(MetricBounds, a=[math.nan, 1.0], b=[math.inf, math.inf])) == 2
