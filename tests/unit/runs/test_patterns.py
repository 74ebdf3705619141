"""Each pattern on a curve that shows it, and on the nearest one that does not."""

import math
import re
import sys
from pathlib import Path

import numpy as np
import pytest

from steadystep.pages import sparkline
from steadystep.runs.diagnosis import diagnose
from steadystep.runs.reading import Pattern, PlannedAction, Reading
from steadystep.runs.run import Run, Series

sys.path.append(str(Path(__file__).parents[3] / "benchmarks"))
from made_up_curves import CURVE_KINDS, CurveKind, made_up

N = 600
T = np.arange(N) / N


def noise(size: float, seed: int = 0, count: int = N) -> np.ndarray:
    return size * np.random.default_rng(seed).standard_normal(count)


def series(values: np.ndarray, every: int = 1) -> Series:
    return Series(np.arange(len(values), dtype=np.int64) * every, np.asarray(values, dtype=float))


def run(loss: np.ndarray, **others: object) -> Run:
    every = int(others.pop("every", 1))
    made = {name: series(value, every) for name, value in others.items() if isinstance(value, np.ndarray)}
    rest = {name: value for name, value in others.items() if not isinstance(value, np.ndarray)}
    return Run(name="r", path=Path("r"), source=rest.pop("source", "csv"), loss=series(loss, every), **made, **rest)


def read(loss: np.ndarray, **others: object) -> Reading:
    return diagnose(run(loss, **others))


def only(reading: Reading, kind: str) -> Pattern:
    found = [pattern for pattern in reading.findings if pattern.kind == kind]
    assert found, reading.findings
    return found[0]


def kinds(reading: Reading) -> set[str]:
    return {pattern.kind for pattern in reading.findings}


HEALTHY = 2.0 + 3.0 * (1 + T * 30) ** -0.5 + noise(0.03)


def test_a_healthy_run_is_called_healthy() -> None:
    reading = read(HEALTHY, grad_norm=np.exp(noise(0.2)), lr=np.full(N, 1e-3))
    assert reading.healthy
    assert reading.findings == ()
    assert reading.plans == ()
    assert reading.verdict.startswith("Healthy: loss 5")


def test_a_jump_that_heals_is_a_note() -> None:
    loss = HEALTHY.copy()
    loss[[300, 400]] += 1.0
    reading = read(loss)
    assert reading.healthy
    assert kinds(reading) == {"spikes-healed"}
    assert "2 jumps" in reading.findings[0].evidence
    assert "step 300" in reading.findings[0].evidence


def test_a_jump_that_stays_is_trouble_and_a_guard_would_have_gone_back() -> None:
    loss = HEALTHY.copy()
    loss[400:] += 2.0
    reading = read(loss, every=10, lr=np.full(N, 1e-3))
    assert reading.findings[0].kind == "spike-unhealed"
    assert reading.findings[0].step == 4000
    assert not reading.healthy
    assert "rollback" in reading.plans[0].action
    assert 4000 < reading.plans[0].step <= 4300
    assert re.search(r"since (about )?step (39|40)\d\d", reading.plans[0].reason)
    assert "with the weights of" not in reading.plans[0].reason  # nobody has tried any


def test_a_guard_would_not_have_gone_back_for_a_jump_that_comes_back() -> None:
    loss = HEALTHY.copy()
    loss[400:450] += 2.0
    reading = read(loss, lr=np.full(N, 1e-3))
    assert not [plan for plan in reading.plans if "rollback" in plan.action]


@pytest.mark.parametrize("every", [1, 10])
def test_a_ramp_is_a_divergence_and_the_first_signal_is_named(every: int) -> None:
    loss, norm = HEALTHY.copy(), np.exp(noise(0.1))
    loss[500:] += np.minimum(np.arange(100) * 0.4, 6.0)
    norm[497:] *= 20.0
    reading = read(loss, grad_norm=norm, every=every)
    found = reading.findings[0]
    assert found.kind == "divergence"
    assert abs(found.step - 501 * every) <= every
    assert "gradient norm came first" in found.evidence
    assert f"from step {497 * every} on" in found.evidence
    assert found.until is None


def test_a_creeping_loss_is_a_divergence_with_its_onset() -> None:
    loss = HEALTHY.copy()
    loss[300:] += 0.004 * np.arange(300)
    found = read(loss).findings[0]
    assert found.kind in ("divergence", "learning-rate-too-high")
    assert abs(found.step - 300) < 30


