"""Losses of the first steps against the first one, and a model that is stuck at guessing."""

import random
from collections.abc import Iterable
from dataclasses import replace

import pytest

from steadystep.detectors import ConstantPrediction, Detector, EarlyDivergence
from steadystep.diagnosis import RunHistory, weigh
from steadystep.diagnosis.run_history import Opinion
from steadystep.records import Counterfactual, Diagnosis, Finding, Probe, Signals


def seen(detector: Detector, losses: Iterable[float]) -> list[tuple[int, str]]:
    steps = [Signals(step=i, loss=loss, grad_norm=1.0, lr=1e-3) for i, loss in enumerate(losses)]
    return [(f.step, f.severity) for signals in steps for f in detector.update(signals)]


class TestEarlyDivergence:
    def test_a_loss_of_1e15_at_step_2_asks_at_once(self) -> None:
        assert seen(EarlyDivergence(), [4.2, 4.1, 1e15, 4.0])[:1] == [(2, "act")]

    def test_a_hundredfold_asks_at_the_second_in_a_row_and_once_more_later(self) -> None:
        found = seen(EarlyDivergence(), [2.0, *[300.0] * 20])
        assert found[:3] == [(1, "info"), (2, "act"), (3, "info")]
        assert [step for step, severity in found if severity == "act"] == [2, 8]

    def test_less_and_later_are_left_to_others(self) -> None:
        assert seen(EarlyDivergence(), [2.0, *[190.0] * 63]) == []
        assert seen(EarlyDivergence(), [2.0] * 64 + [1e9] * 10) == []

    @pytest.mark.parametrize("first", [0.0, -1.0])
    def test_a_first_loss_that_is_no_scale_says_nothing(self, first: float) -> None:
        assert seen(EarlyDivergence(), [first, *[1e6] * 10]) == []


class TestWeighing:
    """What the first weights say about it."""

    finding = Finding(detector="early-divergence", step=3, severity="act", value=900.0, limit=200.0, baseline=2.0)

    def severity(self, counterfactual: Counterfactual | None, *, value: float = 900.0) -> str:
        signals = Signals(step=3, loss=value, grad_norm=1.0, lr=0.1, counterfactual=counterfactual)
        return weigh(signals, (replace(self.finding, value=value),))[0].severity

    def test_undone_where_the_batch_is_an_ordinary_one_for_them(self) -> None:
        assert self.severity(Counterfactual(step=-1, old_loss=2.3, current_loss=900.0, lr=0.1)) == "act"

    @pytest.mark.parametrize("then", [850.0, 100.0, 30.0, float("nan")])
    def test_a_note_where_it_is_the_data_or_a_moving_target(self, then: float) -> None:
        assert self.severity(Counterfactual(step=-1, old_loss=then, current_loss=900.0, lr=0.1)) == "info"

    def test_without_them_only_what_cannot_be_meant_is_said(self) -> None:
        assert self.severity(None) == "info"
        assert self.severity(None, value=1e15) == "warn"


class TestConstantPrediction:
    def noise(self, level: float, count: int, sigma: float = 0.02) -> list[float]:
        rng = random.Random(0)
        return [level * (1.0 + sigma * rng.gauss(0.0, 1.0)) for _ in range(count)]

    def test_a_leap_and_then_the_level_of_guessing_is_said_once(self) -> None:
        losses = [2.3, *self.noise(30.0, 20), *self.noise(2.35, 800)]
        assert seen(ConstantPrediction(), losses) == [(255, "warn")]

    def test_letters_guessed_by_their_frequency(self) -> None:
        assert seen(ConstantPrediction(), [4.17, *self.noise(12.0, 30), *self.noise(3.3, 800)]) == [(255, "warn")]

    @pytest.mark.parametrize(
        "losses",
        [
            [2.3] * 600,  # a plateau before anything is learned
            [2.3, *[30.0 * 0.97**i + 0.3 for i in range(600)]],  # comes back and learns
            [2.3, *[9.0] * 20, *[2.2 * 0.999**i for i in range(600)]],  # still going down
        ],
    )
    def test_other_curves_are_left_alone(self, losses: list[float]) -> None:
        assert seen(ConstantPrediction(), losses) == []

    def test_heavy_tails_are_no_leap(self) -> None:
        rng = random.Random(1)
        losses = [2.0, *(abs(rng.gauss(0.0, 1.0) / max(abs(rng.gauss(0.0, 1.0)), 1e-3)) for _ in range(600))]
        assert seen(ConstantPrediction(), losses) == []


class TestOpinion:
    def run(self, causes: Iterable[str]) -> list[tuple[int, str]]:
        opinion, said = Opinion(), []
        for step, cause in enumerate(causes):
            found = opinion.formed(step, lambda cause=cause: (Diagnosis(cause=cause),))
            said += [] if found is None else [(step, found.cause)]
        return said

    def test_two_looks_must_agree_and_it_is_said_once(self) -> None:
        assert self.run(["learning-rate-too-high"] * 3000) == [(96, "learning-rate-too-high")]
        assert self.run(["dead-units"] * 90 + ["healthy"] * 3000) == []

    def test_a_standstill_has_more_time(self) -> None:
        assert self.run(["no-learning"] * 3000) == [(1024, "no-learning")]

    def test_looks_are_few(self) -> None:
        opinion, views = Opinion(), []
        for step in range(1025):
            opinion.formed(step, lambda step=step: views.append(step) or (Diagnosis(),))
        assert views == [64, 96, 128, 192, 256, 384, 512, 768, 1024]

    def test_a_resumed_run_says_nothing_twice(self) -> None:
        first, second = Opinion(), Opinion()
        bad = (Diagnosis(cause="dead-units"),)
        said = [first.formed(step, lambda: bad) for step in range(100)]
        second.load_state_dict(first.state_dict())
        assert sum(one is not None for one in said) == 1
        assert all(second.formed(step, lambda: bad) is None for step in range(100, 1000))


def test_a_loss_of_exactly_nothing_can_be_diagnosed() -> None:
    run_history = RunHistory()
    for step in range(400):
        probe = Probe(step=step, names=("weight",), weight_rms=(1.0,), update_rms=(0.05,)) if step % 128 == 1 else None
        signals = Signals(step=step, loss=0.0, grad_norm=0.0, lr=0.1, probe=probe)
        run_history.note(signals, Diagnosis(), stepped=True)
    assert run_history.diagnose()[0].cause == "suspicious-perfection"
