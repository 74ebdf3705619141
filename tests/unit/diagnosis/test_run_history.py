"""What a casebook remembers, and what it makes of it: rules shown by numbers, resume, bounded memory."""

import json
import math
from collections.abc import Iterable
from itertools import pairwise
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steadystep.detectors import NonFinite
from steadystep.diagnosis import RunHistory, explain
from steadystep.diagnosis.facts import LossCurve, Setup, guessing
from steadystep.diagnosis.ranking import rank
from steadystep.diagnosis.run_history import Opinion
from steadystep.records import BatchStats, Counterfactual, Diagnosis, Finding, InputStats, Plan, Probe, Signals
from tests.unit.diagnosis.made import trace
from tests.unit.diagnosis.test_mechanisms import outputs


def numbers(losses: Iterable[float], *, norm: float = 1.0, **more) -> RunHistory:
    run_history = RunHistory()
    for step, loss in enumerate(losses):
        signals = Signals(step=step, loss=loss, grad_norm=norm, lr=0.1, **more)
        run_history.note(signals, Diagnosis(), stepped=True)
    return run_history


def first(run_history: RunHistory) -> Diagnosis:
    return run_history.diagnose()[0]


def falling(count: int = 300) -> list[float]:
    return [2.0 / (1 + step / 20) for step in range(count)]


def baseline(ratio: float, **more) -> Probe:
    return Probe(step=9, names=("a.weight", "b.weight"), weight_rms=(0.1, 0.1), update_rms=(0.1 * ratio,) * 2, **more)


def warning(detector: str, step: int = 100, **more) -> Finding:
    return Finding(detector=detector, step=step, severity="warn", value=1.0, limit=0.5, what="something", **more)


def test_fp16_gradients_that_round_to_zero() -> None:
    lost = baseline(1e-3, zero_shares=(0.9, 0.95))
    assert first(numbers(falling(), scaled=True, probe=lost)).cause == "gradient-underflow"
    assert first(numbers(falling(), scaled=False, probe=lost)).cause == "healthy"


def test_noise_as_large_as_the_loss() -> None:
    noisy = [0.1 if step % 2 else 4.0 for step in range(300)]
    assert first(numbers(noisy, probe=baseline(0.03))).cause == "batch-size-unfit"
    assert first(numbers([loss - 2.0 for loss in noisy], probe=baseline(0.03))).cause == "healthy"
    assert first(numbers(noisy, probe=baseline(1e-3))).cause == "healthy"  # updates too small to follow it
    assert first(numbers(noisy, probe=baseline(0.2))).cause == "healthy"


def test_updates_as_large_as_the_weights() -> None:
    assert first(numbers(falling(), probe=baseline(0.5))).cause == "learning-rate-too-high"
    assert first(numbers(falling(), probe=baseline(0.05))).cause == "healthy"


def test_a_run_that_loses_what_it_learned() -> None:
    """By itself a loss that rises blames nothing: a target network raises it too. Large updates beside it do."""
    lost = [*falling(200), *(0.2 + step / 50 for step in range(100))]
    signals = Signals(step=300, loss=2.2, grad_norm=1.0)
    for ratio, expected in ((1e-3, "healthy"), (0.15, "learning-rate-too-high")):
        run_history = numbers(lost, probe=baseline(ratio))
        assert first(run_history).cause == "healthy"
        run_history.note(signals, explain(signals, (warning("slow-divergence", step=299),)), stepped=True)
        assert first(run_history).cause == expected
    assert "it was 0." in first(run_history).evidence


def test_what_older_weights_have_confirmed_is_enough_by_itself() -> None:
    run_history = numbers(falling())
    heard = Signals(
        step=300,
        loss=2.2,
        grad_norm=1.0,
        counterfactual=Counterfactual(step=250, old_loss=0.2, current_loss=2.2, batches=8),
    )
    found = (Finding(detector="slow-divergence", step=300, severity="act", value=2.2, limit=0.5, since=290),)
    run_history.note(heard, explain(heard, found), stepped=False)
    assert first(run_history).cause == "learning-rate-too-high"


