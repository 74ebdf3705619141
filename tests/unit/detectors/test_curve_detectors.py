"""Detectors that read nothing but the curves: each is quiet where a healthy run may go, and speaks where it may not."""

import csv
import math
import os
import random
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import steadystep
from steadystep.detectors import Detector
from steadystep.detectors.clip_rate import ClipRate
from steadystep.detectors.gradient_build_up import GrowingGradient
from steadystep.detectors.inputs import LearningRateBounds
from steadystep.detectors.no_learning import NoLearning
from steadystep.detectors.non_finite import LossScale
from steadystep.detectors.oscillation import Oscillation
from steadystep.detectors.vanishing_gradient import SuspiciousPerfection
from steadystep.records import Finding, Signals

ALL: list[Callable[[], Detector]] = [
    Oscillation,
    GrowingGradient,
    lambda: ClipRate(1.0),
    LossScale,
    NoLearning,
    SuspiciousPerfection,
    lambda: LearningRateBounds(1e-9, 10.0),
]


def seen(detector: Detector, **curves: Iterable[Any]) -> list[Finding]:
    """What a detector says about curves given by the names of the signals; the others are healthy constants."""
    plain: dict[str, Any] = {"loss": 1.0, "grad_norm": 0.5, "lr": 1e-3}
    steps = zip(*curves.values(), strict=True)
    signals = (Signals(step=i, **plain | dict(zip(curves, values, strict=True))) for i, values in enumerate(steps))
    return [finding for s in signals for finding in detector.update(s)]


def said(found: Sequence[Finding]) -> list[tuple[int, str]]:
    return [(finding.step, finding.severity) for finding in found]


def noise(count: int, sigma: float, *, level: float = 0.0, seed: int = 0) -> list[float]:
    rng = random.Random(seed)
    return [level + rng.gauss(0.0, sigma) for _ in range(count)]


class TestOscillation:
    def test_a_growing_swing_that_gains_nothing_is_a_warning_said_once(self) -> None:
        losses = [1.0 + 0.1 * 1.02**i * (1 + (-1) ** i) + n for i, n in enumerate(noise(256, 0.01))]
        found = seen(Oscillation(), loss=losses)
        assert said([f for f in found if f.severity == "warn"]) == [(63, "warn")]
        assert "every 2 steps" in found[0].what
        assert found[0].value > found[0].limit

    def test_a_steady_cycle_is_a_note(self) -> None:
        """Two tasks in turn, or a few fixed batches per epoch, look like this in a healthy run."""
        for period in (2, 4, 6, 8):
            losses = [2.0 + 0.3 * math.cos(2 * math.pi * i / period) + n for i, n in enumerate(noise(2100, 0.02))]
            found = seen(Oscillation(), loss=losses)
            assert said(found) == [(63, "info"), (2047, "info")]
            assert f"every {period} steps" in found[0].what

    def test_two_tasks_of_which_one_is_learned_are_healthy(self) -> None:
        losses = [2.3 * (0.99**i if i % 2 else 1.0) + n for i, n in enumerate(noise(640, 0.01))]
        assert {f.severity for f in seen(Oscillation(), loss=losses)} == {"info"}
        assert seen(Oscillation(), loss=losses[:64]) == []

    def test_a_task_that_gains_what_the_other_loses_is_no_warning(self) -> None:
        losses = [2.0 + 0.2 * 1.015**i * (-1) ** i + n for i, n in enumerate(noise(64, 0.01))]
        assert said(seen(Oscillation(), loss=losses)) == [(63, "info")]

    def test_a_swing_that_shrinks_or_goes_down_is_healthy(self) -> None:
        falling = [5.0 - 0.02 * i + 0.3 * (-1) ** i for i in range(192)]
        assert seen(Oscillation(), loss=falling) == []

    def test_a_swing_too_small_to_matter_is_ignored(self) -> None:
        assert seen(Oscillation(), loss=[3.0 + 0.1 * (-1) ** i for i in range(640)]) == []

    def test_independent_noise_is_healthy(self) -> None:
        for seed, (level, sigma) in enumerate([(3.0, 0.5), (0.0, 1.0), (-1e5, 2e4), (2.0, 1.0)]):
            assert seen(Oscillation(), loss=noise(10_000, sigma, level=level, seed=seed)) == []

    def test_half_a_cycle_and_half_noise_is_no_cycle(self) -> None:
        losses = [2.0 + 0.5 * (-1) ** i + n for i, n in enumerate(noise(64, 0.5, seed=10))]
        assert seen(Oscillation(), loss=losses) == []

    def test_a_short_last_batch_is_healthy(self) -> None:
        losses = [2.0 + (1.0 if i % 20 == 19 else 0.0) + n for i, n in enumerate(noise(2000, 0.1))]
        assert seen(Oscillation(), loss=losses) == []

    def test_noise_that_outgrows_itself_on_no_better_level_is_a_note(self) -> None:
        losses = [*noise(128, 0.02, level=1.0), *(abs(n) for n in noise(128, 1.0, level=3.0))]
        found = seen(Oscillation(), loss=losses)
        assert said(found) == [(191, "info")]
        assert "times its earlier amplitude" in found[0].what

    def test_wild_from_the_start_is_a_note_once_it_is_worse_than_there(self) -> None:
        found = seen(Oscillation(), loss=[1.0, 1.0, 1.0, 1.0, *(abs(n) for n in noise(124, 2.0, level=6.0))])
        assert [f.severity for f in found] == ["info"]
        assert "it began at 1" in found[0].what


