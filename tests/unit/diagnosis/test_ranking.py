"""From signs to causes: what is enough, what adds up, what is forgiven, and what comes first."""

import math
from dataclasses import replace
from itertools import groupby
from typing import Any, ClassVar

import pytest

from steadystep.diagnosis import ADVICE, Cause, Fault, ranking, step_size_evidence
from steadystep.diagnosis.facts import Interventions
from steadystep.diagnosis.learning_evidence import EvidenceRule
from steadystep.diagnosis.ranking import proven, rank
from steadystep.diagnosis.rules import FAULT_RULES
from steadystep.records import Diagnosis, InputStats, Plan, Probe
from tests.unit.diagnosis.made import curve, facts, finding, tallies, tally


def causes(**changes: Any) -> list[str]:
    return [diagnosis.cause for diagnosis in rank(facts(**changes))]


def verdict(**changes: Any) -> Diagnosis:
    return rank(facts(**changes))[0]


ALONE = {
    "growing-gradient": "missing-zero-grad",
    "dead-units": "dead-units",
    "saturated-units": "saturation",
    "embedding-growth": "embedding-growth",
    "attention-logit-growth": "attention-logit-growth",
    "vanishing-gradient": "vanishing-gradient",
    "zero-gradient": "zero-gradient",
    "loss-scale": "loss-scale-collapse",
    "clip-rate": "clipping-too-tight",
    "learning-rate-bounds": "schedule-error",
    "learning-rate-creep": "schedule-error",
    "poisoned-moments": "poisoned-moments",
    "damaged-state": "poisoned-moments",
    "lost-moments": "lost-moments",
    "weight-jump": "damaged-weights",
    "same-batch": "repeated-batch",
    "kl-blow-up": "policy-drift",
    "entropy-collapse": "entropy-collapse",
    "flat-reward": "flat-reward",
    "metric-bounds": "metric-out-of-bounds",
    "mine": "unknown",
    "early-divergence": "learning-rate-too-high",
    "constant-prediction": "learning-rate-too-high",
    "oscillation": "oscillation",
}
WELL = curve(start=4.0, best=3.5, late=3.5)  # learned and kept, not halved
LN5 = math.log(5)
NET = {"names": ("a", "b", "c"), "weight_rms": (0.1,) * 3}
STILL = Probe(step=9, update_rms=(0.0,) * 3, **NET)


class TestAlone:
    def test_one_warning_is_enough(self) -> None:
        for detector, cause in ALONE.items():
            found = rank(facts(warned=tallies(detector)))
            assert [diagnosis.cause for diagnosis in found] == [cause], detector
            assert f"something about {detector}" in found[0].evidence
            assert found[0].advice == ADVICE[Cause(cause)]

    def test_in_a_run_that_goes_well_some_are_forgiven(self) -> None:
        forgiven = {"early-divergence", "constant-prediction", "oscillation"}
        for detector, cause in ALONE.items():
            expected = ["healthy"] if detector in forgiven else [cause]
            assert causes(warned=tallies(detector), curve=WELL) == expected, detector

    @pytest.mark.parametrize("detector", ["growing-gradient", "dead-units", "saturated-units", "weight-jump"])
    @pytest.mark.parametrize(("late", "forgiven"), [(1.9, True), (2.5, False)])
    def test_a_loss_that_was_halved_speaks_against_some(self, detector: str, late: float, forgiven: bool) -> None:
        found = causes(warned=tallies(detector), curve=curve(start=4.0, best=late, late=late))
        assert found == ["healthy" if forgiven else ALONE[detector]]

    def test_one_sign_of_the_run_is_enough(self) -> None:
        zeros = Probe(step=9, update_rms=(0.0,) * 3, names=("a", "b", "c"), weight_rms=(0.0,) * 3)
        ln5 = math.log(5)
        for changes, cause in (
            ({"losses": [1.0] * 40, "norms": [min(n, 16) + 1.0 for n in range(40)]}, "missing-zero-grad"),
            ({"probe": Probe(step=9, modules=("a",), dead=(1.0,))}, "dead-units"),
            ({"losses": [2.0] * 40, "norms": [0.0] * 40}, "zero-gradient"),
            ({"probe": zeros}, "poor-initialisation"),
            ({"probe": Probe(step=9, zero_shares=(0.9,)), "scaled": True}, "gradient-underflow"),
            ({"losses": [0.0] * 40, "norms": [0.0] * 40}, "suspicious-perfection"),
            ({"curve": curve(start=ln5, best=ln5, late=ln5, highest=ln5), "ratios": (1e-3,)}, "no-learning"),
            ({"probe": STILL, "ratios": (0.0,) * 4}, "no-learning"),
            ({"highest_ratio": 1e-7}, "learning-rate-too-low"),
            ({"curve": curve(noise=3.0), "ratios": (0.03,)}, "batch-size-unfit"),
            ({"ratios": (0.001,) * 4 + (0.5,) * 4}, "learning-rate-too-high"),
            ({"first_probe": Probe(step=1, names=("a", "b", "c"), weight_rms=(9.0,) * 3)}, "poor-initialisation"),
        ):
            assert causes(**changes) == [cause], changes

    def test_some_need_a_second_one(self) -> None:
        for changes in (
            {"warned": tallies("slow-divergence")},
            {"warned": tallies("worse-than-best")},
            {"noted": tallies("oscillation")},
            {"warned": tallies("loss-spike", times=9)},
            {"ratios": (0.15,) * 8},
            {"ratios": (0.5,) * 4 + (0.001,) * 8},
            {"probe": Probe(step=9, logit_bounds=(150.0,))},
            {"first_probe": Probe(step=1, names=("a", "b"), weight_rms=(9.0, 0.1)), "probe": STILL},
            {"losses": [90.0] * 40, "curve": curve(best=1.0)},
        ):
            assert causes(**changes) == ["healthy"], changes