@pytest.mark.parametrize("detector", ["oscillation", "slow-divergence", "worse-than-best"])
def test_a_warning_that_healed_is_forgiven(detector: str) -> None:
    signals = Signals(step=300, loss=0.12, grad_norm=1.0)
    well, badly = (numbers(losses, probe=baseline(0.15)) for losses in (falling(), [2.0] * 300))
    for run_history in (well, badly):
        run_history.note(signals, explain(signals, (warning(detector),)), stepped=True)
    assert first(well).cause == "healthy"
    assert first(badly).cause != "healthy"


@pytest.mark.parametrize("detector", ["slow-divergence", "worse-than-best"])
def test_signs_of_the_level_alone_blame_nothing(detector: str) -> None:
    """However many there are."""
    run_history = numbers([*falling(200), *(0.2 + step / 50 for step in range(100))])
    signals = Signals(step=300, loss=2.2, grad_norm=1.0)
    run_history.note(signals, explain(signals, (warning(detector),)), stepped=True)
    assert first(run_history).cause == "healthy"


def test_notes_alone_never_make_a_run_unhealthy() -> None:
    run_history = numbers(falling())
    signals = Signals(step=300, loss=0.12, grad_norm=1.0)
    names = ["loss-spike", "oscillation", "no-learning", "suspicious-perfection", "clip-rate", "update-ratio"]
    names += ["rms-surprise", "slow-divergence", "zero-gradient", "gradient-spike"]
    found = tuple(Finding(detector=n, step=300, severity="info", value=1.0, limit=0.5) for n in names)
    run_history.note(signals, explain(signals, found), stepped=True)
    assert first(run_history).cause == "healthy"


def test_a_detector_of_your_own_is_passed_on() -> None:
    run_history = numbers(falling())
    signals = Signals(step=300, loss=0.12, grad_norm=1.0)
    run_history.note(signals, explain(signals, (warning("mine", where=("a", "b")),)), stepped=True)
    assert (first(run_history).cause, first(run_history).evidence) == ("unknown", "something (a, b), at step 100")


def test_incidents_are_counted_and_dated() -> None:
    run_history = numbers(falling())
    for step in (300, 305, 311):
        signals = Signals(step=step, loss=math.nan, grad_norm=1.0)
        run_history.note(signals, explain(signals, NonFinite().update(signals)), stepped=False)
    diagnosis = first(run_history)
    assert diagnosis.cause == "non-finite-loss"
    assert diagnosis.evidence == "the loss is NaN, 3 times between steps 300 and 311"
    assert "log(0)" in diagnosis.advice


def test_a_cause_comes_before_its_consequences() -> None:
    run_history = numbers([2.0 - step / 1000 for step in range(300)])  # not halved: that would excuse it
    signals = Signals(step=300, loss=1.7, grad_norm=1.0)
    found = (warning("growing-gradient"), warning("vanishing-gradient"), warning("clip-rate"))
    run_history.note(signals, explain(signals, found), stepped=True)
    assert first(run_history).cause == "missing-zero-grad"
    assert {d.cause for d in run_history.diagnose()} > {"vanishing-gradient", "clipping-too-tight"}


@pytest.mark.parametrize(("detector", "cause"), [("dead-units", "dead-units"), ("saturated-units", "saturation")])
def test_units_that_rest_are_no_fault_in_a_run_that_learns(detector: str, cause: str) -> None:
    signals = Signals(step=300, loss=0.12, grad_norm=1.0)
    for losses, expected in ((falling(), "healthy"), ([3.3] * 300, cause), ([9.0, 5.0, 3.0] + [1.609] * 300, cause)):
        run_history = numbers(losses)
        run_history.note(signals, explain(signals, (warning(detector),)), stepped=False)
        assert first(run_history).cause == expected


def raw(**more: float) -> InputStats:
    plain = {"mean": 0.0, "std": 4000.0, "largest": 1e4, "constant_share": 0.0, "scale_spread": 1e4}
    return InputStats(batches=4, finite=True, **plain | more)


def with_inputs(losses: list[float], inputs: InputStats, **more: Any) -> RunHistory:
    run_history = numbers(losses, **more)
    run_history.note(Signals(step=300, loss=1.0, grad_norm=1.0, inputs=inputs), Diagnosis(), stepped=False)
    return run_history