def growth(found: list[Finding]) -> list[int]:
    assert all(f.severity == "warn" for f in found)
    return [f.step for f in found]


class TestGrowingGradient:
    def test_a_ramp_from_the_start_is_told_after_32_steps_once(self) -> None:
        found = seen(GrowingGradient(), grad_norm=[0.5 * (i + 1) for i in range(1500)])
        assert growth(found) == [31]
        assert 24.0 < found[0].value < 25.0
        assert "without zero_grad" in found[0].what

    def test_later_on_a_ramp_is_not_its_business(self) -> None:
        assert seen(GrowingGradient(), grad_norm=[0.5] * 32 + [0.5 * (i + 1) for i in range(100)]) == []

    def test_other_ways_to_grow_are_not_its_business(self) -> None:
        ways = {
            "explosion": [math.exp(0.1 * i) for i in range(200)],
            "drift": [0.01 * 1.003**i for i in range(3000)],
            "warm-up": [0.5 * min(5.0, 1.0 + 0.1 * i) for i in range(300)],
            "falling": [15.0 / (1.0 + i) for i in range(300)],
            "one dip": [1e-6, *[1.0] * 100],
            "zero": [0.0] * 200,
            "a line that is not steep": [1.0 + 0.2 * i for i in range(200)],
            "a sum of independent gradients": [math.sqrt(i + 1.0) for i in range(200)],
            "a deep net that starts near zero": [(1.0 + i) ** 1.2 for i in range(200)],
            "levels off": [1.0, 2.2, 4.4, 4.8, *(9.0 + 0.01 * i for i in range(200))],
            "late burst": [1.0, 1.3, 1.6, 1.7, *(2.1 + 0.1 * i for i in range(12)), *(12.0 + i for i in range(50))],
            "a line with teeth": [(i + 1.0) * (1.0 if i % 3 else 1.2) for i in range(200)],
        }
        for way, norms in ways.items():
            assert seen(GrowingGradient(), grad_norm=norms) == [], way

    def test_noise_is_healthy(self) -> None:
        for seed in range(100):
            rng = random.Random(seed)
            assert seen(GrowingGradient(), grad_norm=[math.exp(rng.gauss(0.0, 1.0)) for _ in range(40)]) == []

    @pytest.mark.parametrize("clears", [False, True])
    @pytest.mark.parametrize("name", ["Adam", "SGD"])
    def test_a_real_loop_that_forgets_zero_grad(self, name: str, clears: bool) -> None:
        model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
        optimizer = getattr(torch.optim, name)(model.parameters(), lr=1e-3 if name == "Adam" else 1e-2)
        detector, found = GrowingGradient(), []
        with steadystep.Guard(model, optimizer, config={"mode": "observe"}) as guard:
            for _ in range(80):
                x = torch.randn(32, 8)
                if clears:
                    optimizer.zero_grad()
                loss = nn.functional.cross_entropy(model(x), x[:, :4].argmax(1))
                loss.backward()
                guard.inspect(loss)
                optimizer.step()
                signals = guard.commit(stepped=True).signals
                assert signals is not None
                found += detector.update(signals)
        assert growth(found) == ([] if clears else [31])