LARGE = {"ratios": (0.15,) * 8}
LEAPED = {"ratios": (0.5,) * 4 + (0.001,) * 8}
LEAPED_AND_LARGE = {"ratios": (0.5,) * 4 + (0.15,) * 8}
SHARP = {"probe": Probe(step=9, logit_bounds=(150.0,))}
ADAM = {"probe": Probe(step=9, second_moments=(1.0,))}
SHARP_ADAM = {"probe": Probe(step=9, second_moments=(1.0,), logit_bounds=(150.0,))}
BOLD, RECKLESS = ({"losses": [2.0] * 40, "lrs": [lr] * 40} for lr in (0.1, 0.3))
FELL_BACK = {"curve": curve(start=4.0, best=1.0, late=3.0)}
ROSE = {"curve": curve(start=2.0, late=3.0)}


def climbing(peak: float, at: int = 20, **more: Any) -> dict[str, Any]:
    """Up to the peak and back to just below the start; at step 20 of 40 that is no early peak."""
    return {"losses": [peak if step == at else 2.0 for step in range(40)], "curve": curve(), **more}


class TestSums:
    """Signs of a learning rate that is too high."""

    def test_what_is_enough_together_and_what_is_not(self) -> None:
        for changes, guilty in (
            (LEAPED_AND_LARGE, False),  # 0.8
            (LARGE | SHARP, True),  # 1.0
            (LEAPED | SHARP, True),
            (SHARP_ADAM | BOLD, True),
            (ADAM | RECKLESS, False),  # 0.7
            (LARGE | ADAM | BOLD, False),  # 0.8
            (LARGE | ADAM | RECKLESS, True),  # 1.1
            (SHARP | climbing(3.0), False),  # 0.9
            (climbing(3.0) | ADAM | {"lrs": [0.3] * 40}, True),  # 1.0
            (climbing(3.0) | LEAPED_AND_LARGE, True),
            (climbing(3.0) | LARGE, False),
            (SHARP | FELL_BACK, True),  # 1.0
            (LARGE | FELL_BACK, False),  # 0.8
            (LARGE | ROSE, True),  # 1.1
            (climbing(70.0, at=35) | LARGE, True),  # went up
            (climbing(70.0, at=35), False),
            (climbing(20.0, at=3), False),  # never recovered and climbed: of the level only
            (climbing(20.0, at=3) | LARGE, True),
            (LARGE | {"noted": tallies("oscillation")}, False),  # 0.7
            (LEAPED_AND_LARGE | {"noted": tallies("oscillation")}, True),  # 1.1
            (LARGE | {"warned": tallies("loss-spike", times=9)}, False),  # 0.8
            (SHARP | {"warned": tallies("loss-spike", times=9)}, True),  # 1.0
            (LARGE | {"warned": tallies("slow-divergence")}, True),  # 1.2
            (LARGE | {"warned": tallies("worse-than-best")}, True),
        ):
            assert (causes(**changes) == ["learning-rate-too-high"]) is guilty, changes

    def test_where_it_goes_well_they_count_half(self) -> None:
        well = {"curve": WELL}
        for changes, guilty in (
            (LARGE | SHARP, False),  # 0.8
            (LARGE | SHARP | {"warned": tallies("slow-divergence")}, True),  # 1.2
            (SHARP | {"warned": tallies("slow-divergence")}, True),  # 1.0
            (LEAPED | {"warned": tallies("worse-than-best")}, False),  # 0.9
            (SHARP | {"warned": tallies("worse-than-best")}, True),
            (SHARP | {"warned": tallies("loss-spike", times=9)}, False),  # 0.8
            (LEAPED_AND_LARGE | {"noted": tallies("oscillation")}, False),  # 0.75
            (LEAPED | ADAM | BOLD | {"warned": tallies("oscillation")}, False),  # 0.95
            (LEAPED | ADAM | BOLD | {"noted": tallies("oscillation")}, False),
            (LEAPED | {"warned": tallies("early-divergence")}, False),  # 0.9
            (LEAPED | {"warned": tallies("constant-prediction")}, False),
            (LEAPED | SHARP, True),  # nothing to forgive
            ({"ratios": (0.001,) * 4 + (0.5,) * 4}, True),
        ):
            assert (causes(**changes | well) == ["learning-rate-too-high"]) is guilty, changes

    def test_signs_of_the_level_blame_nothing_by_themselves(self) -> None:
        every = tallies("slow-divergence", "worse-than-best") | tallies("loss-spike", times=9)
        assert causes(warned=every, noted=tallies("oscillation"), **climbing(70.0, at=3)) == ["healthy"]
        assert causes(warned=every, **ROSE) == causes(warned=every, **FELL_BACK) == ["healthy"]
        assert causes(warned=every, ratios=(0.15,)) == ["learning-rate-too-high"]
        warned = every | tallies("oscillation")
        assert causes(warned=warned) == ["oscillation"], "it has a cause of its own"

    def test_weights_that_hardly_move_refute_it(self) -> None:
        assert causes(warned=tallies("early-divergence"), highest_ratio=1e-7) == ["learning-rate-too-low"]