def test_raw_inputs_are_no_fault_by_themselves() -> None:
    for inputs in (raw(), raw(std=100.0, scale_spread=1.0), raw(std=1.0, largest=30.0)):
        assert first(with_inputs(falling(), inputs)).cause == "healthy"
        assert first(with_inputs([170.0, 120.0, 60.0, 20.0, *falling()], inputs)).cause == "healthy"
        saturated = baseline(1e-3, modules=("a",), saturated=(0.9,), dead=(0.0,))
        assert first(with_inputs(falling(), inputs, probe=saturated)).cause == "healthy"
        assert first(with_inputs([3.3] * 300, inputs, probe=saturated)).cause == "unscaled-data"
        dead = baseline(1e-3, modules=("a",), saturated=(0.0,), dead=(1.0,))
        assert first(with_inputs(falling(), inputs, probe=dead)).cause == "unscaled-data"
        assert first(with_inputs([100.0] + [90.0] * 300, inputs)).cause == "unscaled-data"
        assert first(with_inputs([2.0, 500.0] + [1.61] * 300, inputs)).cause == "unscaled-data"


def test_raw_inputs_and_a_run_that_breaks_at_once() -> None:
    run_history = with_inputs([400.0], raw())
    assert first(run_history).cause == "healthy"
    signals = Signals(step=1, loss=math.nan, grad_norm=math.nan)
    found = Finding(detector="non-finite", step=1, severity="critical", value=math.nan, limit=1.0)
    run_history.note(signals, explain(signals, (found,)), stepped=False)
    assert [diagnosis.cause for diagnosis in rank(run_history.facts())] == ["unscaled-data", "non-finite-loss"]


def test_a_cause_comes_before_louder_consequences() -> None:
    run_history = numbers([*falling(200), *(0.2 + step / 50 for step in range(100))], probe=baseline(0.15))
    signals = Signals(step=300, loss=2.2, grad_norm=1.0)
    found = tuple(warning(detector) for detector in ("slow-divergence", "worse-than-best", "oscillation"))
    run_history.note(signals, explain(signals, found), stepped=True)
    assert first(run_history).cause == "learning-rate-too-high"
    run_history.note(signals, explain(signals, (warning("growing-gradient"),)), stepped=True)
    assert [d.cause for d in run_history.diagnose()][:2] == ["missing-zero-grad", "learning-rate-too-high"]


def test_weights_that_hardly_move_have_no_learning_rate_too_high() -> None:
    signals = Signals(step=300, loss=2.0, grad_norm=1.0)
    heard = Signals(
        step=301,
        loss=2.0,
        grad_norm=1.0,
        counterfactual=Counterfactual(step=250, old_loss=0.2, current_loss=2.0, batches=8),
    )
    found = (Finding(detector="slow-divergence", step=301, severity="act", value=2.0, limit=0.5, since=290),)
    for ratio, expected in ((1e-7, ["learning-rate-too-low"]), (1e-3, ["learning-rate-too-high"])):
        run_history = numbers([2.0] * 300, probe=baseline(ratio))
        run_history.note(signals, explain(signals, (warning("worse-than-best"),)), stepped=True)
        run_history.note(heard, explain(heard, found), stepped=True)
        assert [d.cause for d in rank(run_history.facts())] == expected


def test_a_run_that_only_came_back_has_learned_nothing() -> None:
    exploded = [1.6, 3.0, 50.0, 900.0, 900.0, 80.0, 20.0, 5.0] + [1.61] * 100
    curve = LossCurve.read(exploded[:8], exploded)
    assert curve is not None
    assert not curve.learned


def test_gradients_that_are_never_cleared() -> None:
    def cause(norms: Iterable[float]) -> str:
        run_history = RunHistory()
        for step, norm in enumerate(norms):
            run_history.note(Signals(step=step, loss=1.0, grad_norm=norm), Diagnosis(), stepped=True)
        return first(run_history).cause

    assert cause(0.5 * (step + 1) for step in range(40)) == "missing-zero-grad"
    assert cause(0.5 * (step + 1) ** 0.8 for step in range(40)) == "missing-zero-grad"
    assert cause(0.5 * 1.24**step for step in range(40)) == "healthy"  # the escape from a saddle
    assert cause(0.5 * (step + 1) ** 0.3 for step in range(40)) == "healthy"


def test_old_data_that_is_still_good_means_a_data_shift() -> None:
    run_history = numbers(falling())
    signals = Signals(
        step=300, loss=2.0, grad_norm=1.0, counterfactual=Counterfactual(step=250, old_loss=0.2, current_loss=0.2)
    )
    found = Finding(detector="not-healing", step=300, severity="warn", value=2.0, limit=0.3, what="the loss stays at 2")
    run_history.note(signals, explain(signals, (found,)), stepped=True)
    assert first(run_history).cause == "data-shift"