class TestClipRate:
    def test_more_than_a_tenth_is_a_note_once_per_5000_steps(self) -> None:
        norms = [2.0 if i % 9 == 0 else 0.5 for i in range(6000)]
        assert said(seen(ClipRate(1.0), grad_norm=norms)) == [(99, "info"), (5099, "info")]

    def test_a_tenth_is_not(self) -> None:
        assert seen(ClipRate(1.0), grad_norm=[2.0 if i % 10 == 0 else 0.5 for i in range(2000)]) == []

    def test_at_the_limit_is_not_clipped(self) -> None:
        assert seen(ClipRate(1.0), grad_norm=[1.0] * 2000) == []

    def test_clipping_every_step_a_little_is_no_warning(self) -> None:
        assert said(seen(ClipRate(1.0), grad_norm=[9.9] * 3000)) == [(99, "info")]

    def test_a_clip_that_sets_the_step_is_a_warning_once(self) -> None:
        found = seen(ClipRate(1.0), grad_norm=[20.0 if i % 5 else 0.5 for i in range(20_000)])
        assert said([f for f in found if f.severity == "warn"]) == [(999, "warn")]

    def test_all_of_the_first_200_steps_cut_tenfold_are_a_warning_by_then(self) -> None:
        found = seen(ClipRate(1.0), grad_norm=[(9.0, 11.0, 12.0)[i % 3] for i in range(600)])
        assert said([f for f in found if f.severity == "warn"]) == [(199, "warn")]
        assert "66% of the last 200 gradient norms were more than 10 times max_norm = 1" in found[-1].what

    def test_an_optimizer_that_divides_by_the_gradient_does_not_mind(self) -> None:
        found = seen(ClipRate(1.0, scale_free=True), grad_norm=[20.0] * 3000)
        assert said(found) == [(99, "info"), (199, "info")]

    def test_an_optimizer_that_divides_by_the_gradient_is_warned_about_where_the_loss_falls(self) -> None:
        losses = [5.0 * 0.99**i + 1.0 for i in range(600)]
        found = seen(ClipRate(1.0, scale_free=True), grad_norm=[20.0] * 600, loss=losses)
        assert said(found) == [(99, "info"), (199, "warn")]
        assert "large and small gradients have the same effect" in found[-1].what

    @pytest.mark.parametrize("change", ["grows", "scatters", "negative", "critic", "kl"])
    def test_the_objective_of_a_policy_is_not(self, change: str) -> None:
        """Its loss may fall too: the critic learns, while the returns and so the gradients grow."""
        curves: dict[str, list[Any]] = {
            "loss": [5.0 * 0.99**i + 1.0 for i in range(600)],
            "grad_norm": [20.0 * (1.01**i if change == "grows" else 1.0) for i in range(600)],
            "names": [("critic.0.weight",) if change == "critic" else ("0.weight",)] * 600,
            "metrics": [{"approx_kl": 0.1} if change == "kl" else {}] * 600,
        }
        if change == "scatters":
            curves["loss"] = [max(0.1, 9.0 - 0.01 * i + n) for i, n in enumerate(noise(600, 2.0))]
        if change == "negative":
            curves["loss"] = [loss - 3.0 for loss in curves["loss"]]
        assert said(seen(ClipRate(1.0, scale_free=True), **curves)) == [(99, "info"), (199, "info")]

    def test_gradients_that_grow_beyond_the_limit_later_are_no_fault_of_the_limit(self) -> None:
        """As of a policy whose returns grow; this one was at the highest score there is."""
        norms = [0.6 + 0.005 * i for i in range(3000)]
        assert {f.severity for f in seen(ClipRate(0.1), grad_norm=norms)} == {"info"}

    def test_early_clipping_and_half_of_the_steps_are_no_warning(self) -> None:
        early = [20.0 if i % 10 else 2.0 for i in range(700)] + [0.5] * 2000
        half = [20.0 if i % 2 else 0.5 for i in range(3000)]
        for norms in (early, half):
            assert {f.severity for f in seen(ClipRate(1.0), grad_norm=norms)} == {"info"}

    def test_overflows_are_not_clipped_steps(self) -> None:
        assert seen(ClipRate(1.0), grad_norm=[math.inf, math.nan] * 1000) == []

    def test_a_limit_of_nothing_is_refused(self) -> None:
        with pytest.raises(steadystep.ConfigError, match="max_norm"):
            ClipRate(0.0)