def test_a_run_that_falls_back_to_a_plateau_had_too_high_a_learning_rate() -> None:
    loss = 2.5 + 2.5 * np.exp(-T * 40) + noise(0.03)
    loss[150:] += 1.8 * (1 - np.exp(-np.arange(450) / 60))
    found = only(read(loss), "learning-rate-too-high")
    assert abs(found.step - 150) < 40
    assert "plateau" in found.evidence


def test_nan_with_where_it_began() -> None:
    loss = HEALTHY.copy()
    loss[450:] = math.nan
    reading = read(loss)
    assert (reading.findings[0].kind, reading.findings[0].severity, reading.findings[0].step) == (
        "non-finite",
        "critical",
        450,
    )
    assert reading.plans[0].step == 450
    assert reading.plans[0].action == "skip-step"
    loss[450:] = HEALTHY[450:]
    loss[450] = math.inf
    once = only(read(loss), "non-finite")
    assert (once.severity, once.until) == ("warn", 450)


def test_a_loss_of_exactly_zero_is_suspicious() -> None:
    loss = HEALTHY.copy()
    loss[400:] = 0.0
    assert only(read(loss), "suspicious-perfection").step == 400
    assert only(read(loss, source="transformers"), "hidden-nan").step == 400
    tiny = np.exp(-T * 30)
    assert "suspicious-perfection" not in kinds(read(tiny))


@pytest.mark.parametrize(("level", "classes"), [(math.log(10), 10), (math.log(1000), 1000)])
def test_a_flat_loss_has_learned_nothing(level: float, classes: int) -> None:
    reading = read(level + noise(0.01), lr=np.full(N, 1e-3))
    found = only(reading, "not-learning")
    assert f"ln {classes}" in found.evidence
    assert "0.001" in found.evidence
    assert reading.verdict.startswith("Not learning, cause unknown: loss ")
    assert (reading.healthy, reading.outcome) == (False, "not-learning")


def test_the_unigram_level_is_known() -> None:
    loss = 7.4 + (math.log(50_257) - 7.4) * np.exp(-T * 60) + noise(0.03)
    assert "token frequencies alone" in only(read(loss), "not-learning").evidence


def test_a_straight_line_down_is_a_learning_rate_too_low() -> None:
    assert "linearly" in only(read(2.3 - 0.15 * T + noise(0.005)), "learning-rate-too-low").evidence
    assert "learning-rate-too-low" not in kinds(read(HEALTHY))


def test_a_rise_while_the_learning_rate_warms_up_is_a_transient() -> None:
    loss = HEALTHY.copy()
    loss[30:34] += 4.0
    lr = np.minimum(np.arange(N) / 100, 1.0) * 1e-3
    reading = read(loss, lr=lr)
    assert kinds(reading) == {"warm-up-transient"}
    assert reading.healthy
    loss = HEALTHY.copy()
    loss[300:315] += 1.5
    assert only(read(loss, lr=lr), "spike-healed").severity == "warn"


def test_a_restart_is_no_spike() -> None:
    loss = HEALTHY.copy()
    loss[300] += 2.5
    reading = read(loss, restarts=(300,))
    assert reading.healthy
    assert only(reading, "restart").step == 300


def test_overfitting_is_a_rise_and_not_a_gap() -> None:
    train = 2.0 * np.exp(-T * 4) + 0.1 + noise(0.02)
    steps = np.arange(0, N, 30, dtype=np.int64)
    rising = Series(steps, 0.9 + 0.5 * np.abs(steps / N - 0.3) + noise(0.01, 1, 20))
    found = only(read(train, validation={"val_loss": rising}), "overfitting")
    assert abs(found.step - 180) <= 60
    level = Series(steps, 0.9 + 1.2 * np.exp(-steps / 60) + noise(0.01, 1, 20))
    reading = read(train, validation={"val_loss": level})
    assert kinds(reading) == {"generalisation-gap"}
    assert reading.healthy


def test_a_handful_of_epochs_is_enough_for_overfitting() -> None:
    steps = np.arange(6, dtype=np.int64) * 100 + 50
    validation = {"val_loss": Series(steps, np.array([1.0, 0.8, 0.75, 0.82, 0.95, 1.1]))}
    assert only(read(1.0 * np.exp(-T * 3) + noise(0.02), validation=validation), "overfitting").step == 250