@pytest.mark.parametrize(
    ("level", "classes"),
    [(math.log(2), 2), (2.31, 10), (math.log(100), 100), (math.log(37), None), (2.0, None), (0.1, None)],
)
def test_what_guessing_costs(level: float, classes: int | None) -> None:
    assert guessing(level, precision=0.001) == classes


def attempts(seed: int, count: int) -> list[tuple[Signals, tuple[Finding, ...], bool]]:
    """Anything that may happen, in any order."""
    rng = Random(seed)
    odd = [math.nan, math.inf, -math.inf, 0.0, 1e308, 1e-308, -3.0]

    def number() -> float:
        return rng.choice(odd) if rng.random() < 0.2 else rng.lognormvariate(0.0, 2.0)

    def finding(step: int) -> Finding:
        return Finding(
            detector=rng.choice(["non-finite", "gradient-spike", "dead-units", "worse-than-best", "mine"]),
            step=step,
            severity=rng.choice(["info", "warn", "act", "critical"]),
            value=number(),
            limit=1.0,
            what="something",
            where=tuple(rng.choices("abc", k=rng.randrange(3))),
        )

    run = []
    for step in range(count):
        probe = Probe(
            step=step, names=("a.weight", "a.bias"), weight_rms=(number(), number()), update_rms=(number(), number())
        )
        signals = Signals(
            step=step,
            loss=number(),
            grad_norm=number(),
            lr=number(),
            scaled=rng.random() < 0.5,
            probe=probe if rng.random() < 0.3 else None,
            inputs=stats(number()) if rng.random() < 0.1 else None,
        )
        run.append((signals, tuple(finding(step) for _ in range(rng.choice([0, 0, 0, 1, 2]))), rng.random() < 0.8))
    return run


def stats(std: float) -> InputStats:
    return InputStats(batches=1, mean=0.0, std=std, largest=9.0, constant_share=0.0, scale_spread=1.0, finite=True)


def follow(run_history: RunHistory, run: list[tuple[Signals, tuple[Finding, ...], bool]]) -> None:
    for signals, found, stepped in run:
        run_history.note(signals, explain(signals, found), stepped=stepped)


@given(st.integers(0, 10**6), st.integers(0, 100), st.integers(0, 100))
def test_resume_is_invisible(seed: int, count: int, cut: int) -> None:
    run = attempts(seed, count)
    whole, before, after = RunHistory(), RunHistory(), RunHistory()
    follow(whole, run)
    follow(before, run[:cut])
    after.load_state_dict(json.loads(json.dumps(before.state_dict(), allow_nan=False)))
    follow(after, run[cut:])
    assert repr(after.state_dict()) == repr(whole.state_dict())
    assert repr(after.diagnose()) == repr(whole.diagnose())


def test_resume_across_a_thinning() -> None:
    run = [(Signals(step=n, loss=1.0 + n, grad_norm=1.0), (), True) for n in range(1200)]
    whole = RunHistory()
    follow(whole, run)
    for cut in (511, 512, 513, 1023, 1025):
        before, after = RunHistory(), RunHistory()
        follow(before, run[:cut])
        after.load_state_dict(json.loads(json.dumps(before.state_dict())))
        follow(after, run[cut:])
        assert after.state_dict() == whole.state_dict()


def test_memory_is_bounded_and_covers_the_whole_run() -> None:
    run_history = RunHistory()
    steps = 20_000
    for step in range(steps):
        name = f"layer {step}"
        found = (warning("mine", step, where=(name,)),) if step % 10 == 0 else ()
        signals = Signals(step=step, loss=float(step), grad_norm=1.0, probe=baseline(1e-3) if step % 16 == 0 else None)
        run_history.note(signals, explain(signals, found), stepped=True)
    facts = run_history.facts()
    assert 256 <= len(facts.trace.steps) < 512
    assert facts.trace.steps[0] == 0
    assert facts.trace.steps[-1] > steps * 0.99
    assert len({b - a for a, b in pairwise(facts.trace.steps)}) == 1
    assert facts.trace.num_updates == steps
    assert len(facts.ratios) < 128
    assert len(facts.warned["mine"].names) == 64
    assert len(json.dumps(run_history.state_dict())) < 60_000