def scales(cuts: Sequence[int], *, count: int, start: float = 65536.0) -> list[float]:
    return [start * 0.5 ** sum(cut <= i for cut in cuts) for i in range(count)]


class TestLossScale:
    def run(self, curve: list[float], *, scaled: bool = True) -> list[Finding]:
        return seen(LossScale(), scale=curve, scaled=[scaled] * len(curve))

    def test_three_cuts_in_fifty_steps_are_a_warning(self) -> None:
        found = self.run(scales([300, 320, 349], count=400))
        assert said(found) == [(349, "warn")]
        assert found[0].value == 3.0
        assert "8192" in found[0].what

    def test_three_cuts_over_more_steps_are_routine(self) -> None:
        assert self.run(scales([300, 325, 350], count=400)) == []
        assert self.run(scales([500, 2501, 4502], count=5000)) == []

    def test_calibration_is_routine(self) -> None:
        assert self.run(scales(range(12), count=400)) == []
        assert self.run(scales([190, 195, 199, 210, 220], count=400)) == []

    def test_a_row_of_cuts_after_the_scale_was_found_is_a_warning_while_calibrating_too(self) -> None:
        found = self.run(scales(range(20, 30), count=600))
        assert said(found) == [(24, "warn")]
        assert "reduced 5 times within 20 steps" in found[0].what
        assert said(self.run(scales([0, 1, 2, *range(20, 30)], count=600))) == [(24, "warn")]

    def test_single_cuts_while_gradients_still_grow_are_routine(self) -> None:
        assert self.run(scales([20, 27, 34, 41, 48], count=400)) == []

    def test_growth_is_routine(self) -> None:
        assert self.run([2.0 ** (i // 10) for i in range(400)]) == []

    def test_below_one_is_a_warning_even_while_calibrating(self) -> None:
        found = self.run(scales(range(20), count=100, start=8.0))
        assert said(found) == [(3, "warn")]
        assert "underflow" in found[0].what

    def test_is_heard_once_per_500_steps(self) -> None:
        found = self.run(scales(range(300, 1400, 10), count=1400, start=2.0**200))
        assert [f.step for f in found] == [320, 820, 1320]

    def test_without_a_scaler_there_is_nothing_to_say(self) -> None:
        assert self.run(scales(range(300, 400), count=500), scaled=False) == []


class TestNoLearning:
    def test_a_loss_that_stays_at_a_guess_is_a_note_once(self) -> None:
        found = seen(NoLearning(), loss=noise(3000, 0.02, level=math.log(10)))
        assert said(found) == [(319, "info")]
        assert "about ln(10)" in found[0].what

    def test_only_a_plausible_guess_is_named(self) -> None:
        for level, words in ((0.693, "ln(2)"), (0.9, ""), (6.9, "ln(99"), (12.0, ""), (0.01, "")):
            (found,) = seen(NoLearning(), loss=[level] * 320)
            assert words in found.what
            assert ("ln(" in found.what) == bool(words)

    def test_slow_learning_is_learning(self) -> None:
        assert seen(NoLearning(), loss=[2.3 * 0.9999**i for i in range(3000)]) == []

    def test_a_gain_within_the_noise_is_none(self) -> None:
        losses = [n - 0.15 * (i > 100) for i, n in enumerate(noise(320, 0.5, level=2.5))]
        assert len(seen(NoLearning(), loss=losses)) == 1
        assert seen(NoLearning(), loss=[loss - 0.4 * (i > 100) for i, loss in enumerate(losses)]) == []

    def test_it_waits_for_the_warm_up(self) -> None:
        rates = [1e-6 * i for i in range(1000)]
        learning = [2.3] * 900 + [1.0] * 2100
        assert seen(NoLearning(), loss=learning, lr=rates + [1e-3] * 2000) == []
        assert len(seen(NoLearning(), loss=[2.3] * 3000, lr=rates + [1e-3] * 2000)) == 1

    def test_a_loss_that_is_not_positive_has_no_level(self) -> None:
        assert seen(NoLearning(), loss=noise(3000, 0.1)) == []
        assert seen(NoLearning(), loss=[-1.0] * 1000) == []


class TestSuspiciousPerfection:
    def test_exactly_zero_for_16_steps_is_a_note_once(self) -> None:
        assert said(seen(SuspiciousPerfection(), loss=[0.0] * 100)) == [(15, "info")]

    def test_next_to_zero_counts_where_the_run_began_with_something(self) -> None:
        assert said(seen(SuspiciousPerfection(), loss=[0.5] + [1e-13] * 40)) == [(16, "info")]
        assert seen(SuspiciousPerfection(), loss=[1e-13] * 40) == []

    def test_a_zero_now_and_then_is_healthy(self) -> None:
        assert seen(SuspiciousPerfection(), loss=[1.0 if i % 16 == 15 else 0.0 for i in range(1000)]) == []

    def test_negative_losses_are_no_perfection(self) -> None:
        assert seen(SuspiciousPerfection(), loss=[1.0] + [-2.0] * 100) == []

    def test_a_nan_in_between_does_not_matter(self) -> None:
        losses = [1.0, *[0.0] * 8, math.nan, math.inf, *[0.0] * 8]
        assert said(seen(SuspiciousPerfection(), loss=losses)) == [(18, "info")]


class TestLearningRateBounds:
    def test_above_the_largest_is_a_warning_once(self) -> None:
        found = seen(LearningRateBounds(lr_max=1e-2), lr=[1e-3, 2e-2, 1e-3, 2e-2, 3e-2])
        assert said(found) == [(1, "warn")]
        assert "lr_max = 0.01" in found[0].what

    def test_a_sudden_fall_below_the_smallest_is_a_warning_once(self) -> None:
        found = seen(LearningRateBounds(lr_min=1e-4), lr=[1e-3] * 9 + [1e-5] * 9 + [1e-3] * 9 + [1e-6])
        assert said(found) == [(9, "warn")]
        assert "fell from 0.001 to 1e-05" in found[0].what

    def test_a_run_that_never_leaves_the_cellar_is_told(self) -> None:
        assert said(seen(LearningRateBounds(lr_min=1e-4), lr=[1e-5] * 300)) == [(99, "warn")]

    def test_a_plan_may_lead_below(self) -> None:
        plans = {
            "warm-up": [1e-6 * i for i in range(1000)],
            "line": [1e-3 * (1 - i / 1000) for i in range(1001)],
            "short line": [1e-3 * (1 - i / 20) for i in range(21)],
            "cosine": [5e-4 * (1 + math.cos(math.pi * i / 500)) for i in range(501)],
            "exponential": [1e-3 * 0.6**i for i in range(100)],
            "a small step": [1.5e-4] * 50 + [0.9e-4] * 200,
            "further down": [5e-5] * 50 + [1e-5] * 200,
            "late start": [1e-5] * 50 + [1e-3] * 100,
            "constant": [1e-3] * 500,
            "not a number": [math.nan, 1e-3, math.nan, 1e-3],
        }
        for plan, rates in plans.items():
            assert seen(LearningRateBounds(lr_min=1e-4, lr_max=1e-2), lr=rates) == [], plan

    def test_a_line_whose_last_step_goes_through_the_bound_is_a_plan(self) -> None:
        rates = [1e-3 * (1 - i / 1000) for i in range(1001)]
        assert seen(LearningRateBounds(lr_min=1e-9), lr=rates) == []

    def test_bounds_that_cross_are_refused(self) -> None:
        with pytest.raises(steadystep.ConfigError, match="must be below lr_max"):
            LearningRateBounds(lr_min=1.0, lr_max=0.1)


def warnings_about(losses: Sequence[float], norms: Sequence[float]) -> list[Finding]:
    found = [f for make in ALL for f in seen(make(), loss=losses, grad_norm=norms)]
    return [f for f in found if f.severity != "info"]


def test_real_curves_raise_no_warning() -> None:
    folder = os.environ.get("STEADYSTEP_TRACES")
    if not folder:
        pytest.skip("STEADYSTEP_TRACES does not say where the curves are")
    for name in ("llmc_gpt2_124M_20k", "optimizers_8d61", "quantfp4_433c", "scaleup1B_a", "valueembed_75a3"):
        with (Path(folder) / f"{name}.csv").open() as file:
            rows = [row for row in csv.DictReader(file) if row["loss"]]
        losses, norms = ([float(row[key] or 0.5) for row in rows] for key in ("loss", "grad_norm"))
        assert len(rows) > 1000
        assert warnings_about(losses, norms) == [], name


@pytest.mark.parametrize("full_batch", [True, False])
@pytest.mark.parametrize("optimizer", ["Adam", "SGD"])
def test_small_real_runs_raise_no_warning(optimizer: str, full_batch: bool) -> None:
    x = torch.randn(256, 8)
    y = x[:, :4].argmax(1)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))
    steps = getattr(torch.optim, optimizer)(model.parameters(), lr=0.01 if optimizer == "Adam" else 0.3)
    losses, norms = [], []
    for i in range(700):
        part = slice(None) if full_batch else slice(i % 4 * 64, i % 4 * 64 + 64)
        loss = nn.functional.cross_entropy(model(x[part]), y[part])
        steps.zero_grad()
        loss.backward()
        losses.append(loss.item())
        norms.append(torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]).item())
        steps.step()
    assert losses[-1] < 0.5 * losses[0]
    assert warnings_about(losses, norms) == []


@pytest.mark.parametrize(
    ("lrs", "speaks"),
    [
        ([i / 50 for i in range(51)] + [1.0] * 20, True),  # 50 steps are few for a beta2 of 0.99
        ([i / 300 for i in range(301)] + [1.0] * 20, False),
        ([1.0] * 60, False),  # no warm-up is no short warm-up
        ([0.9 + i / 100 for i in range(11)] + [1.0] * 5, False),
        ([1.0 - i / 100 for i in range(50)], False),
    ],
)
def test_a_warm_up_too_short_for_beta2_is_a_note(lrs: list[float], speaks: bool) -> None:
    from steadystep.detectors import ShortWarmup

    detector = ShortWarmup(beta2=0.99)
    found = [f for i, lr in enumerate(lrs) for f in detector.update(Signals(step=i, loss=1.0, grad_norm=1.0, lr=lr))]
    assert [(f.severity, f.value, f.limit) for f in found] == ([("info", 50.0, pytest.approx(200.0))] if speaks else [])