def inputs(**changes: float) -> InputStats:
    plain = {"mean": 0.0, "std": 1.0, "largest": 90.0, "constant_share": 0.0, "scale_spread": 1.0}
    return InputStats(batches=4, finite=True, **plain | changes)


class TestFromTheStart:
    def test_inputs_need_a_run_that_shows_it(self) -> None:
        for odd, learned, cause in (
            (inputs(std=50.0), False, "unscaled-data"),  # 0.6 and 0.8
            (inputs(std=50.0), True, "healthy"),
            (inputs(scale_spread=1e4), False, "unscaled-data"),  # 0.3 and 0.8
            (inputs(std=50.0, scale_spread=1e4), True, "healthy"),  # 0.9
        ):
            assert causes(inputs=odd, curve=WELL if learned else curve()) == [cause], odd

    def test_weights_need_a_high_start_or_all_of_them(self) -> None:
        probe = Probe(step=1, names=("a", "b", "c", "d"), weight_rms=(9.0, 0.1, 0.1, 0.1))
        made = {"first_probe": probe, "probe": probe}
        assert causes(**made) == ["healthy"]  # 0.6
        assert causes(**made, losses=[90.0] * 40, curve=curve(best=1.0)) == ["poor-initialisation"]  # 1.1


class TestOrder:
    def test_the_strongest_first(self) -> None:
        """Of causes that do not explain each other."""
        done = {"losses": [0.0] * 40, "norms": [0.0] * 40}  # 1.5
        warned = tallies("lost-moments", "flat-reward", "same-batch", "policy", "kl-blow-up", "entropy-collapse")
        warned |= tallies("loss-scale", "metric-bounds")
        found = causes(warned=warned, **done)
        assert found[0] == "suspicious-perfection"
        equal = ["loss-scale-collapse", "lost-moments", "repeated-batch", "policy-drift"]
        assert found[1:] == [*equal, "entropy-collapse", "flat-reward", "metric-out-of-bounds", "unknown"]

    def test_a_cause_before_what_it_explains(self) -> None:
        found = causes(warned=tallies("clip-rate", "weight-jump", "oscillation", "learning-rate-bounds"))
        assert found[0] == "schedule-error"
        assert sorted(found[1:]) == ["clipping-too-tight", "damaged-weights", "oscillation"]
        zeros = Probe(step=9, update_rms=(0.0,) * 3, names=("a", "b", "c"), weight_rms=(0.0,) * 3)
        found = causes(probe=zeros, warned=tallies("zero-gradient", "dead-units", "vanishing-gradient"))
        # 1.3 for the units, 1.2 for the gradient that vanishes, 1.0 for the one that is zero
        assert found == ["poor-initialisation", "dead-units", "vanishing-gradient", "zero-gradient"]

    def test_equal_signs_in_the_order_of_the_table(self) -> None:
        found = causes(warned=tallies("attention-logit-growth", "clip-rate", "saturated-units", "poisoned-moments"))
        assert found == ["saturation", "attention-logit-growth", "clipping-too-tight", "poisoned-moments"]
        found = causes(warned=tallies("embedding-growth", "weight-jump", "saturated-units", "damaged-state"))
        assert found == ["saturation", "embedding-growth", "poisoned-moments", "damaged-weights"]

    def test_incidents_count_by_how_often_they_happened(self) -> None:
        done = {"losses": [0.0] * 40, "norms": [0.0] * 40}  # 1.5
        lost = {"scaled": True, "probe": Probe(step=9, zero_shares=(0.9,))}  # 2.2

        def order(times: int, **changes: Any) -> list[str]:
            bad = tally(finding("loss-spike"))
            bad.count = times
            return causes(incidents={"bad-batch": bad}, **changes)

        assert order(1) == ["bad-batch"]
        assert order(7, **done) == ["suspicious-perfection", "bad-batch"]
        for times in (9, 32, 1000):
            assert order(times, **done) == ["bad-batch", "suspicious-perfection"]
        assert order(10**9, **lost) == ["gradient-underflow", "bad-batch"]
        assert order(1, warned=tallies("vanishing-gradient"))[0] == "bad-batch"  # 1.2 each, incidents first
        assert order(1, warned=tallies("dead-units"))[0] == "dead-units"  # 1.3

    def test_an_incident_blames_by_itself(self) -> None:
        high = {"learning-rate-too-high": tally(finding("slow-divergence"))}
        assert causes(incidents=high, curve=WELL) == ["learning-rate-too-high"]


