"""Losses that stand out, stay up, creep up, or were better once; and learning rates that leap or come back."""

import json
import math
import random
from collections.abc import Callable, Iterable
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steadystep.detectors import (
    Detector,
    LearningRateCreep,
    LearningRateJump,
    LossSpike,
    NotHealing,
    SlowDivergence,
    WorseThanBest,
)
from steadystep.detectors.learning_rate_jump import PlannedRise
from steadystep.records import Finding, Signals

Curve = Callable[[int, random.Random], float]
STEPS = 2000


def fed(
    detector: Detector, losses: Iterable[float], *, lrs: Iterable[float] | None = None, start: int = 0
) -> list[Finding]:
    losses = list(losses)
    rates = [0.1] * len(losses) if lrs is None else list(lrs)
    pairs = enumerate(zip(losses, rates, strict=True), start)
    return [f for i, (x, lr) in pairs for f in detector.update(Signals(step=i, loss=x, grad_norm=1.0, lr=lr))]


def noise(count: int, sigma: float, *, level: float = 2.0, seed: int = 0) -> list[float]:
    rng = random.Random(seed)
    return [level + rng.gauss(0.0, sigma) for _ in range(count)]


def _restarts(i: int) -> float:
    return 0.05 + 0.95 * (1 + math.cos(math.pi * (i % 400) / 400)) / 2


HEALTHY: dict[str, Curve] = {
    "falling": lambda i, rng: 2.0 + 3.0 * math.exp(-i / 200) + rng.gauss(0.0, 0.05),
    "negative": lambda i, rng: -1e3 - 0.2 * i + rng.gauss(0.0, 30.0),
    "zero mean": lambda i, rng: rng.gauss(0.0, 1.0),
    "a sum of 1e5": lambda i, rng: 1e5 * (1.0 + math.exp(-i / 300)) * (1.0 + rng.gauss(0.0, 0.05)),
    "flat": lambda i, rng: 2.302585 + rng.gauss(0.0, 1e-6),
    "constant": lambda i, rng: 0.693,
    "in steps of bf16": lambda i, rng: round((2.5 + rng.gauss(0.0, 0.003)) * 64) / 64,
    "short last batch": lambda i, rng: 1.0 + math.exp(-i / 300) + rng.gauss(0.0, 0.3 if i % 50 == 49 else 0.05),
    "drift of twenty times": lambda i, rng: 20.0 ** (1.0 - i / STEPS) * (1.0 + rng.gauss(0.0, 0.05)),
    "warm restarts": lambda i, rng: 1.0 + math.exp(-i / 300) + 0.4 * _restarts(i) + rng.gauss(0.0, 0.03),
    "early transient": lambda i, rng: 2.3 + (4.0 * math.exp(-((i - 5) ** 2) / 8.0)) + rng.gauss(0.0, 0.05) - i / 2000,
    "one jump that heals": lambda i, rng: 2.0 + rng.gauss(0.0, 0.05) + (3.0 if i % 500 in (400, 401) else 0.0),
}


def test_no_more_than_a_note_on_healthy_losses() -> None:
    for kind, curve in HEALTHY.items():
        rng = random.Random(f"0 {kind}")
        losses = [curve(i, rng) for i in range(STEPS)]
        rates = [_restarts(i) for i in range(STEPS)] if kind == "warm restarts" else None
        for detector in (LossSpike(), SlowDivergence(), WorseThanBest()):
            found = fed(detector, losses, lrs=rates)
            assert {f.severity for f in found} <= {"info"}, (kind, detector.name)
            assert found == [] or kind not in ("falling", "zero mean", "flat", "constant"), (kind, detector.name)
        assert fed(NotHealing(), losses, lrs=rates) == [], kind