def test_a_falling_accuracy_counts_too() -> None:
    steps = np.arange(0, N, 20, dtype=np.int64)
    accuracy = Series(steps, 0.9 - 0.4 * np.abs(steps / N - 0.4) + noise(0.004, 2, 30))
    train = 2.0 * np.exp(-T * 4) + 0.1 + noise(0.02)
    assert "error of val_acc" in only(read(train, validation={"val_acc": accuracy}), "overfitting").evidence


def test_norms_that_were_clipped_before_logging_or_never_measured() -> None:
    assert (
        only(read(HEALTHY, grad_norm=np.minimum(np.exp(noise(0.3)), 1.0)), "clipped-gradient-norm").severity == "info"
    )
    assert "not measured" in only(read(HEALTHY, grad_norm=np.zeros(N)), "stale-gradient-norm").evidence


def test_swings_that_follow_the_learning_rate_are_meant() -> None:
    wave = np.sin(2 * math.pi * np.arange(N) / 50)
    loss = 2.0 + 0.4 * wave + noise(0.03)
    assert only(read(loss), "oscillation").severity == "warn"
    assert only(read(loss, lr=1e-3 * (1.5 + wave)), "oscillation").severity == "info"


def test_a_policy_gradient_loss_has_no_level() -> None:
    reading = read(noise(1.0))
    assert (reading.healthy, reading.outcome) == (None, "not-judged")
    assert reading.verdict.startswith("No sign of trouble, learning not judged: a loss of both signs; ")


def test_a_few_points_are_too_few() -> None:
    reading = read(HEALTHY[:5])
    assert reading.verdict == "Too short to tell: 5 points."
    assert diagnose(Run(name="r", path=Path("r"), source="csv")).outcome == "too-short"


@pytest.mark.parametrize("kind", CURVE_KINDS)
def test_generated_curves_are_told_apart(kind: CurveKind) -> None:
    named = {"gap": {"generalisation-gap"}, "plateau": {"plateau", "underfitting"}, "healthy": set()}.get(kind, {kind})
    others = {"overfitting", "oscillation", "generalisation-gap", "plateau", "underfitting"} - named
    right = 0
    for seed in range(12):
        found = kinds(diagnose(made_up(kind, seed, longest=2000), guard=False))
        right += (bool(found & named) or kind == "healthy") and (not found & others or kind in ("gap", "overfitting"))
    assert right >= 11


def test_a_reading_goes_to_json_and_back() -> None:
    loss = HEALTHY.copy()
    loss[400:] += 2.0
    reading = read(loss)
    assert Reading.from_json(reading.to_json()) == reading
    assert isinstance(reading.plans[0], PlannedAction)
    step, action, reason = Reading.from_json(reading.to_json()).plans[0]
    assert (step, action, reason) == tuple(reading.plans[0])
    assert reading.as_dict()["plans"][0]["action"] == action


def test_a_long_log_is_replayed_around_what_stands_out() -> None:
    count = 120_000
    loss = 3.0 + 2.0 * (1 + np.arange(count) / 100) ** -0.5 + noise(0.05, 0, count)
    norm = np.exp(noise(0.2, 1, count))
    norm[70_000] *= 300.0
    loss[110_000:] += 2.0
    reading = read(loss, grad_norm=norm, lr=np.full(count, 1e-3))
    assert reading.findings[0].kind == "spike-unhealed"
    assert reading.findings[0].step == 110_000
    assert reading.plans[0].step == 70_000
    assert any(110_000 <= plan.step < 110_300 and "rollback" in plan.action for plan in reading.plans)
    assert len(reading.plans) < 10
    assert any("only the stretches around" in note for note in reading.notes)


def test_a_line_of_bars() -> None:
    loss = np.linspace(4.0, 1.0, 200)
    drawn = sparkline(run(loss), width=20)
    assert drawn.startswith("loss 4 █")
    assert drawn.endswith("▁ 1.143")  # the final loss of every view, not the last point
    loss[190:] = math.nan
    assert sparkline(run(loss), width=20).endswith("× nan")  # noqa: RUF001
    assert sparkline(run(np.full(50, math.nan)), width=5).count("×") == 5  # noqa: RUF001


def test_reading_needs_no_torch() -> None:
    import subprocess

    code = "import sys; from steadystep.runs import diagnose, open_run; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