class TestEvidence:
    def test_the_same_thing_only_once(self) -> None:
        twice = verdict(**LARGE | ADAM | RECKLESS)
        assert twice.evidence.count(step_size_evidence.bold_adam(facts(**ADAM | RECKLESS))) == 1
        poisoned = {"poisoned-moments": tally(finding("poisoned-moments", step=3))}
        found = verdict(incidents=poisoned, warned=tallies("poisoned-moments"))
        assert found.evidence.count("something about poisoned-moments") == 1

    def test_different_things_all_of_them(self) -> None:
        made = facts(ratios=(0.45,) * 8)
        text = rank(made)[0].evidence
        assert step_size_evidence.huge_updates(made) in text
        assert step_size_evidence.leaped(made) in text

    def test_a_healthy_run_in_numbers(self) -> None:
        short = rank(facts([2.0] * 7))
        assert [diagnosis.cause for diagnosis in short] == ["healthy"]
        assert "7" in short[0].evidence
        found = verdict(losses=[2.0] * 77, curve=curve(start=4.125, best=3.0, late=3.0625), ratios=(1.5e-3,))
        for number in ("77", "4.125", "3.062", "1.5e-03"):
            assert number in found.evidence
        assert found.advice == ""
        assert "e-0" not in verdict(ratios=()).evidence

    @pytest.mark.parametrize(("share", "told"), [(0.95, True), (0.94, False), (math.nan, False)])
    def test_clipping_of_nearly_every_step_is_mentioned(self, share: float, told: bool) -> None:
        noted = {"clip-rate": tally(finding("clip-rate", "info", value=share))}
        found = verdict(noted=noted)
        assert found.cause == "healthy"
        assert ("clip-rate" in found.evidence) is told
        assert found.advice == (ADVICE[Cause.CLIPPING_TOO_TIGHT] if told else "")


