"""One step: from findings to a cause, the reach of the damage, evidence and advice."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steadystep.diagnosis import ADVICE, Cause, exception_in_step, explain, not_repeatable
from steadystep.diagnosis.advice import advise
from steadystep.diagnosis.counterfactual import is_worse
from steadystep.diagnosis.explain import advised, as_measured, as_warning, of_data
from steadystep.diagnosis.facts import UNKNOWN_SETUP, Setup
from steadystep.records import BitFlip, Counterfactual, Damage, Diagnosis, Finding, Plan, Severity, Signals

GOOD = Signals(step=100, loss=2.0, grad_norm=1.0, lr=0.1, losses=(2.0,))
DETECTORS = [
    "non-finite",
    "gradient-spike",
    "loss-spike",
    "not-healing",
    "slow-divergence",
    "worse-than-best",
    "buffer-jump",
    "learning-rate-creep",
    "learning-rate-jump",
    "learning-rate-bounds",
    "oscillation",
    "vanishing-gradient",
    "zero-gradient",
    "growing-gradient",
    "clip-rate",
    "update-ratio",
    "poisoned-moments",
    "rms-surprise",
    "loss-scale",
    "dead-units",
    "saturated-units",
    "embedding-growth",
    "attention-logit-growth",
    "no-learning",
    "suspicious-perfection",
    "kl-blow-up",
    "entropy-collapse",
    "flat-reward",
    "metric-bounds",
]


def finding(detector: str, severity: Severity = "warn", *, value: float = 1.0, **more) -> Finding:
    return Finding(detector=detector, step=100, severity=severity, value=value, limit=0.5, **more)


def cause(*found: Finding, signals: Signals = GOOD) -> str:
    return explain(signals, found).cause


def test_nothing_found_is_healthy() -> None:
    assert explain(GOOD, ()) == Diagnosis()


def test_every_cause_but_healthy_has_advice() -> None:
    assert set(ADVICE) == set(Cause)
    assert {c for c, text in ADVICE.items() if not text} == {Cause.HEALTHY}


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        ([finding("gradient-spike", "act")], "exploding-gradient"),
        ([finding("gradient-spike", "act"), finding("loss-spike", "info")], "bad-batch"),
        ([finding("loss-spike", "info")], "bad-batch"),
        ([finding("learning-rate-jump", "act"), finding("gradient-spike", "act")], "schedule-error"),
        ([finding("learning-rate-bounds")], "schedule-error"),
        ([finding("not-healing", "act")], "learning-rate-too-high"),
        ([finding("slow-divergence", "act")], "learning-rate-too-high"),
        ([finding("poisoned-moments", "act"), finding("worse-than-best")], "poisoned-moments"),
        ([finding("oscillation")], "oscillation"),
        ([finding("worse-than-best"), finding("gradient-spike", "info")], "learning-rate-too-high"),
        ([finding("vanishing-gradient")], "vanishing-gradient"),
        ([finding("zero-gradient")], "zero-gradient"),
        ([finding("zero-gradient"), finding("dead-units")], "dead-units"),
        ([finding("growing-gradient")], "missing-zero-grad"),
        ([finding("clip-rate")], "clipping-too-tight"),
        ([finding("update-ratio", "info", value=0.5)], "learning-rate-too-high"),
        ([finding("update-ratio", "info", value=1e-8)], "learning-rate-too-low"),
        ([finding("rms-surprise", "info")], "exploding-gradient"),
        ([finding("loss-scale")], "loss-scale-collapse"),
        ([finding("saturated-units")], "saturation"),
        ([finding("embedding-growth")], "embedding-growth"),
        ([finding("attention-logit-growth")], "attention-logit-growth"),
        ([finding("attention-logit-growth"), finding("embedding-growth")], "embedding-growth"),
        ([finding("attention-logit-growth"), finding("loss-spike", "info")], "attention-logit-growth"),
        ([finding("odd-replica", "act")], "odd-replica"),
        ([finding("weight-jump", "act")], "damaged-weights"),
        ([finding("early-divergence", "act")], "learning-rate-too-high"),
        ([finding("buffer-jump", "act")], "bad-batch"),
        ([finding("input-scale", "act")], "bad-batch"),
        ([finding("damaged-state", "act")], "poisoned-moments"),
        ([finding("lost-moments")], "lost-moments"),
        ([finding("learning-rate-creep")], "schedule-error"),
        ([finding("constant-prediction")], "learning-rate-too-high"),
        ([finding("worse-than-best")], "learning-rate-too-high"),
        ([finding("short-warmup", "info")], "schedule-error"),
        ([finding("kl-blow-up")], "policy-drift"),
        ([finding("entropy-collapse")], "entropy-collapse"),
        ([finding("flat-reward")], "flat-reward"),
        ([finding("metric-bounds")], "metric-out-of-bounds"),
        ([finding("same-batch")], "repeated-batch"),
        ([finding("gradient-spike", "info"), finding("loss-spike")], "bad-batch"),
        ([finding("not-healing"), finding("poisoned-moments", "act")], "poisoned-moments"),
        ([finding("no-learning", "info")], "no-learning"),
        ([finding("suspicious-perfection", "info")], "suspicious-perfection"),
        ([finding("somebody's own")], "unknown"),
    ],
    ids=lambda value: "+".join(f.detector for f in value) if isinstance(value, list) else value,
)
def test_cause_of_findings(found: list[Finding], expected: str) -> None:
    assert cause(*found) == expected
    assert cause(*reversed(found)) == expected


def test_the_gravest_finding_decides() -> None:
    assert cause(finding("dead-units"), finding("gradient-spike", "act")) == "exploding-gradient"
    assert cause(finding("dead-units", "info"), finding("oscillation")) == "oscillation"


def test_a_scaler_changes_the_reading() -> None:
    overflow = replace(GOOD, scaled=True, grad_norm=math.inf)
    assert cause(finding("non-finite", "info"), signals=overflow) == "scale-overflow"
    assert cause(finding("non-finite", "info"), finding("loss-scale"), signals=overflow) == "loss-scale-collapse"
    assert cause(finding("zero-gradient"), signals=replace(GOOD, scaled=True)) == "gradient-underflow"
    assert cause(finding("gradient-spike", "act"), signals=replace(GOOD, scaled=True)) == "exploding-gradient"


def test_what_is_not_finite_comes_first() -> None:
    nan, jump = finding("non-finite", "critical"), finding("weight-jump", "warn")
    for changes, found, expected in (
        ({"lr": math.nan}, (nan,), "schedule-error"),
        ({"input_finite": False, "loss": math.nan}, (nan,), "non-finite-input"),
        ({"input_finite": True, "loss": math.nan}, (nan,), "non-finite-loss"),
        ({"loss": math.nan}, (nan, jump), "damaged-weights"),
        ({"loss": math.nan}, (nan,), "non-finite-loss"),
        ({"loss": math.nan, "scaled": True}, (nan,), "forward-overflow"),
        ({"bad_buffers": ("bn.running_var",)}, (nan,), "non-finite-buffer"),
        ({"grad_norm": math.inf}, (nan,), "non-finite-gradient"),
        ({"grad_norm": math.inf, "scaled": True}, (nan,), "scale-overflow"),
        ({"grad_norm": math.inf}, (finding("loss-scale"),), "non-finite-gradient"),
        ({}, (finding("oscillation", "act"), jump), "oscillation"),
    ):
        assert cause(*found, signals=replace(GOOD, **changes)) == expected, (changes, found)


def test_updates_are_large_from_a_tenth_of_the_weights() -> None:
    for value, expected in ((0.1, "learning-rate-too-high"), (0.099, "learning-rate-too-low")):
        assert cause(finding("update-ratio", "info", value=value)) == expected
    worse = replace(GOOD, loss=4.0, counterfactual=Counterfactual(step=50, old_loss=2.0, current_loss=3.9))
    lasting = finding("not-healing", "act")
    for beside, expected in (
        (finding("update-ratio", "info", value=0.1), "learning-rate-too-high"),
        (finding("update-ratio", "info", value=0.099), "damaged-weights"),
        (finding("loss-spike", "info", value=9.0), "damaged-weights"),
        (finding("learning-rate-jump", "info"), "learning-rate-too-high"),
        (finding("learning-rate-creep", "info"), "learning-rate-too-high"),
        (finding("learning-rate-bounds", "info"), "learning-rate-too-high"),
    ):
        assert cause(lasting, beside, signals=worse) == expected, beside


def test_only_a_comparison_that_clears_the_weights_means_a_data_shift() -> None:
    same, worse = (
        replace(GOOD, loss=4.0, counterfactual=Counterfactual(step=50, old_loss=2.0, current_loss=now))
        for now in (2.0, 3.9)
    )
    assert cause(finding("not-healing"), signals=same) == "data-shift"
    assert cause(finding("not-healing"), signals=worse) == "learning-rate-too-high"
    jumped = (finding("not-healing", "critical"), finding("weight-jump", "act"))
    assert cause(*jumped, signals=same) == "damaged-weights", "weights that jumped are not cleared"


def test_an_exception_and_a_closure_that_cannot_be_repeated() -> None:
    raised = exception_in_step(ValueError("bad label 7" + "x" * 900), Plan())
    assert (raised.cause, raised.advice) == ("exception-in-step", ADVICE[Cause.EXCEPTION_IN_STEP])
    assert "ValueError: bad label 7" in raised.evidence
    assert len(raised.evidence) == 500
    lost = not_repeatable()
    assert lost.cause == "closure-not-repeatable"
    assert lost.evidence
    assert "batch=" in lost.advice
    assert "batch=" not in not_repeatable(given=True).advice


def test_evidence_names_what_and_where() -> None:
    found = finding("dead-units", what="90 % of the units are dead", where=("a", "b", "c", "d", "e"))
    assert explain(GOOD, (found,)).evidence == "90 % of the units are dead (a, b, c and 2 more)"
    assert explain(GOOD, (finding("mine", value=3.0),)).evidence == "mine: 3, limit 0.5"


def test_damage_is_none_unless_something_says_so() -> None:
    for detector in DETECTORS:
        assert explain(GOOD, (finding(detector, "warn"),)).damage is Damage.NONE
    assert explain(GOOD, (finding("gradient-spike", "act"),)).damage is Damage.NONE
    assert explain(GOOD, (finding("poisoned-moments", "act"),)).damage is Damage.MOMENTS
    assert explain(GOOD, (finding("weight-jump", "act"), finding("poisoned-moments", "act"))).damage is Damage.WEIGHTS
    better = replace(GOOD, counterfactual=Counterfactual(step=50, old_loss=1.0, current_loss=2.0, batches=8))
    for detector in ("not-healing", "slow-divergence"):
        both = (finding(detector, "act"), finding("poisoned-moments", "act"))
        assert explain(GOOD, both).damage is Damage.MOMENTS  # a curve alone says nothing about weights
        assert explain(better, both).damage is Damage.WEIGHTS


def test_refusing_again_and_again_means_that_the_weights_are_bad_if_older_ones_are_not() -> None:
    bad = replace(GOOD, loss=math.nan)
    critical = (finding("non-finite", "critical"),)
    better, same = (Counterfactual(step=50, old_loss=old_loss, current_loss=math.nan) for old_loss in (2.0, math.nan))
    for counterfactual, damage in ((better, Damage.WEIGHTS), (same, Damage.NONE), (None, Damage.NONE)):
        damages = [
            explain(replace(bad, refused_in_a_row=n, counterfactual=counterfactual), critical).damage for n in range(4)
        ]
        assert damages == [Damage.NONE, Damage.NONE, damage, damage]
    stuck = replace(bad, refused_in_a_row=5, counterfactual=better)
    assert explain(replace(stuck, input_finite=False), critical).damage is Damage.NONE
    assert explain(replace(stuck, loss=2.0), (finding("gradient-spike", "act"),)).damage is Damage.NONE
    jumped = (*critical, finding("weight-jump", "warn"))
    assert explain(replace(bad, refused_in_a_row=5), jumped).damage is Damage.WEIGHTS


def test_several_batches_are_told_as_means() -> None:
    heard = replace(GOOD, counterfactual=Counterfactual(step=50, old_loss=2.0, current_loss=3.9, batches=12))
    told = explain(heard, (finding("not-healing", "act"),)).evidence
    assert "the mean loss of the last 12 batches is 3.9 now and 2 with the weights of step 50" in told


def test_a_witness_tells_damaged_weights_from_changed_data() -> None:
    lasting = (finding("not-healing", "act"),)
    high = replace(GOOD, loss=4.0)
    same = explain(replace(high, counterfactual=Counterfactual(step=50, old_loss=2.0, current_loss=2.01)), lasting)
    assert (same.cause, same.damage) == ("data-shift", Damage.NONE)
    assert "the loss of this batch is 2.01 now and 2 with the weights of step 50" in same.evidence
    none = Counterfactual(step=50, old_loss=math.nan, current_loss=math.nan, batches=0)  # all were put aside
    told = explain(replace(high, counterfactual=none), lasting).evidence
    assert "high with the weights of step 50 too" in told
    assert "nan" not in told
    worse = explain(replace(high, counterfactual=Counterfactual(step=50, old_loss=2.0, current_loss=3.9)), lasting)
    assert (worse.cause, worse.damage) == ("damaged-weights", Damage.WEIGHTS)
    steps = (*lasting, finding("update-ratio", "info", value=0.3))
    assert (
        explain(replace(high, counterfactual=Counterfactual(step=50, old_loss=2.0, current_loss=3.9)), steps).cause
        == "learning-rate-too-high"
    )


def test_weights_damaged_under_a_risen_learning_rate() -> None:
    lasting = (finding("not-healing", "act"),)
    before = Counterfactual(step=50, old_loss=2.0, current_loss=3.9, lr=0.01)
    assert cause(*lasting, signals=replace(GOOD, loss=4.0, lr=0.3, counterfactual=before)) == "learning-rate-too-high"
    assert cause(*lasting, signals=replace(GOOD, loss=4.0, lr=0.01, counterfactual=before)) == "damaged-weights"
    for lr, expected in ((0.0131, "learning-rate-too-high"), (0.0129, "damaged-weights")):  # by 1.3
        assert cause(*lasting, signals=replace(GOOD, loss=4.0, lr=lr, counterfactual=before)) == expected
    exactly = replace(before, lr=1.0)
    assert cause(*lasting, signals=replace(GOOD, loss=4.0, lr=1.3, counterfactual=exactly)) == "damaged-weights"
    unknown = replace(before, lr=0.0)
    assert cause(*lasting, signals=replace(GOOD, loss=4.0, counterfactual=unknown)) == "damaged-weights"


def test_a_loss_that_creeps_is_judged_by_the_old_batch_alone() -> None:
    creeping = (finding("slow-divergence", "act"),)
    noisy = replace(GOOD, loss=3.0)  # this batch is a hard one: half of its elevation would ask for too much
    moved = explain(replace(noisy, counterfactual=Counterfactual(step=50, old_loss=2.0, current_loss=2.1)), creeping)
    assert (moved.cause, moved.damage) == ("learning-rate-too-high", Damage.WEIGHTS)
    still = explain(replace(noisy, counterfactual=Counterfactual(step=50, old_loss=2.0, current_loss=2.01)), creeping)
    assert (still.cause, still.damage) == ("data-shift", Damage.NONE)
    assert cause(finding("slow-divergence", "warn"), signals=still_signals(noisy)) == "data-shift"


def still_signals(signals: Signals) -> Signals:
    return replace(signals, counterfactual=Counterfactual(step=50, old_loss=2.0, current_loss=2.0))


def test_a_suspicion_has_no_cause_yet() -> None:
    assert cause(finding("slow-divergence", "info")) == "unknown"
    assert cause(finding("slow-divergence", "info"), signals=still_signals(GOOD)) == "unknown"


def test_a_witness_is_heard_about_losses_that_are_no_numbers() -> None:
    stuck = replace(GOOD, loss=math.nan, refused_in_a_row=3)
    critical = (finding("non-finite", "critical"),)
    proven = explain(
        replace(stuck, counterfactual=Counterfactual(step=50, old_loss=2.0, current_loss=math.nan)), critical
    )
    assert (proven.cause, proven.damage) == ("damaged-weights", Damage.WEIGHTS)
    clean = explain(
        replace(stuck, counterfactual=Counterfactual(step=50, old_loss=math.nan, current_loss=math.nan)), critical
    )
    assert (clean.cause, clean.damage) == ("non-finite-loss", Damage.NONE)


def test_an_acquittal_of_the_weights_leaves_the_moments() -> None:
    found = (finding("slow-divergence", "act"), finding("poisoned-moments", "act"))
    is_cleared = replace(GOOD, loss=4.0, counterfactual=Counterfactual(step=50, old_loss=2.0, current_loss=2.0))
    assert explain(is_cleared, found).damage is Damage.MOMENTS


losses = st.floats(-1e6, 1e6)
anything = st.floats()


def worse(old_loss: float, current_loss: float) -> bool:
    return is_worse(Counterfactual(step=0, old_loss=old_loss, current_loss=current_loss))


@given(losses, losses, st.floats(0, 1e6))
def test_the_worse_the_present_weights_the_stronger_the_case(old_loss: float, current_loss: float, more: float) -> None:
    assert worse(old_loss, current_loss + more) >= worse(old_loss, current_loss)


@given(losses)
def test_older_weights_that_do_no_better_clear_the_present_ones(old_loss: float) -> None:
    assert not worse(old_loss, old_loss)
    assert not worse(old_loss, old_loss + 0.01 * abs(old_loss))
    assert not worse(old_loss, old_loss - 1.0)


@given(losses, st.sampled_from([math.nan, math.inf]))
def test_what_only_the_present_weights_cannot_compute_convicts_them(old_loss: float, bad: float) -> None:
    assert worse(old_loss, bad)
    assert not worse(bad, old_loss)
    assert not worse(bad, bad)


@given(losses, st.floats(1e-3, 1e6))
def test_weights_that_do_better_by_more_than_chance_convict(old_loss: float, up: float) -> None:
    if up > 0.03 * abs(old_loss):
        assert worse(old_loss, old_loss + up)


severities = st.sampled_from(["info", "warn", "act", "critical"])
some_findings = st.lists(st.builds(finding, st.sampled_from(DETECTORS), severities, value=anything), max_size=4)
some_signals = st.builds(
    Signals,
    step=st.just(100),
    loss=anything,
    grad_norm=anything,
    lr=anything,
    scaled=st.booleans(),
    input_finite=st.sampled_from([None, True, False]),
    refused_in_a_row=st.integers(0, 5),
    counterfactual=st.none() | st.builds(Counterfactual, step=st.just(3), old_loss=anything, current_loss=anything),
)


@given(some_signals, some_findings)
def test_every_case_has_a_cause_of_the_list_and_its_advice(signals: Signals, found: list[Finding]) -> None:
    diagnosis = explain(signals, tuple(found))
    assert diagnosis.findings == tuple(found)
    assert (diagnosis.cause == "healthy") == (not found)
    assert diagnosis.advice == advise(Cause(diagnosis.cause), as_measured(UNKNOWN_SETUP, signals))
    assert diagnosis.damage is Damage.NONE or found


def test_what_led_to_nothing_is_a_warning_without_damage() -> None:
    found = (finding("weight-jump", "act"), finding("loss-spike", "info"), finding("non-finite", "critical"))
    told = as_warning(Diagnosis(cause="damaged-weights", damage=Damage.WEIGHTS, findings=found))
    assert [f.severity for f in told.findings] == ["warn", "info", "critical"]
    assert (told.cause, told.damage) == ("damaged-weights", Damage.NONE)


def test_batches_that_were_to_blame_make_it_bad_data() -> None:
    told = of_data(Diagnosis(cause="learning-rate-too-high", evidence="high"), 3)
    assert told.cause == "bad-batch"
    assert told.evidence.startswith("high; 3 batches are unusual")
    assert of_data(Diagnosis(cause="repeated-batch"), 3).cause == "repeated-batch"


def flip(*, repaired: bool) -> BitFlip:
    return BitFlip(tensor="0.weight", index=0, bit=30, repaired=repaired)


def test_bits_that_are_in_place_again_say_something_about_the_memory() -> None:
    found, again = finding("bit-flip", "act"), Plan(actions=("skip-step",))
    for flips, of_memory in (((True,), True), ((True, True), True), ((True, False), False), ((), False)):
        signals = replace(GOOD, bit_flips=tuple(flip(repaired=each) for each in flips))
        told = explain(signals, (found,))
        assert ("ECC" in told.advice) is of_memory, flips
        assert (advised(told, signals, again) is told) is of_memory


def test_a_flipped_bit_damages_where_it_could_not_be_put_back() -> None:
    for severity, value, damage in (
        ("act", 1.0, Damage.WEIGHTS),
        ("critical", 0.5, Damage.WEIGHTS),
        ("act", 0.0, Damage.NONE),
        ("warn", 1.0, Damage.NONE),
    ):
        assert explain(GOOD, (finding("bit-flip", severity, value=value),)).damage is damage, (severity, value)


def test_a_batch_that_repeats_and_rollouts_are_about_the_weights() -> None:
    assert explain(GOOD, (finding("same-batch", "act"),)).damage is Damage.WEIGHTS
    assert explain(GOOD, (finding("same-batch", "warn"),)).damage is Damage.NONE
    tried = Counterfactual(step=50, old_loss=-3.0, current_loss=-1.5, batches=4, rollouts=True)
    told = explain(replace(GOOD, counterfactual=tried), (finding("reward-collapse", "act"),))
    assert told.damage is Damage.WEIGHTS
    assert told.evidence.endswith("4 rollouts earn 1.5 now and 3 with the weights of step 50 on average")


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        ([finding("policy-mismatch", "act"), finding("ratio-explosion", "act")], "policy-mismatch"),
        ([finding("ratio-explosion", "act"), finding("kl-blow-up", "act")], "ratio-explosion"),
        ([finding("reward-hacking"), finding("value-divergence")], "reward-hacking"),
        ([finding("value-divergence"), finding("kl-blow-up")], "value-divergence"),
        ([finding("reward-collapse"), finding("dead-groups")], "policy-collapse"),
        ([finding("reward-collapse"), finding("bad-advantages")], "bad-advantages"),
        ([finding("dead-groups"), finding("flat-reward")], "dead-groups"),
        ([finding("miscomputation", "act"), finding("bit-flip", "act")], "miscomputed-step"),
        ([finding("bit-flip", "act"), finding("early-divergence", "act")], "damaged-weights"),
        ([finding("weight-jump", "act"), finding("odd-replica", "act")], "odd-replica"),
    ],
)
def test_which_of_two_findings_decides(found: list[Finding], expected: str) -> None:
    assert cause(*found) == cause(*reversed(found)) == expected


def test_one_batch_is_told_as_one() -> None:
    tried = Counterfactual(step=50, old_loss=2.0, current_loss=3.0)
    told = [
        explain(replace(GOOD, counterfactual=replace(tried, batches=count)), (finding("not-healing"),)).evidence
        for count in (1, 2)
    ]
    assert "the loss of this batch is" in told[0]
    assert "the last 2 batches" in told[1]


def test_a_diagnosis_asks_for_what_the_run_lacks() -> None:
    found = (finding("gradient-spike", "act"),)
    assert "max_grad_norm" in explain(GOOD, found).advice
    assert "max_grad_norm" not in explain(GOOD, found, Setup(clips=True)).advice
    plain = explain(GOOD, found)
    assert "max_grad_norm" not in advised(plain, GOOD, Plan(actions=("rescale",))).advice
    assert "max_grad_norm" not in advised(plain, GOOD, Plan(actions=("skip-step",)), Setup(clips=True)).advice


@pytest.mark.parametrize("detector", ["gradient-spike", "oscillation", "worse-than-best", "poisoned-moments"])
@pytest.mark.parametrize("now", [2.0, 3.9])
def test_a_comparison_decides_about_lasting_rises_only(detector: str, now: float) -> None:
    plain = cause(finding(detector, "act"))
    tried = Counterfactual(step=50, old_loss=2.0, current_loss=now, lr=0.01)
    for beside in ((), (finding("learning-rate-bounds", "info"),), (finding("not-healing", "info"),)):
        assert cause(finding(detector, "act"), *beside, signals=replace(GOOD, counterfactual=tried)) == plain, beside