class TestLossSpike:
    def test_value_limit_and_usual(self) -> None:
        detector = LossSpike()
        losses = noise(256, 0.05)
        assert fed(detector, losses) == []
        median, spread = detector._level.median, detector._level.spread
        assert spread == pytest.approx(0.05, rel=0.3)
        limit = median + 8.0 * spread
        assert fed(detector, [limit - 1e-6], start=256) == []
        (found,) = fed(detector, [limit + 1.0], start=257)
        assert (found.step, found.severity, found.value) == (257, "info", limit + 1.0)
        assert found.baseline == median
        assert found.limit == limit

    @given(st.floats(3.0, 20.0), st.sampled_from([1.0, -1.0, 0.0]), st.integers(-8, 8))
    def test_any_sign_and_scale(self, deviations: float, sign: float, power: int) -> None:
        scale = 10.0**power
        level = sign * 3.0
        detector = LossSpike(deviations=deviations)
        losses = [scale * (level + (i % 5 - 2) / 10) for i in range(64)]  # one sigma upwards is 0.2
        assert fed(detector, losses) == []
        assert fed(detector, [scale * (level + 0.99 * 0.2 * deviations)]) == []
        assert len(fed(detector, [scale * (level + 1.02 * 0.2 * deviations)])) == 1

    def test_rounding_is_no_spike(self) -> None:
        detector = LossSpike()
        assert fed(detector, [1.0] * 64) == []
        eps = 1.1920928955078125e-07
        assert fed(detector, [1.0 + 30 * eps]) == []
        assert len(fed(detector, [1.0 + 40 * eps])) == 1

    def test_low_losses_are_welcome(self) -> None:
        detector = LossSpike()
        assert fed(detector, noise(64, 0.05) + [-1e9] * 3 + noise(8, 0.05)) == []

    def test_a_new_level_is_noted_twelve_times_less_one(self) -> None:
        detector = LossSpike()
        assert len(fed(detector, [*noise(64, 0.05), *noise(60, 0.05, level=9.0)])) == 11

    def test_is_armed_after_24_losses(self) -> None:
        assert fed(LossSpike(), [1.0] * 23 + [1e9]) == []
        assert len(fed(LossSpike(), [1.0] * 24 + [1e9])) == 1