def test_ratios_are_kept_from_the_whole_run() -> None:
    run_history = RunHistory()
    for step in range(1000):
        run_history.note(
            Signals(step=step, loss=1.0, grad_norm=1.0, probe=baseline(step * 1e-4)), Diagnosis(), stepped=True
        )
    ratios = [round(ratio * 1e4) for ratio in run_history.facts().ratios]
    assert ratios == list(range(0, 1000, ratios[1]))


def test_what_was_refused_is_not_part_of_the_curve() -> None:
    run_history = RunHistory()
    for step in range(100):
        good = step % 2 == 0
        run_history.note(Signals(step=step, loss=1.0 if good else 1e9, grad_norm=1.0), Diagnosis(), stepped=good)
    assert set(run_history.facts().trace.losses) == {1.0}


class TestOpinion:
    def said(self, causes: dict[int, str], steps: Iterable[int]) -> tuple[list[int], list[tuple[int, str]]]:
        """When it asked and what it said, where the cause is the newest of `causes`."""
        opinion, asked, told = Opinion(), [], []
        for step in steps:

            def diagnose(step: int = step) -> tuple[Diagnosis, ...]:
                asked.append(step)
                return (Diagnosis(cause=causes[max(at for at in causes if at <= step)]),)

            if (found := opinion.formed(step, diagnose)) is not None:
                told.append((step, found.cause))
        return asked, told

    def test_it_asks_twice_per_doubling(self) -> None:
        asked, _ = self.said({0: "healthy"}, range(800))
        assert asked == [64, 96, 128, 192, 256, 384, 512, 768]
        asked, _ = self.said({0: "healthy"}, [63, 700, 701, 767, 768, 5000, 6143, 6144])
        assert asked == [700, 768, 5000, 6144]

    def test_what_is_believed_twice_in_a_row_is_said_once(self) -> None:
        assert self.said({0: "dead-units"}, range(800))[1] == [(96, "dead-units")]
        back = {0: "dead-units", 100: "saturation", 260: "dead-units"}
        assert self.said(back, range(2000))[1] == [(96, "dead-units"), (192, "saturation")]
        assert self.said({0: "dead-units", 96: "saturation", 128: "dead-units"}, range(129))[1] == []

    def test_nothing_is_said_of_what_is_healthy_or_unknown(self) -> None:
        assert self.said({0: "healthy"}, range(800))[1] == self.said({0: "unknown"}, range(800))[1] == []

    def test_a_run_that_stands_still_has_a_thousand_steps(self) -> None:
        for cause in ("no-learning", "learning-rate-too-low", "suspicious-perfection", "batch-size-unfit"):
            assert self.said({0: cause}, range(3000))[1] == [(1024, cause)]
        assert self.said({0: "no-learning"}, [64, 999, 1500])[1] == [(1500, "no-learning")]
        assert self.said({0: "no-learning"}, [64, 1000])[1] == [(1000, "no-learning")]

    def test_resume_is_invisible(self) -> None:
        opinion, again = Opinion(), Opinion()
        opinion.formed(64, lambda: (Diagnosis(cause="dead-units"),))
        again.load_state_dict(json.loads(json.dumps(opinion.state_dict())))
        assert again.state_dict() == opinion.state_dict() == {"next": 96, "last": "dead-units", "told": []}
        for each in (opinion, again):
            found = each.formed(96, lambda: (Diagnosis(cause="dead-units"),))
            assert found is not None
        again.load_state_dict(json.loads(json.dumps(opinion.state_dict())))
        assert again.formed(128, lambda: (Diagnosis(cause="dead-units"),)) is None


