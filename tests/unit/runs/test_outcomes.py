"""Healthy is said of a run whose loss fell; every other outcome has a word of its own."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from steadystep.runs.curve import Curve
from steadystep.runs.diagnosis import diagnose
from steadystep.runs.reading import Reading, fell
from steadystep.runs.run import Run, Series, StepUnit

N = 450
T = np.arange(N) / N


def noise(size: float, count: int = N, seed: int = 0) -> np.ndarray:
    return size * np.random.default_rng(seed).standard_normal(count)


HEALTHY = 2.0 + 3.0 * (1 + T * 30) ** -0.5 + noise(0.03)


def run(
    loss: np.ndarray, *, first: int = 0, every: int = 1, unit: StepUnit = "step", lr: np.ndarray | None = None,
    names: tuple[str, ...] = (), called: str = "loss",
) -> Run:  # fmt: skip
    steps = np.arange(len(loss), dtype=np.int64) * every + first
    others = {name: Series(steps, 1.0 + noise(0.05, len(loss))) for name in names}
    rates = Series() if lr is None else Series(steps, lr)
    return Run(
        name="r", path=Path("r"), source="csv", loss=Series(steps, np.asarray(loss, dtype=float)), lr=rates,
        metrics=others, columns={"loss": called}, step_unit=unit,
    )  # fmt: skip


def read(loss: np.ndarray, **options: object) -> Reading:
    return diagnose(run(loss, **options), guard=False)  # type: ignore[arg-type]


def test_a_loss_that_fell_is_healthy() -> None:
    reading = read(HEALTHY)
    assert (reading.healthy, reading.outcome) == (True, "healthy")


@pytest.mark.parametrize(
    ("name", "loss"),
    [
        ("jump", np.concatenate([[10.3], 43.7 + noise(6.0, N - 1)])),
        ("slow", 10.3 + 33.4 * (1 - np.exp(-T * 12)) + noise(0.5)),
        ("jump and half back", np.concatenate([[2.3], 2.9 + 900 * np.exp(-T[1:] * 30) + noise(0.05, N - 1)])),
        ("jump and back to the start", np.concatenate([[2.3], 2.31 + 900 * np.exp(-T[1:] * 60) + noise(0.01, N - 1)])),
        ("growth", 0.7 * np.exp(T * 12)),
        ("wild", np.concatenate([[10.3], 60 * np.exp(noise(0.8, N - 1))])),
        ("short", np.concatenate([[10.3], 43.7 + noise(2.0, 29)])),
    ],
)
def test_a_learning_rate_too_high_from_the_first_step_is_the_first_cause(name: str, loss: np.ndarray) -> None:
    reading = read(loss, lr=np.full(len(loss), 0.3))
    assert (reading.outcome, reading.findings[0].kind) == ("fault", "learning-rate-too-high"), name
    assert reading.findings[0].step == 0
    assert "the learning rate was up to 0.3" in reading.findings[0].evidence
    assert [pattern.kind for pattern in reading.troubles] == ["learning-rate-too-high"]


def test_a_loss_that_ends_above_its_start_is_not_healthy() -> None:
    early = 2.3 - 0.5 * T[:40] * N / 40
    reading = read(np.concatenate([early, np.full(20, 4.6) + noise(0.3, 20)]))
    assert reading.outcome == "fault"
    assert reading.findings[0].kind in ("learning-rate-too-high", "spike-unhealed", "divergence")


def test_a_few_good_points_before_the_rise_change_nothing() -> None:
    loss = np.concatenate([np.linspace(2.3, 1.6, 4), 4.6 + noise(0.1, 41)])
    reading = read(loss)
    assert (reading.outcome, reading.findings[0].kind) == ("fault", "learning-rate-too-high")
    assert "began at 2.3" in reading.findings[0].evidence


def test_a_plateau_of_a_resumed_run_is_a_note() -> None:
    loss = 2.8 + 0.15 * np.exp(-np.arange(N) / 10) + noise(0.002)
    reading = read(loss, first=29_020, every=10)
    assert (reading.outcome, reading.findings[0].kind, reading.findings[0].severity) == ("healthy", "plateau", "info")
    assert read(loss).findings[0].severity == "warn"


@pytest.mark.parametrize("size", [0.0, 0.002, 0.05])
def test_a_loss_that_did_not_fall_beyond_its_noise_is_not_learning(size: float) -> None:
    loss = 2.312 - 0.004 * T + noise(size)
    reading = read(loss)
    assert (reading.healthy, reading.outcome) == (False, "not-learning")
    assert reading.verdict.startswith("Not learning, cause unknown: loss 2.3")
    assert reading.findings[0].kind == "not-learning"


def test_noise_that_hides_the_fall_is_said() -> None:
    reading = read(1.2 * np.exp(noise(0.6, 100)))
    assert (reading.healthy, reading.outcome) == (None, "not-judged")
    assert "its noise hides whether it fell" in reading.verdict


def test_the_loss_of_guessing_is_not_learning_although_it_fell_to_it() -> None:
    loss = np.log(10) + 0.4 * np.exp(-np.arange(N) / 6) + noise(0.004)
    reading = read(loss)
    assert reading.outcome == "not-learning"
    assert "ln 10" in reading.findings[0].evidence
    assert read(loss - 0.12).outcome != "not-learning"


def test_a_learning_rate_of_zero_is_the_cause() -> None:
    reading = read(2.3 + noise(0.01), lr=np.zeros(N))
    assert (reading.outcome, reading.findings[0].kind) == ("fault", "learning-rate-too-low")
    assert "the learning rate was 0 at most" in reading.findings[0].evidence


@pytest.mark.parametrize(("count", "every", "outcome"), [(35, 1, "too-short"), (45, 1, "healthy"), (35, 10, "healthy")])
def test_few_steps_are_too_short_and_few_points_of_many_steps_are_not(count: int, every: int, outcome: str) -> None:
    loss = 2.0 + 3.0 * np.exp(-np.arange(count) / 10) + noise(0.02, count)
    reading = read(loss, every=every)
    assert reading.outcome == outcome
    assert (reading.verdict == "Too short to tell: 35 steps.") == (outcome == "too-short")


def test_a_short_log_that_ends_in_nan_has_a_fault() -> None:
    loss = np.append(HEALTHY[:20], np.nan)
    assert (read(loss).outcome, read(loss).findings[0].kind) == ("fault", "non-finite")
    assert read(np.array([2.0, np.nan])).outcome == "fault"


def test_ten_epochs_are_enough_and_ten_steps_are_not() -> None:
    loss = 0.69 * np.exp(-np.arange(10) / 4)
    assert read(loss, unit="epoch").outcome == "healthy"
    assert read(loss, unit="row").outcome == "too-short"
    assert read(loss[:4], unit="epoch").outcome == "too-short"
    assert read(loss[::-1], unit="epoch").findings[0].kind == "learning-rate-too-high"


@pytest.mark.parametrize(
    ("names", "called", "said"),
    [
        (("reward", "kl"), "loss", "reinforcement learning"),
        (("rollout/ep_rew_mean",), "train/loss", "reinforcement learning"),
        (("train/approx_kl",), "train/loss", "reinforcement learning"),
        (("episode_return",), "loss", "reinforcement learning"),
        (("actor_loss",), "critic_loss", "reinforcement learning"),
        (("Loss_G",), "Loss_D", "a GAN"),
        (("errG",), "errD", "a GAN"),
        (("loss/generator", "acc"), "loss/discriminator", "a GAN"),
    ],
)
def test_an_objective_whose_level_says_nothing_is_not_judged(names: tuple[str, ...], called: str, said: str) -> None:
    rising = 0.5 + 2.0 * T + noise(0.1)
    reading = read(rising, names=names, called=called)
    assert (reading.healthy, reading.outcome) == (None, "not-judged")
    assert reading.verdict.startswith(f"No sign of trouble, learning not judged: {said}; ")
    assert read(np.append(rising, np.nan), names=names, called=called).outcome == "fault"


def test_a_reward_that_never_changes_is_a_fault_of_any_objective() -> None:
    made = run(HEALTHY, names=("reward",))
    assert diagnose(made, guard=False).healthy is not False
    flat = replace(made, metrics={"reward": Series(made.loss.steps, np.ones(N))})
    reading = diagnose(flat, guard=False)
    assert (reading.outcome, [pattern.kind for pattern in reading.troubles]) == ("fault", ["flat-reward"])


@pytest.mark.parametrize("names", [("rewards/chosen", "rewards/margins"), ("loss_d",), ("loss_g",), ("kl",), ("mfu",)])
def test_other_objectives_are_judged(names: tuple[str, ...]) -> None:
    assert read(2.3 + noise(0.01), names=names).outcome == "not-learning"


def test_a_log_that_begins_late_says_nothing_about_the_start() -> None:
    flat = 2.8 + noise(0.01)
    reading = read(flat, first=29_020, every=10)
    assert (reading.healthy, reading.outcome, reading.troubles) == (None, "not-judged", ())
    assert "the log begins at step 29,020" in reading.verdict
    assert read(flat, first=10, every=10).outcome == "not-learning"
    assert read(HEALTHY, first=29_020, every=10).outcome == "healthy"
    rising = 2.8 + 0.6 * T
    assert read(rising, first=29_020, every=10).outcome == "fault"  # it was better in this very log
    warming = np.minimum(np.arange(N) / 100, 1.0) * 1e-3
    assert read(flat, first=29_020, every=10, lr=warming).outcome == "not-learning"  # it begins with the warmup


def test_a_rise_that_is_back_at_once_is_a_spike() -> None:
    for height in (np.array([1.0, 2.2]), np.array([0.8, 1.7, 2.4])):
        loss = HEALTHY.copy()
        loss[300 : 300 + len(height)] += height
        reading = read(loss)
        assert "divergence" not in {pattern.kind for pattern in reading.findings}
        assert reading.healthy


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("size", [0.01, 0.05, 0.2])
def test_the_fall_of_a_healthy_curve_is_seen_at_any_noise(size: float, seed: int) -> None:
    loss = (2.0 + 3.0 * (1 + T * 30) ** -0.5) * np.exp(noise(size, seed=seed))
    assert fell(Curve.of(run(loss)))
    assert fell(Curve.of(run(3.0 * np.exp(noise(size, seed=seed))))) is not True