class TestNotHealing:
    def test_notes_the_sixth_raised_loss_and_asks_once_when_it_lasts(self) -> None:
        detector = NotHealing()
        fed(detector, noise(200, 0.05))
        baseline, limit = detector._level.median, detector._limit(Signals(step=0, loss=0.0, grad_norm=0.0))
        noted, asked = fed(detector, noise(200, 0.05, level=5.0), start=200)
        assert (noted.step, noted.severity) == (205, "info")
        assert asked.severity == "act"
        assert 210 <= asked.step <= 240
        for found in (noted, asked):
            assert (found.since, found.baseline, found.limit) == (200, baseline, limit)
            assert found.value > found.limit
        assert limit == pytest.approx(baseline + 8 * detector._level.spread, rel=0.1)

    def learned(self, *, to: float = 2.0) -> NotHealing:
        """Ten down to two, in 300 steps."""
        detector = NotHealing()
        fed(detector, [to + (10.0 - to) * math.exp(-i / 30) + n for i, n in enumerate(noise(300, 0.02, level=0.0))])
        return detector

    def loudest(self, detector: NotHealing, losses: list[float]) -> list[str]:
        return [f.severity for f in fed(detector, losses, start=300) if f.severity != "info"]

    def test_what_is_lost_says_how_grave_it_is_and_how_long_is_waited(self) -> None:
        assert self.loudest(self.learned(), [3.0] * 60) == ["warn"]
        assert self.loudest(self.learned(), [5.0] * 60) == ["act"]
        assert self.loudest(self.learned(), [9.0] * 60) == ["act"]
        assert self.loudest(self.learned(), [5.0] * 17) == []
        waited = [fed(self.learned(), [level] * 60, start=300)[-1].step for level in (3.0, 9.0)]
        assert waited[0] > waited[1]

    def test_what_is_coming_down_is_left_alone(self) -> None:
        assert self.loudest(self.learned(), [2.0 + 5.0 * 0.97**i for i in range(60)]) == []

    def test_so_is_what_has_healed_by_itself_before(self) -> None:
        """A stretch is news only when it is twice as long as the longest that has healed."""
        for before, told in ((0, ["act"]), (16, [])):
            detector = self.learned()
            bump = [7.0] * before + [2.0] * 40
            losses = [*bump, *([7.0] * 26)]
            assert self.loudest(detector, losses) == told

    def test_so_is_a_loss_that_has_been_negative(self) -> None:
        for to, told in ((-1.0, []), (1.0, ["act"])):
            assert self.loudest(self.learned(to=to), [8.0] * 60) == told

    def test_many_in_agreement_are_the_new_level(self) -> None:
        detector = NotHealing()
        fed(detector, noise(200, 0.05))
        fed(detector, [5.0] * 40, start=200)
        assert detector._level.median < 3.0
        fed(detector, [5.0] * 60, start=240)
        assert detector._level.median == 5.0
        (found,) = fed(detector, [9.0] * 10, start=300)
        assert (found.step, found.since, found.baseline) == (305, 300, 5.0)

    def test_one_that_heals_is_none(self) -> None:
        detector = NotHealing()
        for i in range(0, 500, 25):
            assert fed(detector, [*noise(20, 0.05, seed=i), *noise(5, 0.05, level=6.0)], start=i) == []

    def test_a_good_one_in_between_only_delays_it(self) -> None:
        detector = NotHealing()
        fed(detector, noise(200, 0.05))
        (found,) = fed(detector, [6.0, 6.0, 6.0, 2.0, 6.0, 6.0, 6.0, 6.0], start=200)
        assert (found.step, found.since) == (207, 200)

    def test_a_rise_too_small_to_matter_is_none(self) -> None:
        """Two hundredths of the loss, or of the way it has come."""
        assert fed(NotHealing(), [*noise(100, 1e-4), *noise(20, 1e-4, level=2.03)]) == []
        assert len(fed(NotHealing(), [*noise(100, 1e-4), *noise(17, 1e-4, level=2.05)])) == 1
        come_far = [100.0 * 0.9**i + 1.0 for i in range(150)] + noise(130, 1e-4, level=1.0)
        assert fed(NotHealing(), [*come_far, *noise(20, 1e-4, level=2.9)]) == []
        assert len(fed(NotHealing(), [*come_far, *noise(17, 1e-4, level=3.1)])) == 1

    def test_a_learning_rate_that_comes_back_explains_a_rise(self) -> None:
        losses = [*noise(200, 0.05), *noise(50, 0.05, level=5.0)]
        assert fed(NotHealing(), losses, lrs=[1.0] * 100 + [0.1] * 100 + [1.0] * 50) == []
        assert fed(NotHealing(), losses, lrs=[0.1] * 200 + [1.0] * 50) != []

    def test_nan_is_neither_good_nor_bad(self) -> None:
        detector = NotHealing()
        fed(detector, noise(200, 0.05))
        (found,) = fed(detector, [6.0, math.nan, 6.0, 6.0, math.inf, 6.0, 6.0, 6.0], start=200)
        assert found.step == 207

    @given(st.floats(3.0, 12.0))
    def test_deviations_are_a_setting(self, deviations: float) -> None:
        steady = [2.0 + (i % 5 - 2) / 10 for i in range(100)]
        low, high = (2.0 + share * 0.2 * deviations for share in (0.99, 1.02))
        assert fed(NotHealing(deviations=deviations), [*steady, *[low] * 6]) == []
        assert len(fed(NotHealing(deviations=deviations), [*steady, *[high] * 6])) == 1