SEEN_FIRST = """
ignored_targets flat_reward
constant_targets constant_part
carries_over one_kind_per_batch
forgets softmax_over_batch wrong_axis
wrong_loss inner_axis outside_of_domain copied_target wrong_input_of_loss
activation_twice
rectified_scores batch_as_time
in_eval_mode few_samples bottomless growing_rate schedule_stays_at_zero schedule_ends_early still_warming_up \
rate_always_zero same_batch half_weights far_targets equal_weights rounded_away large_rewards
stale_statistics constant_inputs
in_no_optimizer few_inputs
outside_the_model
drawn_head rate_of_zero behind_no_grad severed always_zero
faint_part strong_dropout never_trained
quick_decay mostly_penalty strong_decay
constant_outputs
never_moved
"""
"""Faults that are seen as they are: those of an earlier line are named before those of a later one."""

CONCLUDED_FIRST = """
unusual_gains
distance_of_shares drowned_term tiny_targets small_normed_batch certain_policy tiny_batch
wide_targets out_of_reach negative_loss below_zero
content_rivals falling_reward uniform_policy no_signal starved_layers infinite_at_once loud_start faint_outputs \
idle_term
slow_layers sharp_softmax stunned contracted cut_graph raw_inputs large_biases small_updates numbered_classes \
collapsed_outputs leaked_target
high_first_loss amplified wanders far_above loud_gradients mostly_frozen
fading frozen_head
died single_visits far_from_outputs collapsed ended_above_start unrelated_targets
"""
"""The same of faults that are concluded, after all that are seen."""