class TestTrace:
    def test_first_numbers_and_peak_are_kept_apart(self) -> None:
        made = trace([5.0, 9.0, *range(8, -2000, -1)], norms=[float(n) for n in range(2010)])
        assert made.first == [5.0, 9.0, 8, 7, 6, 5, 4, 3]
        assert made.first_norms == [float(n) for n in range(16)]
        assert (made.peak, made.peak_step) == (9.0, 1)

    def test_every_second_point_is_dropped_at_512(self) -> None:
        made = trace([float(n) for n in range(511)], lrs=[float(n) for n in range(511)])
        assert len(made.steps) == 511
        made = trace([float(n) for n in range(512)], lrs=[float(n) for n in range(512)])
        assert made.steps == list(range(0, 512, 2))
        assert made.losses == made.lrs == [float(n) for n in range(0, 512, 2)]
        made = trace([float(n) for n in range(1100)])
        assert made.steps == list(range(0, 1100, 4))
        assert made.num_updates == 1100
        assert made.state_dict()["every"] == 4

    def test_resume_is_invisible(self) -> None:
        made, again = trace([float(n) for n in range(1100)]), trace([1.0])
        again.load_state_dict(json.loads(json.dumps(made.state_dict())))
        assert again.state_dict() == made.state_dict()
        assert [again.due() for _ in range(9)] == [made.due() for _ in range(9)]
        empty = trace([1.0])
        empty.load_state_dict(json.loads(json.dumps(trace([]).state_dict())))
        assert empty.peak is None


class TestNote:
    def test_what_is_not_finite_or_not_applied_is_no_point(self) -> None:
        run_history = RunHistory()
        for step, (loss, stepped, scaled) in enumerate(
            [(1.0, True, True), (math.nan, True, False), (2.0, False, False), (3.0, True, True)]
        ):
            signals = Signals(step=step, loss=loss, grad_norm=4.0, lr=0.5, scaled=scaled)
            run_history.note(signals, Diagnosis(), stepped=stepped)
        facts = run_history.facts()
        assert (facts.trace.steps, facts.trace.losses) == ([0, 3], [1.0, 3.0])
        assert (facts.trace.norms, facts.trace.lrs) == ([4.0, 4.0], [0.5, 0.5])
        assert facts.trace.num_updates == 3
        assert facts.scaled

    def test_findings_are_booked_by_how_grave_they_are(self) -> None:
        run_history = RunHistory()
        for step, severity in enumerate(["info", "warn", "act", "critical"]):
            found = Finding(detector=severity, step=step, severity=severity, value=1.0, limit=0.5)
            also = Finding(detector="beside", step=step, severity=severity, value=2.0, limit=0.5)
            diagnosis = Diagnosis(cause="bad-batch", findings=(found, also))
            run_history.note(Signals(step=step, loss=1.0, grad_norm=1.0), diagnosis, stepped=True)
        facts = run_history.facts()
        assert {name: tally.count for name, tally in facts.noted.items()} == {"info": 1, "beside": 1}
        assert {name: tally.count for name, tally in facts.warned.items()} == {
            "warn": 1,
            "act": 1,
            "critical": 1,
            "beside": 3,
        }
        (incident,) = facts.incidents.values()
        assert (incident.count, incident.first, incident.last, incident.worst) == (2, 2, 3, 1.0)

    def test_a_data_shift_is_an_incident_where_it_warns(self) -> None:
        for cause, severity, booked in (
            ("data-shift", "warn", True),
            ("data-shift", "info", False),
            ("bad-batch", "warn", False),
        ):
            run_history = RunHistory()
            found = (Finding(detector="mine", step=1, severity=severity, value=1.0, limit=0.5),)
            run_history.note(
                Signals(step=1, loss=1.0, grad_norm=1.0), Diagnosis(cause=cause, findings=found), stepped=True
            )
            assert bool(run_history.facts().incidents) is booked, (cause, severity)
        both = (warning("first"), Finding(detector="grave", step=7, severity="act", value=5.0, limit=0.5))
        run_history = RunHistory()
        run_history.note(
            Signals(step=7, loss=1.0, grad_norm=1.0), Diagnosis(cause="data-shift", findings=both), stepped=True
        )
        assert run_history.facts().incidents["data-shift"].worst == 5.0

    def test_the_newest_inputs_and_probes(self) -> None:
        run_history = RunHistory()
        run_history.opposed = True
        for step in (1, 2):
            signals = Signals(step=step, loss=1.0, grad_norm=1.0, probe=Probe(step=step), inputs=stats(float(step)))
            run_history.note(signals, Diagnosis(), stepped=True)
        run_history.note(Signals(step=3, loss=1.0, grad_norm=1.0), Diagnosis(), stepped=True)
        facts = run_history.facts()
        assert facts.inputs == stats(2.0)
        assert facts.first_probe == Probe(step=1)
        assert facts.probe == Probe(step=2)
        assert facts.opposed

    def test_a_verdict_takes_32_updates(self) -> None:
        assert numbers([1.0] * 31).verdict() is None
        found = numbers([1.0] * 32).verdict()
        assert found is not None
        assert found.cause == "healthy"

    def test_an_opinion_is_volunteered(self) -> None:
        run_history = numbers(falling(200), probe=baseline(0.5))
        assert run_history.volunteers(63) is None
        assert run_history.volunteers(64) is None
        found = run_history.volunteers(96)
        assert found is not None
        assert found.cause == "learning-rate-too-high"
        again = RunHistory()
        again.load_state_dict(json.loads(json.dumps(run_history.state_dict())))
        assert [again.volunteers(step) for step in (100, 128, 192)] == [None] * 3, "it was said"

    def test_a_state_of_before_opinions_is_loaded(self) -> None:
        state = numbers(falling()).state_dict()
        del state["opinion"]
        run_history = RunHistory()
        run_history.load_state_dict(state)
        assert run_history.facts().trace.num_updates == 300


