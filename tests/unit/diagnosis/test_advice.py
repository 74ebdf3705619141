"""Advice leaves out what the guard has done and what the run is set up with, and says what was done."""

import re
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steadystep.diagnosis import ADVICE, Cause, RunHistory
from steadystep.diagnosis.advice import TIPS, advise, remedies_of
from steadystep.diagnosis.causes import REMEDY_OF, Remedy
from steadystep.diagnosis.facts import Interventions, Setup
from steadystep.records import Action, Diagnosis, Finding, Plan, Signals

# What a recommendation looks like in words; a clause about what was done says "the guard ..." and is left out first.
WORDS = {
    Remedy.SKIP: r"\bskip such|\bskip the batch",
    Remedy.ROLL_BACK: r"\broll back to",
    Remedy.LOWER_RATE: r"\blower the learning rate|\bdivide the learning rate|with a lower learning rate$",
    Remedy.WARM_UP: r"\bwarm (it|the learning rate) up",
    Remedy.CLIP: r"\bclip the gradient",
    Remedy.GIVE_BATCH: r"batch=\.\.\.",
}
FP16 = re.compile(r"fp16|loss scale|GradScaler")
WHOLE = (Action.ROLLBACK, Action.REPLAY)
PART = (Action.ROLLBACK, Action.REPLAY, Action.CUT_LR, Action.SKIP_BATCHES, Action.REWARM)
SKIP = (Action.SKIP_STEP,)

TABLE = [
    # cause, actions, what the advice says, what it does not say
    (
        Cause.DAMAGED_WEIGHTS,
        WHOLE,
        ["no progress is lost", "memory", "param.data", "steadystep replay"],
        ["roll back to"],
    ),
    (Cause.DAMAGED_WEIGHTS, PART, ["limited the learning rate to 0.001"], ["roll back to", "a lower learning rate"]),
    (Cause.DAMAGED_WEIGHTS, (), ["roll back to a checkpoint", "lower learning rate"], ["the guard"]),
    (Cause.NON_FINITE_LOSS, SKIP, ["skipped the update", "log(0)"], ["skip such"]),
    (Cause.NON_FINITE_INPUT, SKIP, ["skipped the update", "clean the data"], ["skip such"]),
    (Cause.NON_FINITE_INPUT, (), ["skip such batches"], ["the guard"]),
    (Cause.SCHEDULE_ERROR, (Action.HOLD_LR,), ["holds the learning rate at 0.001", "fix the schedule"], []),
    (Cause.LEARNING_RATE_TOO_HIGH, PART, ["limited the learning rate", "your own settings"], ["divide"]),
    (Cause.LEARNING_RATE_TOO_HIGH, (), ["divide the learning rate by 3 to 10", "find_lr"], ["your own settings"]),
    (Cause.EXPLODING_GRADIENT, (Action.RESCALE,), ["scaled the gradient down"], ["clip the gradient"]),
    (Cause.EXPLODING_GRADIENT, (), ["clip the gradient", "warm the learning rate up"], ["single spike"]),
    (Cause.POISONED_MOMENTS, (Action.RESTORE_MOMENTS,), ["restored", "beta2"], ["hundreds of steps"]),
    (Cause.ODD_REPLICA, (Action.COPY_REPLICA, Action.SKIP_STEP), ["from rank 3", "memory"], []),
    (Cause.SCALE_OVERFLOW, (Action.BACK_OFF_SCALE,), ["lowered the loss scale", "routine"], []),
    (Cause.BAD_BATCH, (Action.LEAVE_OUT,), ["left the bad micro-batches out"], []),
]


def plan_of(actions: tuple[str, ...]) -> Plan:
    return Plan(actions=actions, lr=1e-3 if {Action.CUT_LR, Action.HOLD_LR} & set(actions) else None, rank=3)


@pytest.mark.parametrize(("cause", "actions", "says", "says_not"), TABLE)
def test_what_was_done_changes_the_advice(
    cause: Cause, actions: tuple[str, ...], says: list[str], says_not: list[str]
) -> None:
    text = advise(cause, Setup(precision="fp16", writes_bundles=True), plan_of(actions))
    assert all(part in text for part in says), text
    assert not any(part in text for part in says_not), text