class TestFaults:
    @pytest.mark.parametrize(("certain", "order"), [(True, SEEN_FIRST), (False, CONCLUDED_FIRST)])
    def test_which_is_named_first(self, certain: bool, order: str, monkeypatch: pytest.MonkeyPatch) -> None:
        rules = sorted((rule for rule in FAULT_RULES if rule.certain is certain), key=lambda rule: -rule.weight)
        lines = [[rule.sign.__name__ for rule in same] for _, same in groupby(rules, key=lambda rule: rule.weight)]
        assert lines == [line.split() for line in order.strip().splitlines()]
        monkeypatch.setattr(ranking, "FAULT_RULES", [replace(rule, sign=lambda facts: "it is so") for rule in rules])
        faults = {(rule.cause.value, rule.fault or "") for rule in rules}
        assert proven(facts()) == (faults if certain else set())

    @pytest.mark.parametrize("rule", FAULT_RULES, ids=lambda rule: rule.sign.__name__)
    def test_one_sign_is_enough(self, rule: EvidenceRule, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(ranking, "FAULT_RULES", (replace(rule, sign=lambda facts: "it is so"),))
        for curve_of_run in (WELL, curve()):
            first = rank(facts(curve=curve_of_run))[0]
            assert (first.cause, first.fault, first.evidence) == (rule.cause, rule.fault or "", "it is so")
        assert rank(facts(), live=True)[0].cause == "healthy"

    def test_what_is_seen_comes_before_what_is_concluded(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def says(cause: Cause, weight: float, **more: Any) -> EvidenceRule:
            return EvidenceRule(cause, weight, lambda facts: cause.value, **more)

        def order(*rules: EvidenceRule) -> list[str]:
            monkeypatch.setattr(ranking, "FAULT_RULES", rules)
            return causes()

        concluded, seen = says(Cause.LOST_MOMENTS, 9.0), says(Cause.FLAT_REWARD, 1.0, certain=True)
        assert order(concluded, seen) == ["flat-reward", "lost-moments"]
        # a consequence by necessity comes later, seen or not, and what has no name at the very end
        vague, dead = says(Cause.NO_LEARNING, 9.0, certain=True), says(Cause.DEAD_UNITS, 1.0)
        assert order(vague, dead, concluded) == ["lost-moments", "dead-units", "no-learning"]
        alike = says(Cause.NO_LEARNING, 9.0, certain=True, fault=Fault.LABELS_SHUFFLED)
        assert order(alike, dead, concluded) == ["lost-moments", "dead-units", "no-learning"]
        assert order(alike, concluded) == ["no-learning", "lost-moments"]
        assert order(says(Cause.LOST_MOMENTS, 0.9)) == ["healthy"]

    def test_what_is_proven_is_seen_or_has_no_gradient(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for certain, found in ((True, frozenset({("flat-reward", "")})), (False, frozenset())):
            rule = EvidenceRule(Cause.FLAT_REWARD, 9.0, lambda facts: "flat", certain=certain)
            monkeypatch.setattr(ranking, "FAULT_RULES", (rule,))
            assert proven(facts()) == found
        idle = {"losses": [2.0] * 40, "norms": [0.0] * 40}
        assert proven(facts(**idle)) == {("zero-gradient", "")}


class TestBesideAnIncident:
    """An incident of another kind counts 1.2: what one sign weighs, and what needs more than one."""

    RAISED: ClassVar = {"exception-in-step": tally(finding("closure"))}

    def test_one_warning(self) -> None:
        first = {name for name in ALONE if causes(incidents=self.RAISED, warned=tallies(name))[0] == ALONE[name]}
        assert first == {"growing-gradient", "dead-units"}

    @pytest.mark.parametrize(
        "detector",
        [
            *("policy-mismatch", "ratio-explosion", "reward-hacking", "value-divergence", "reward-collapse"),
            *("dead-groups", "bad-advantages"),
        ],
    )
    def test_one_warning_about_a_policy(self, detector: str) -> None:
        assert causes(incidents=self.RAISED, warned=tallies(detector))[0] == "exception-in-step"
        assert len(causes(warned=tallies(detector))) == 1
        assert causes(warned=tallies(detector)) != ["healthy"]

    @pytest.mark.parametrize(
        ("changes", "comes_first"),
        [
            ({"losses": [1.0] * 40, "norms": [min(n, 16) + 1.0 for n in range(40)]}, False),
            ({"probe": Probe(step=9, modules=("a",), dead=(1.0,))}, False),
            ({"losses": [2.0] * 40, "norms": [0.0] * 40}, False),
            ({"probe": Probe(step=9, update_rms=(0.0,) * 3, names=("a", "b", "c"), weight_rms=(0.0,) * 3)}, True),
            ({"probe": Probe(step=9, zero_shares=(0.9,)), "scaled": True}, True),
            ({"losses": [0.0] * 40, "norms": [0.0] * 40}, True),
            ({"curve": curve(start=LN5, best=LN5, late=LN5, highest=LN5), "ratios": (1e-3,)}, False),
            ({"probe": STILL, "ratios": (0.0,) * 4}, False),
            ({"highest_ratio": 1e-7}, False),
            ({"curve": curve(noise=3.0), "ratios": (0.03,)}, False),
            ({"ratios": (0.001,) * 4 + (0.5,) * 4}, False),
        ],
    )
    def test_one_sign_of_the_run(self, changes: dict[str, Any], comes_first: bool) -> None:
        assert (causes(**changes | {"incidents": self.RAISED})[0] != "exception-in-step") is comes_first


class TestLater:
    """A cause accounts for what came after it, not for what was there before."""

    @pytest.mark.parametrize(("first", "order"), [(3, ["data-shift", "learning-rate-too-high"]), (9, None)])
    def test_by_the_steps_of_incidents(self, first: int, order: list[str] | None) -> None:
        incidents = {
            "learning-rate-too-high": tally(*[finding("slow-divergence", step=5)] * 9),
            "data-shift": tally(finding("not-healing", step=first)),
        }
        assert causes(incidents=incidents) == (order or ["learning-rate-too-high", "data-shift"])

    def test_what_was_only_warned_of_is_of_the_whole_run(self) -> None:
        later = {"data-shift": tally(finding("not-healing", step=900))}
        assert causes(incidents=later, warned=tallies("early-divergence")) == ["data-shift", "learning-rate-too-high"]


def test_a_refuted_cause_is_dropped_and_others_stay() -> None:
    cleared = facts(warned=tallies("growing-gradient", "lost-moments"))
    cleared.measured.loop.renewed = 256
    assert [found.cause for found in rank(cleared)] == ["lost-moments"]


def test_the_advice_is_about_what_was_done() -> None:
    bad = {"bad-batch": tally(finding("loss-spike"))}
    done = Interventions(Plan(actions=("cut-lr",)))
    done.add(Plan(actions=("skip-step",)))
    assert verdict(incidents=bad).advice == ADVICE[Cause.BAD_BATCH]
    assert verdict(incidents=bad, done={"bad-batch": done}).advice.startswith("the guard skipped the update; ")
    high = {"learning-rate-too-high": tally(finding("slow-divergence"))}
    assert "divide" not in verdict(incidents=high, done={"learning-rate-too-high": done}).advice