class TestSlowDivergence:
    def test_a_creeping_loss_is_noticed_before_it_has_cost_a_fifth(self) -> None:
        """.002 nats a step under noise of .05: ten seeds, nine at least, and the beginning is about right."""
        early = 0
        for seed in range(10):
            found = [f for f in fed(SlowDivergence(), self.creeping(seed)) if f.step >= 400]
            assert found
            first = found[0]
            early += first.step < 500 and first.since is not None and 380 <= first.since <= first.step
            assert first.value > first.limit > first.baseline
            assert first.baseline == pytest.approx(2.0, abs=0.05)
        assert early >= 9

    def creeping(self, seed: int, slope: float = 0.002) -> list[float]:
        creep = (x + slope * i for i, x in enumerate(noise(200, 0.05, seed=seed + 100)))
        return [*noise(400, 0.05, seed=seed), *creep]

    def learned(self, seed: int, slope: float = 0.002, *, steps: int = 400) -> list[float]:
        """Four down to two, and slowly up again."""
        fall = [x + 2.0 * math.exp(-i / 60) for i, x in enumerate(noise(steps, 0.05, seed=seed))]
        return [*fall, *(x + slope * i for i, x in enumerate(noise(400, 0.05, seed=seed + 100)))]

    def test_it_suspects_then_warns_once_and_asks_once_where_much_is_lost(self) -> None:
        for seed in range(4):
            for slope, expected in ((0.001, ["warn"]), (0.005, ["warn", "act"])):
                found = fed(SlowDivergence(), self.learned(seed, slope))
                loud = [f for f in found if f.severity != "info"]
                assert [f.severity for f in loud] == expected
                assert 400 <= loud[0].step < 520
                assert all(380 <= f.since <= 440 for f in loud)

    def test_where_nothing_has_been_learned_it_is_a_note(self) -> None:
        """There is little to lose, and such a loss swings by itself."""
        for seed in range(4):
            assert {f.severity for f in fed(SlowDivergence(), self.creeping(seed))} == {"info"}

    def test_a_level_that_wanders_is_measured_by_its_own_swings(self) -> None:
        """Up and down by 0.3 again and again: another such rise is no news, and a far larger one is."""
        swings = [0.3 * math.sin(i / 40) for i in range(1600)]
        calm = [x + 2.0 * math.exp(-i / 60) + y for i, (x, y) in enumerate(zip(noise(1600, 0.05), swings, strict=True))]
        loud = [f.step for f in fed(SlowDivergence(), calm) if f.severity != "info"]
        assert not [step for step in loud if step >= 500]  # the first one or two may be news
        lost = [*calm, *(x + 0.02 * i for i, x in enumerate(noise(400, 0.05, seed=9)))]
        assert "act" in {f.severity for f in fed(SlowDivergence(), lost)}

    def test_a_burst_is_over_before_it_warns(self) -> None:
        losses = self.learned(0, 0.0)
        for i in range(420, 450):
            losses[i] += 0.15
        assert {f.severity for f in fed(SlowDivergence(), losses)} <= {"info"}

    def test_one_wild_batch_does_not_even_raise_a_suspicion(self) -> None:
        assert fed(SlowDivergence(), [*noise(400, 0.05), 1e6, *noise(200, 0.05, seed=1)]) == []
        lucky = [*noise(400, 0.05, level=10.0), 0.0, 0.0, *noise(200, 0.05, level=10.0, seed=1)]
        assert fed(SlowDivergence(), lucky) == []

    def test_it_warns_sooner_where_the_learning_rate_has_never_been(self) -> None:
        sooner = []
        for seed in range(4):
            calm, climbing = (
                next(f.step for f in fed(SlowDivergence(), self.learned(seed, 0.001), lrs=lrs) if f.severity == "warn")
                for lrs in ([0.1] * 800, [0.1] * 400 + [0.1 * 1.02**i for i in range(400)])
            )
            sooner.append(calm - climbing)
        assert min(sooner) >= 0
        assert max(sooner) >= 5

    def test_a_learning_rate_that_comes_back_begins_anew(self) -> None:
        losses = [*noise(400, 0.05), *noise(200, 0.05, level=2.4)]
        assert fed(SlowDivergence(), losses, lrs=[1.0] * 200 + [0.1] * 200 + [1.0] * 200) == []
        assert fed(SlowDivergence(), losses) != []

    def test_a_negative_loss_may_rise_for_good_reasons(self) -> None:
        losses = [-1.0 + 0.002 * i + n for i, n in enumerate(noise(400, 0.05, level=0.0))]
        assert fed(SlowDivergence(), losses) == []

    def test_a_policy_that_wanders_is_quiet_when_the_last_negative_loss_is_forgotten(self) -> None:
        losses = [math.sin(i / 150) + n for i, n in enumerate(noise(1000, 0.3, level=0.0))]
        assert fed(SlowDivergence(), losses) == []

    def test_a_rise_too_small_to_matter_is_none(self) -> None:
        losses = [*noise(400, 0.001), *noise(400, 0.001, level=2.03)]
        assert fed(SlowDivergence(), losses) == []
        assert fed(SlowDivergence(), [*noise(400, 0.001), *noise(400, 0.001, level=2.05)]) != []

    def test_a_suspicion_that_stays_is_told_again(self) -> None:
        """So that an old batch is asked again: at the next mark, or after 32 steps without one."""
        swings = [2.0 + 0.1 * (-1) ** i for i in range(400)]
        raised = [2.0945 + 0.1 * (-1) ** i for i in range(200)]  # a tenth of a sigma a step more than the slack takes
        found = fed(SlowDivergence(), [*swings, *raised])
        told = [f.step for f in found]
        assert [b - a for a, b in pairwise(told)][-3:] == [32, 32, 32]

    def test_a_warning_does_not_wait_for_the_next_mark(self) -> None:
        """Notes are eight steps apart at least, once the first ones are told; a warning may come in between."""
        found = [f for seed in range(4) for f in fed(SlowDivergence(), self.learned(seed))]
        apart = [(b.step - a.step, b.severity) for a, b in pairwise(found) if b.step > a.step > 420]
        assert min(steps for steps, severity in apart if severity == "info") >= 8
        assert min(steps for steps, severity in apart if severity == "warn") < 8