@given(
    st.sampled_from(Cause),
    st.lists(st.sampled_from([*REMEDY_OF, *WHOLE, Action.RESTORE_MOMENTS]), unique=True, max_size=4),
    st.builds(
        Setup,
        precision=st.sampled_from(["", "fp32", "bf16", "fp16"]),
        clips=st.booleans(),
        warms_up=st.booleans(),
        gives_batch=st.booleans(),
        writes_bundles=st.booleans(),
    ),
)
def test_nothing_is_recommended_that_is_in_the_record(cause: Cause, actions: list[str], setup: Setup) -> None:
    text = advise(cause, setup, plan_of(tuple(actions)))
    clauses = [clause for clause in text.split("; ") if not clause.startswith("the guard ")]
    there = remedies_of(setup) | {REMEDY_OF[action] for action in actions if action in REMEDY_OF}
    for remedy, clause in product(there, clauses):
        assert not re.search(WORDS[remedy], clause), (remedy, clause)
    if setup.precision in ("fp32", "bf16"):
        assert not any(FP16.search(clause) for clause in clauses), clauses
    if not setup.precision:
        assert all(clause.startswith("if the run uses fp16: ") for clause in clauses if FP16.search(clause)), clauses


def test_every_tagged_tip_is_recognized_by_its_words() -> None:
    for tips in TIPS.values():
        for tip in tips:
            found = {remedy for remedy, words in WORDS.items() if re.search(words, tip.text)}
            assert found == ({tip.remedy} if tip.remedy else set()), tip.text
            assert isinstance(tip.remedy, Remedy | None)
            assert not isinstance(tip.text, Remedy)


def test_every_cause_has_advice_and_only_a_healthy_run_has_none() -> None:
    assert set(TIPS) == set(ADVICE) == set(Cause)
    assert {cause for cause, text in ADVICE.items() if not text} == {Cause.HEALTHY}


@pytest.mark.parametrize("cause", [c for c in Cause if c is not Cause.HEALTHY])
@pytest.mark.parametrize("actions", [(), SKIP, WHOLE, PART, (Action.RESCALE,), (Action.HOLD_LR,)])
def test_there_is_always_something_left_to_do(cause: Cause, actions: tuple[str, ...]) -> None:
    text = advise(cause, Setup(precision="fp16", clips=True, warms_up=True, gives_batch=True), plan_of(actions))
    assert [clause for clause in text.split("; ") if not clause.startswith("the guard ")]


def incident(step: int) -> Diagnosis:
    found = Finding(detector="weight-jump", step=step, severity="act", value=9.0, limit=1.0, what="jumped")
    return Diagnosis(cause="damaged-weights", findings=(found,))


def test_a_run_remembers_what_was_done_also_after_a_resume() -> None:
    history = RunHistory(Setup(precision="fp32"))
    for step in range(40):
        signals = Signals(step=step, loss=1.0, grad_norm=1.0, lr=0.1)
        bad = step == 20
        plan = Plan(actions=WHOLE, to=10) if bad else Plan()
        history.note(signals, incident(step) if bad else Diagnosis(), stepped=not bad, plan=plan)
    again = RunHistory(Setup(precision="fp32"))
    again.load_state_dict(history.state_dict())
    for each in (history, again):
        text = next(d.advice for d in each.diagnose() if d.cause == "damaged-weights")
        assert "no progress is lost" in text
        assert "roll back to" not in text


def test_a_learning_rate_that_was_warmed_up_needs_no_warmup() -> None:
    flat, warm = RunHistory(), RunHistory()
    found = Finding(detector="gradient-spike", step=50, severity="act", value=9.0, limit=1.0, what="spike")
    for history in (flat, warm):
        for step in range(60):
            lr = 0.01 * min(1.0, (step + 1) / 20) if history is warm else 0.01
            bad = Diagnosis(cause="exploding-gradient", findings=(found,)) if step == 50 else Diagnosis()
            history.note(Signals(step=step, loss=1.0, grad_norm=1.0, lr=lr), bad, stepped=True)
    assert "warm the learning rate up" in flat.diagnose()[0].advice
    assert "warm the learning rate up" not in warm.diagnose()[0].advice