class TestSetup:
    """What a run has shown of its settings counts as known."""

    def known(self, lrs: Iterable[float], **more: Any) -> Setup:
        made = RunHistory(more.pop("setup", Setup()))
        for step, lr in enumerate(lrs):
            made.note(Signals(step=step, loss=1.0, grad_norm=1.0, lr=lr, **more), Diagnosis(), stepped=True)
        return made.facts().setup

    def test_a_rate_that_rises_over_its_first_four_points_is_warmed_up(self) -> None:
        for lrs, warms_up in (
            ((1.0, 2.0, 3.0, 4.0), True),
            ((1.0, 2.0, 3.0, 4.0, 4.0, 1.0), True),
            ((1.0, 2.0, 3.0), False),
            ((1.0, 2.0, 3.0, 3.0), False),
            ((1.0, 1.0, 2.0, 3.0), False),
        ):
            assert self.known(lrs).warms_up is warms_up, lrs
        assert self.known((), setup=Setup(warms_up=True)).warms_up

    def test_a_scaler_is_one_of_fp16(self) -> None:
        assert self.known((1.0,), scaled=True).precision == "fp16"
        assert self.known((1.0,), setup=Setup(precision="bf16")).precision == "bf16"

    def test_a_batch_that_was_measured_was_given(self) -> None:
        assert self.known((1.0,), inputs=stats(1.0)).gives_batch
        assert not self.known((1.0,)).gives_batch
        assert self.known((1.0,), setup=Setup(gives_batch=True)).gives_batch


def test_other_weights_begin_another_curve() -> None:
    made = numbers([5.0] * 40)
    made.start_again()
    assert made.facts().trace.num_updates == 0
    assert made.verdict() is None


def test_evidence_that_came_between_two_points_is_kept() -> None:
    made = RunHistory()
    names = ("a",)
    for step, more in enumerate(
        (
            {},
            {"batch": BatchStats(batches=1, parts=())},
            {"probe": Probe(step=2, names=names, weight_rms=(1.0,), update_rms=(0.5,))},
            {"names": ("b",)},
            {"outputs": outputs(), "losses": (1.0,)},
        )
    ):
        signals = Signals(**{"step": step, "loss": 1.0, "grad_norm": 1.0, "names": names} | more)
        made.note(signals, Diagnosis(), stepped=True)
    seen = made.facts().measured
    assert seen.batch is not None
    assert (seen.updated, seen.touched, seen.outputs.count) == ({"a"}, {"a", "b"}, 1)
    assert made.facts().ratios == (0.5,)
    assert made.facts().highest_ratio == 0.5


def test_what_was_done_about_a_cause_is_counted_by_cause() -> None:
    made, found = RunHistory(), (warning("mine"),)
    for cause, action in (("bad-batch", "skip-step"), ("bad-batch", "rescale"), ("data-shift", "rollback")):
        diagnosis = Diagnosis(cause=cause, findings=found)
        made.note(Signals(step=1, loss=1.0, grad_norm=1.0), diagnosis, stepped=False, plan=Plan(actions=(action,)))
    made.note(Signals(step=2, loss=1.0, grad_norm=1.0), Diagnosis(cause="unknown", findings=found), stepped=True)
    assert {cause: done.actions for cause, done in made.facts().done.items()} == {
        "bad-batch": ["skip-step", "rescale"],
        "data-shift": ["rollback"],
    }