class TestWorseThanBest:
    def test_three_windows_above_the_best_are_a_warning_once(self) -> None:
        losses = [*noise(64, 0.05, level=2.5), *noise(192, 0.05), *noise(640, 0.05, level=2.3, seed=1)]
        (found,) = fed(WorseThanBest(), losses)
        assert (found.step, found.severity) == (64 + 192 + 3 * 64 - 1, "warn")
        assert found.baseline == pytest.approx(2.0, abs=0.03)
        assert found.since in (127, 191, 255)
        assert found.value == pytest.approx(2.3, abs=0.03)
        assert found.baseline < found.limit < found.value

    def test_two_windows_are_not_enough(self) -> None:
        losses = [*noise(256, 0.05), *noise(128, 0.05, level=2.3, seed=1), *noise(256, 0.05, seed=2)]
        assert fed(WorseThanBest(), losses * 2) == []

    def test_within_the_noise_of_one_loss_or_a_thirtieth_it_is_none(self) -> None:
        assert fed(WorseThanBest(), [*noise(256, 0.3), *noise(640, 0.3, level=2.1, seed=1)]) == []
        assert fed(WorseThanBest(), [*noise(256, 0.001), *noise(640, 0.001, level=2.05, seed=1)]) == []
        come_far = [*noise(64, 0.001, level=22.0), *noise(256, 0.001), *noise(640, 0.001, level=2.5, seed=1)]
        assert fed(WorseThanBest(), come_far) == []
        assert fed(WorseThanBest(), come_far[64:]) != []

    def test_a_learning_rate_that_comes_back_begins_anew(self) -> None:
        losses = [*noise(256, 0.05), *noise(640, 0.05, level=2.3, seed=1)]
        assert fed(WorseThanBest(), losses, lrs=[1.0] * 100 + [0.1] * 156 + [1.0] * 640) == []

    def test_negative_losses_have_no_best(self) -> None:
        assert fed(WorseThanBest(), [*noise(256, 0.05, level=-1.0), *noise(256, 0.05, level=1.0)]) == []

    def test_the_next_best_is_measured_from_there(self) -> None:
        levels = [2.0, 2.5, 3.0]
        losses = [x for i, level in enumerate(levels) for x in noise(320, 0.05, level=level, seed=i)]
        found = fed(WorseThanBest(), losses)
        assert [round(f.baseline, 1) for f in found] == [2.0, 2.5]