def test_what_was_done_is_one_clause_and_the_gravest_act_comes_first() -> None:
    acts = (
        (Action.ROLLBACK, "rolled back"),
        (Action.RAISE_COEFFICIENT, "raised beta"),
        (Action.RESTORE_MOMENTS, "restored an earlier state of the optimizer"),
        (Action.COPY_REPLICA, "copied weights and moments from rank 3"),
        (Action.BACK_OFF_SCALE, "skipped the update and lowered the loss scale"),
        (Action.LEAVE_OUT, "left the bad micro-batches out"),
        (Action.SKIP_STEP, "skipped the update"),
        (Action.HOLD_LR, "holds the learning rate at 0.001"),
        (Action.RESCALE, "scaled the gradient down"),
        (Action.RESTORE_KEPT, "restored the kept objects"),
    )
    for place, (action, words) in enumerate(acts):
        actions = (action, *(later for later, _ in acts[place + 1 :]))
        lr = 1e-3 if action is Action.HOLD_LR else None
        text = advise(Cause.UNKNOWN, plan=Plan(actions=actions, lr=lr, rank=3, raises="beta"))
        assert text.split("; ")[0] == f"the guard {words}" or text.startswith(f"the guard {words} "), action
        assert text.count("the guard") == 1
        assert "learning rate" not in text or lr
    assert advise(Cause.UNKNOWN, plan=Plan(actions=("none of these",))) == ADVICE[Cause.UNKNOWN]


def test_a_limit_of_the_rate_is_told_with_what_was_done() -> None:
    for action in (Action.ROLLBACK, Action.SKIP_STEP):
        text = advise(Cause.UNKNOWN, plan=Plan(actions=(action, Action.CUT_LR), lr=1e-3))
        assert "and limited the learning rate to 0.001" in text
    both = Plan(actions=(Action.RAISE_COEFFICIENT, Action.SKIP_STEP), raises="beta", lr=1e-3)
    assert "skipped the update" in advise(Cause.UNKNOWN, plan=both)


def test_damaged_weights_that_were_undone_are_to_be_confirmed() -> None:
    undone = Plan(actions=(Action.ROLLBACK,))
    assert "leaves a bundle" in advise(Cause.DAMAGED_WEIGHTS, plan=undone)
    assert "replay BUNDLE" in advise(Cause.DAMAGED_WEIGHTS, Setup(writes_bundles=True), undone)
    assert "to confirm" in advise(Cause.DAMAGED_WEIGHTS, earlier=frozenset({Action.ROLLBACK}))
    assert "to confirm" not in advise(Cause.DAMAGED_WEIGHTS, plan=Plan(actions=SKIP))
    assert "to confirm" not in advise(Cause.NON_FINITE_LOSS, plan=undone)


def test_settings_of_the_run_are_remedies() -> None:
    assert remedies_of(Setup()) == frozenset()
    assert remedies_of(Setup(clips=True)) == {Remedy.CLIP}
    assert remedies_of(Setup(warms_up=True)) == {Remedy.WARM_UP}
    assert remedies_of(Setup(gives_batch=True)) == {Remedy.GIVE_BATCH}


def test_what_the_guard_did_later_is_told_with_all_it_did() -> None:
    done = Interventions(Plan(actions=(Action.CUT_LR, Action.SKIP_STEP)))
    last = Plan(actions=(Action.SKIP_STEP, Action.ROLLBACK), to=3)
    done.add(last)
    again = Interventions.from_state(done.state_dict())
    for each in (done, again):
        assert each.plan == last
        assert each.actions == [Action.CUT_LR, Action.SKIP_STEP, Action.ROLLBACK]