class TestPlannedRise:
    rates = st.lists(st.floats(1e-8, 10.0), max_size=60)

    @given(rates)
    def test_climbing_to_where_it_has_never_been_is_no_plan(self, rates: list[float]) -> None:
        rise = PlannedRise()
        assert not any(rise.update(lr) for lr in sorted(rates))

    @given(st.integers(2, 40), st.integers(2, 5), st.floats(1e-6, 10.0))
    def test_each_warm_restart_is_told_once(self, length: int, cycles: int, peak: float) -> None:
        rise = PlannedRise()
        told = [rise.update(peak * (0.01 + 0.99 * (1 - i / length))) for _ in range(cycles) for i in range(length + 1)]
        at = [i for i, told_now in enumerate(told) if told_now]
        assert at == [(length + 1) * cycle for cycle in range(1, cycles)]

    @given(rates, st.integers(-20, 20))
    def test_no_scale_matters(self, rates: list[float], power: int) -> None:
        one, other = PlannedRise(), PlannedRise()
        assert [one.update(lr) for lr in rates] == [other.update(lr * 2.0**power) for lr in rates]

    @given(rates, st.integers(0, 60))
    def test_saved_anywhere_and_loaded_it_goes_on(self, rates: list[float], cut: int) -> None:
        one, other = PlannedRise(), PlannedRise()
        for lr in rates[:cut]:
            one.update(lr)
        other.load_state_dict(json.loads(json.dumps(one.state_dict(), allow_nan=False)))
        for lr in rates[cut:]:
            assert one.update(lr) == other.update(lr)
            assert one.climbing == other.climbing

    def test_what_is_not_finite_is_not_learned(self) -> None:
        rise = PlannedRise()
        for lr in (1.0, math.nan, math.inf, 0.1):
            assert not rise.update(lr)
        assert rise.update(1.0)
        assert not PlannedRise().climbing

    def test_what_a_scheduler_announced_is_a_plan(self) -> None:
        rise = PlannedRise()
        assert [rise.update(lr, 0.5) for lr in (0.1, 0.14, 0.3, 0.5, 0.9)] == [False, False, True, True, False]

    @staticmethod
    def climbs(rates: Iterable[float], announced: float = 0.0) -> list[int]:
        """The steps at which it climbs."""
        rise, at = PlannedRise(), []
        for step, lr in enumerate(rates):
            rise.update(lr, announced)
            at += [step] if rise.climbing else []
        return at

    def test_a_climb_from_rest_lasts_as_long_as_it_rises_and_100_steps(self) -> None:
        climb = [1.01**i for i in range(1, 101)]
        at = self.climbs([1.0] * 65 + climb + [climb[-1]] * 300)
        assert at == list(range(65 + 40, 65 + 100 + 100))  # from 1.5 times on
        assert self.climbs([1.0] * 65 + climb + [0.9] * 300) == list(range(65 + 40, 65 + 100))  # withdrawn

    def test_it_counts_from_what_was_announced(self) -> None:
        climb = [1.01**i for i in range(1, 101)]
        assert self.climbs([1.0] * 65 + climb, announced=max(climb)) == []
        assert self.climbs([1.0] * 65 + climb, announced=1.2)[0] == 65 + 59

    def test_a_warm_up_is_no_climb_while_it_lasts_nor_afterwards(self) -> None:
        for rates in (
            [(i + 1) / 1000 for i in range(1000)] + [1.0] * 500,
            [1.0 - math.cos(math.pi * i / 1000) for i in range(1000)] + [2.0] * 500,
            [1e-6 * 1.01**i for i in range(1400)],
            [0.0] * 200 + [(i + 1) / 1000 for i in range(1000)],
            [min(i // 200 + 1, 5) / 5 for i in range(2000)],  # by epochs
            [0.01] * 63 + [0.01 * 1.01**i for i in range(300)],  # not quite at rest yet
        ):
            assert self.climbs(rates) == []

    def test_a_second_warm_up_begins_with_a_fall(self) -> None:
        again = [(i + 1) / 100 for i in range(500)]
        assert self.climbs([1.0] * 200 + again) == []
        assert self.climbs([1.0] * 200 + [0.6 * 1.01**i for i in range(300)]) != []  # no fall to speak of

    def test_cycles_are_no_climb(self) -> None:
        triangle = [0.1 + abs((i / 300 + 1) % 2 - 1) for i in range(3000)]
        saw = [math.exp(-(i % 500) / 100) for i in range(3000)]
        for rates in (triangle, saw, [saw[0], *saw, *triangle]):
            assert self.climbs(rates) == []

    def test_a_leap_counts_for_100_steps_a_decision_does_not(self) -> None:
        assert self.climbs([1.0] * 200 + [3.0] * 300) == list(range(200, 301))
        assert self.climbs([1.0] * 200 + [2.5] * 300) == []
        assert self.climbs([1.0] * 200 + [2.5] * 10 + [3.0] * 10 + [4.0] * 300) == list(range(220, 321))


DECAY = [1e-3 * 0.98**i for i in range(300)]


class TestLearningRateJump:
    def jumps(self, rates: Iterable[float]) -> list[Finding]:
        rates = list(rates)
        return fed(LearningRateJump(), [1.0] * len(rates), lrs=rates)

    def test_a_leap_is_told_once_with_what_was_before(self) -> None:
        (found,) = self.jumps([0.01] * 40 + [0.3] * 40)
        assert (found.step, found.severity, found.value) == (40, "act", 0.3)
        assert found.baseline == 0.01
        assert found.limit == pytest.approx(0.1)

    def test_what_a_scheduler_announced_is_no_leap(self) -> None:
        for announced, told in ((0.3, 0), (0.29, 1)):
            detector = LearningRateJump()
            assert fed(detector, [1.0] * 40, lrs=[0.01] * 40) == []
            leap = Signals(step=40, loss=1.0, grad_norm=1.0, lr=0.3, announced_lr=announced)
            assert len(detector.update(leap)) == told

    def test_which_leaps_count(self) -> None:
        for rates, told in (
            ([0.01] * 40 + [0.1] * 9, []),  # ten times is not more than ten times
            ([0.01] * 40 + [0.101] * 9, [40]),
            ([0.01] * 31 + [0.3] * 9, []),  # the first steps of a warm-up
            ([0.01] * 40 + [0.01 * 1.2**i for i in range(60)], []),  # far, but gradually
            ([0.3] + [0.01] * 80 + [0.3], []),  # it has been there before
            ([0.01] * 40 + [math.nan, math.inf, -1.0] + [0.01] * 3, []),
            ([0.01] * 40 + [math.nan] + [0.3], [41]),
            ([0.01] * 40 + [0.3] * 3 + [9.0], [40, 43]),
        ):
            assert [f.step for f in self.jumps(rates)] == told

    def test_a_leap_late_in_a_decay_is_measured_by_the_present_rate(self) -> None:
        last = DECAY[-1]
        (found,) = self.jumps([*DECAY, 5e-4, 5e-4])
        assert (found.step, found.severity, found.baseline) == (300, "act", last)
        assert found.limit == pytest.approx(10.0 * last, rel=3.0)
        assert len(self.jumps([*DECAY, 5e-3])) == 1  # beyond the peak, if not by ten times

    def test_a_return_is_no_leap(self) -> None:
        for back in (8e-4, 1e-3, 1.1e-3, 9e-5):  # near the peak; so low that it does no harm
            assert self.jumps([*DECAY, back, back]) == []
        # Where restarts led to before, they may lead again.
        lower = [0.85 * lr for lr in DECAY]
        assert self.jumps([*DECAY, *lower, *(0.9 * lr for lr in lower), *(0.3 * lr for lr in lower)]) == []

    def test_a_dip_is_not_what_a_leap_is_measured_by(self) -> None:
        assert self.jumps([1e-2] * 100 + [1e-2, 1e-4, 1e-4, 4e-3, 1e-2]) == []

    def test_a_leap_that_was_withdrawn_is_told_again_and_three_of_them_are_a_habit(self) -> None:
        found = self.jumps([0.01] * 40 + [0.3, 0.3, 0.01, 0.01] * 6)
        assert [f.step for f in found] == [40, 44, 48]
        assert {f.baseline for f in found} == {0.01}

    def test_a_leap_that_stays_for_1000_steps_is_known(self) -> None:
        for stays, told in ((900, 2), (1100, 1)):
            assert len(self.jumps([0.01] * 40 + [0.3] * stays + [0.01] * 100 + [0.3])) == told

    def test_steps_without_a_rate_do_not_count(self) -> None:
        """A warm-up by epochs begins with one of 0."""
        assert [f.step for f in self.jumps([0.0] * 40 + [0.01] * 32 + [0.3])] == [72]


class TestLearningRateCreep:
    def creeps(self, rates: Iterable[float], announced: float = 0.0) -> list[Finding]:
        detector, found = LearningRateCreep(), []
        for step, lr in enumerate(rates):
            found += detector.update(Signals(step=step, loss=1.0, grad_norm=1.0, lr=lr, announced_lr=announced))
        return found

    def test_one_percent_a_step_is_told_once_at_three_times(self) -> None:
        rates = [0.01] * 100 + [0.01 * 1.01**i for i in range(1, 400)]
        (found,) = self.creeps(rates)
        assert found.severity == "act"
        assert (found.baseline, found.since) == (0.01, 100)
        assert found.value == rates[found.step] > found.limit == pytest.approx(0.03)
        assert rates[found.step - 1] <= 0.03

    def test_what_is_a_plan(self) -> None:
        climb = [0.01 * 1.02**i for i in range(200)]
        fall = [0.5 * 0.99**i for i in range(300)]
        for rates in (
            climb,  # a warm-up from the start
            [0.01] * 63 + climb,  # not quite at rest: 64 equal values are 63 steps without a rise
            [0.01] * 100 + [0.1] * 100,  # a decision, or a leap
            [*fall, *(min(fall[-1] * 1.02**i, 1.4) for i in range(300))],  # back to where it has been, and a bit more
            [0.01] * 100 + [min(lr, 0.03) for lr in climb],
            [0.0] * 100 + climb,
            [0.01] * 100 + [0.004 * 1.02**i for i in range(200)],  # a second warm-up begins with a fall
        ):
            assert self.creeps(rates) == []
        crept = [0.01] * 100 + climb
        assert len(self.creeps(crept)) == 1
        assert self.creeps(crept, announced=max(climb) / 3.0) == []

    def test_a_second_climb_is_news(self) -> None:
        first = [0.01] * 100 + [0.01 * 1.02**i for i in range(60)]
        second = [first[-1]] * 100 + [first[-1] * 1.02**i for i in range(60)]
        assert len(self.creeps([*first, *second])) == 2
