"""From a diagnosis to a plan: the smallest response that keeps the weights clean."""

import math
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steadystep.policy import Budget, Limits, decide
from steadystep.records import Counterfactual, Damage, Diagnosis, Finding, Outcome, Plan, Severity, Signals

GOOD = Signals(step=500, loss=2.0, losses=(2.0,), grad_norm=1.0, lr=0.1)
LR_STEPS = {"cut-lr", "hold-lr", "rewarm"}
NOT_CAREFUL = LR_STEPS | {"rollback", "restore-moments", "skip-batches"}


@dataclass
class State:
    step: int
    lr: float = 0.1
    second_moment: float | None = None


def finding(detector: str, severity: Severity = "act", *, value: float = 20.0, **more: object) -> Finding:
    return Finding(detector=detector, step=500, severity=severity, value=value, limit=10.0, **more)


def diagnosed(*found: Finding, damage: Damage = Damage.NONE) -> Diagnosis:
    return Diagnosis(cause="unknown", damage=damage, findings=found)


def rolled_back(budget: Budget, at: int, to: int) -> None:
    plan = Plan(actions=("rollback",), to=to)
    budget.count(Outcome(step=at, reading=1.0, stepped=False, plan=plan, restored=to))


def skipped(budget: Budget, *steps: int) -> Budget:
    for step in steps:
        budget.count(Outcome(step=step, reading=1.0, stepped=False, plan=Plan(actions=("skip-step",))))
    return budget


SPIKE = finding("gradient-spike", baseline=3.0)
EXTREME = finding("gradient-spike", value=101.0, baseline=3.0)
NAN = finding("non-finite", "critical", value=math.nan)
OVERFLOW = finding("non-finite", "info", value=math.inf)
TERM = finding("non-finite", "warn", value=math.nan)
JUMP = finding("learning-rate-jump", baseline=0.02)
POISON = finding("poisoned-moments", since=400)
STUCK = finding("not-healing", since=490)
HEARD = replace(GOOD, counterfactual=Counterfactual(step=300, old_loss=1.0, current_loss=2.0))
OVERFLOWED = replace(GOOD, grad_norm=math.inf, scaled=True, scale=65536.0)
GROUP = replace(GOOD, losses=(2.0, 2.0), repeatable=True)


def test_poison_that_came_after_every_state_by_its_numbers() -> None:
    """The last clean probe is older than all states: the newest with the second moments of then is taken."""
    found = diagnosed(finding("poisoned-moments", since=400, baseline=1e-4), damage=Damage.MOMENTS)
    states = [State(430, second_moment=2e-4), State(450, second_moment=3e-4), State(470, second_moment=5.0)]
    assert decide(GOOD, found, budget=Budget(), states=states).to == 450
    assert decide(GOOD, found, budget=Budget(), states=states[2:]).to is None
    assert decide(GOOD, found, budget=Budget(), states=[State(450)]).to is None
    assert decide(GOOD, found, budget=Budget(), states=[State(390, second_moment=9.0), *states]).to == 390


TABLE = [
    (GOOD, diagnosed(), Plan()),
    (GOOD, diagnosed(finding("loss-spike", "info")), Plan()),
    (GOOD, diagnosed(finding("oscillation", "warn")), Plan()),
    (GOOD, diagnosed(replace(SPIKE, severity="info")), Plan()),
    (GOOD, diagnosed(replace(JUMP, severity="warn")), Plan()),
    (GOOD, diagnosed(finding("loss-spike", "act")), Plan()),
    (GOOD, diagnosed(SPIKE), Plan(actions=("rescale",), norm=3.0)),
    (GROUP, diagnosed(SPIKE), Plan(actions=("rescale",), norm=3.0)),
    (GOOD, diagnosed(replace(EXTREME, value=100.0)), Plan(actions=("rescale",), norm=3.0)),
    (GOOD, diagnosed(EXTREME), Plan(actions=("skip-step",))),
    (GROUP, diagnosed(EXTREME), Plan(actions=("skip-step",))),
    (GOOD, diagnosed(NAN), Plan(actions=("skip-step",))),
    (GROUP, diagnosed(NAN), Plan(actions=("leave-out",))),
    (replace(GROUP, repeatable=False), diagnosed(NAN), Plan(actions=("skip-step",))),
    (GOOD, diagnosed(NAN, SPIKE), Plan(actions=("skip-step",))),
    (OVERFLOWED, diagnosed(OVERFLOW), Plan(actions=("back-off-scale",))),
    (OVERFLOWED, diagnosed(OVERFLOW, NAN), Plan(actions=("skip-step",))),
    (replace(GOOD, loss=math.nan), diagnosed(TERM), Plan()),  # every gradient is finite: the update is taken
    (replace(GOOD, loss=math.nan), diagnosed(replace(TERM, severity="info")), Plan()),
    (replace(GOOD, loss=math.nan), diagnosed(TERM, SPIKE), Plan(actions=("rescale",), norm=3.0)),
    (GOOD, diagnosed(replace(JUMP, baseline=0.0)), Plan()),
    (GOOD, diagnosed(JUMP), Plan(actions=("hold-lr",), lr=0.02, hold=500)),
    (GOOD, diagnosed(JUMP, SPIKE), Plan(actions=("rescale", "hold-lr"), norm=3.0, lr=0.02, hold=500)),
    (GOOD, diagnosed(JUMP, NAN), Plan(actions=("skip-step", "hold-lr"), lr=0.02, hold=500)),
    (GOOD, diagnosed(POISON, damage=Damage.MOMENTS), Plan(actions=("restore-moments",), to=390)),
    (GOOD, diagnosed(POISON, NAN, damage=Damage.MOMENTS), Plan(actions=("restore-moments", "skip-step"), to=390)),
    (GOOD, diagnosed(replace(POISON, since=None), damage=Damage.MOMENTS), Plan()),
    (GOOD, diagnosed(replace(POISON, since=100), damage=Damage.MOMENTS), Plan()),
    (GOOD, diagnosed(replace(POISON, since=390), damage=Damage.MOMENTS), Plan(actions=("restore-moments",), to=390)),
]


def test_what_is_planned() -> None:
    states = [State(300), State(390), State(480)]
    for signals, diagnosis, expected in TABLE:
        plan = decide(signals, diagnosis, budget=Budget(), states=states)
        assert replace(plan, reason="") == expected, diagnosis
        assert plan.proceeds or plan.reason == "unknown"


def test_a_learning_rate_that_crept_up_is_held() -> None:
    creep = finding("learning-rate-creep", baseline=0.02)
    plan = decide(GOOD, diagnosed(creep), budget=Budget())
    assert (plan.actions, plan.lr, plan.hold) == (("hold-lr",), 0.02, 500)
    assert decide(GOOD, diagnosed(creep), budget=Budget(), ceiling=0.02).proceeds  # it is held already
    assert decide(GOOD, diagnosed(creep), budget=Budget(), mode="careful").proceeds
    assert decide(GOOD, diagnosed(replace(creep, severity="warn")), budget=Budget()).proceeds
    leap = decide(GOOD, diagnosed(creep, finding("learning-rate-jump", baseline=0.05)), budget=Budget())
    assert (leap.actions, leap.lr) == (("hold-lr",), 0.05)


class TestGoingBack:
    def plan(self, *, budget: Budget | None = None, states: list[State] | None = None, **more: object) -> Plan:
        found = diagnosed(STUCK, damage=Damage.WEIGHTS)
        budget = budget or Budget()
        budget.see(found)
        states = [State(300), State(390), State(470), State(480)] if states is None else states
        return decide(more.pop("signals", GOOD), found, budget=budget, states=states, **more)

    def test_the_whole_plan(self) -> None:
        plan = self.plan()
        assert plan.actions == ("rollback", "cut-lr", "skip-batches", "rewarm")
        assert plan.to == 470  # the newest that was followed by 20 steps before the first sign at 490
        assert plan.lr == pytest.approx(0.7 * 0.1)

    def test_with_batches_at_hand_it_catches_up(self) -> None:
        limits = Limits(replays=True)
        plan = self.plan(limits=limits)
        assert plan.actions == ("rollback", "replay", "cut-lr", "skip-batches", "rewarm")
        assert (plan.until, plan.outside, plan.only_whole, plan.hold) == (490, False, False, None)
        budget = Budget()
        rolled_back(budget, at=450, to=390)
        again = self.plan(limits=limits, budget=budget, signals=HEARD)
        assert again.only_whole

    def test_weights_that_changed_by_themselves_are_caught_up_with_to_the_end(self) -> None:
        jump = finding("weight-jump", since=487)
        for limits, until in ((Limits(replays=True), 487), (Limits(), None)):
            budget = Budget()
            found = diagnosed(jump, damage=Damage.WEIGHTS)
            budget.see(found)
            plan = decide(GOOD, found, budget=budget, states=[State(390), State(470)], limits=limits)
            assert (plan.to, plan.until, plan.outside) == (390, until, until is not None)

    def test_again_means_older_and_deeper(self) -> None:
        budget = Budget()
        rolled_back(budget, at=450, to=390)
        plan = self.plan(budget=budget, signals=HEARD)
        assert plan.to == 300
        assert plan.lr == pytest.approx(0.5 * 0.1)

    def test_again_means_older_whatever_younger_state_does_better(self) -> None:
        budget = Budget()
        rolled_back(budget, at=450, to=390)
        heard = replace(GOOD, counterfactual=Counterfactual(step=470, old_loss=1.0, current_loss=2.0))
        assert self.plan(budget=budget, signals=heard).to == 300

    def test_again_with_nothing_older_goes_to_the_oldest(self) -> None:
        for step in (300, 470):
            budget = Budget()
            rolled_back(budget, at=450, to=300)
            heard = replace(GOOD, counterfactual=Counterfactual(step=step, old_loss=1.0, current_loss=2.0))
            assert self.plan(budget=budget, signals=heard).to == 300

    def test_again_without_anybody_to_ask_is_left_alone(self) -> None:
        """Going back has not helped, so it is the data; a bad update is refused all the same."""
        budget = Budget()
        rolled_back(budget, at=450, to=390)
        assert self.plan(budget=budget).proceeds
        found = diagnosed(STUCK, NAN, damage=Damage.WEIGHTS)
        assert "rollback" in decide(GOOD, found, budget=budget, states=[State(300)]).actions

    def test_replicas_that_differ_again_are_not_the_data(self) -> None:
        """Their checksums are the witness: weights that differ between ranks are never left alone."""
        budget = Budget()
        rolled_back(budget, at=450, to=390)
        signals = replace(GOOD, odd_replicas=("weight on rank 1",))
        assert "rollback" in self.plan(budget=budget, signals=signals).actions

    def test_one_odd_replica_is_copied_from_a_healthy_rank_and_nobody_goes_back(self) -> None:
        odd = Finding(detector="odd-replica", step=500, severity="act", value=1.0, limit=0.0)
        signals = replace(GOOD, odd_replicas=("weight on rank 1",), healthy_rank=2)
        found = diagnosed(odd, damage=Damage.WEIGHTS)
        plan = decide(signals, found, budget=Budget(), states=[State(300)])
        assert (plan.actions, plan.rank, plan.to) == (("copy-replica", "skip-step"), 2, None)
        assert decide(signals, found, budget=Budget(), mode="observe").proceeds
        assert "copy-replica" not in decide(signals, found, budget=Budget(), mode="careful").actions

    def test_long_ago_is_not_again(self) -> None:
        budget = Budget()
        rolled_back(budget, at=0, to=-1)
        plan = self.plan(budget=budget)
        assert plan.to == 470
        assert plan.lr == pytest.approx(0.7 * 0.1)

    def test_what_the_user_started_with_needs_no_trial(self) -> None:
        early = replace(GOOD, step=5)
        found = diagnosed(replace(STUCK, step=5, since=1), damage=Damage.WEIGHTS)
        plan = decide(early, found, budget=Budget(), states=[State(-1), State(0)])
        assert plan.to == -1

    def test_untrained_weights_are_nothing_to_go_back_to_once_something_was_learned(self) -> None:
        for step, goes in ((20, True), (200, False), (500, False)):
            found = diagnosed(replace(STUCK, step=step, since=step), damage=Damage.WEIGHTS)
            plan = decide(replace(GOOD, step=step), found, budget=Budget(), states=[State(-1)])
            assert ("rollback" in plan.actions) is goes

    def test_what_was_tried_is_what_is_restored(self) -> None:
        for step in (300, 390, 470):
            heard = replace(GOOD, counterfactual=Counterfactual(step=step, old_loss=1.0, current_loss=2.0))
            assert self.plan(signals=heard).to == step
        assert (
            self.plan(signals=replace(GOOD, counterfactual=Counterfactual(step=480, old_loss=1.0, current_loss=2.0))).to
            == 470
        )  # not trusted

    def test_how_deep_it_cuts(self) -> None:
        for lr, state_lr, ceiling, expected in (
            (0.1, 0.1, None, 0.07),
            (0.3, 0.1, None, 0.07),  # the learning rate that did the damage is not what to cut from
            (0.1, 0.3, None, 0.07),
            (0.1, 0.1, 0.05, 0.07),  # not the ceiling of an older trouble
            (0.1, 0.02, 1e-9, 0.07),
            (0.1, 1e-9, None, 0.001),  # never below a hundredth
        ):
            plan = self.plan(signals=replace(GOOD, lr=lr), states=[State(300, state_lr)], ceiling=ceiling)
            assert plan.lr == pytest.approx(expected)

    def test_how_deep_it_cuts_the_second_time(self) -> None:
        for state_lr, ceiling, expected in ((0.1, 0.05, 0.025), (0.02, 0.05, 0.01), (0.1, 1e-9, 0.001)):
            budget = Budget()
            rolled_back(budget, at=450, to=390)
            plan = self.plan(budget=budget, signals=HEARD, states=[State(300, state_lr)], ceiling=ceiling)
            assert plan.lr == pytest.approx(expected)

    def test_a_sudden_nan_is_not_the_learning_rates_doing(self) -> None:
        found = diagnosed(NAN, damage=Damage.WEIGHTS)
        budget = Budget()
        budget.see(found)
        plan = decide(GOOD, found, budget=budget, states=[State(300), State(470)])
        assert plan.actions == ("rollback", "skip-batches")
        assert (plan.to, plan.lr, plan.hold) == (470, None, None)
        # with a sign before it, it may be
        foretold = Budget()
        foretold.see(diagnosed(replace(SPIKE, step=480)))
        foretold.see(found)
        assert {"cut-lr", "rewarm"} < set(decide(GOOD, found, budget=foretold, states=[State(300)]).actions)

    def test_weights_that_jumped_between_two_updates_are_not_the_learning_rates_doing(self) -> None:
        """Unless updates are made again: then it shows, and with nothing lost nothing is cut."""
        for detector in ("weight-jump", "odd-replica"):
            found = diagnosed(finding(detector, since=487), damage=Damage.WEIGHTS)
            for limits, cut in ((Limits(), False), (Limits(replays=True), True)):
                budget = Budget()
                budget.see(found)
                plan = decide(GOOD, found, budget=budget, states=[State(390)], limits=limits)
                assert (plan.lr is not None) is cut
                assert bool(LR_STEPS.intersection(plan.actions)) is cut

    def test_settings_leave_parts_of_it_out(self) -> None:
        plan = self.plan(limits=Limits(lr_mult=1.0, rewarm_steps=0, skips_batches=False))
        assert plan.actions == ("rollback",)
        assert plan.lr is None
        assert self.plan(limits=Limits(trust_steps=150)).to == 300
        assert "rollback" not in self.plan(limits=Limits(rolls_back=False)).actions

    def test_with_nothing_to_go_back_to_nothing_is_done(self) -> None:
        """A lower learning rate would undo no damage."""
        for states in ([], [State(485, lr=0.01)], [State(-1)]):
            assert self.plan(states=states).proceeds

    def test_with_nothing_to_go_back_to_a_bad_update_is_refused(self) -> None:
        found = diagnosed(NAN, damage=Damage.WEIGHTS)
        assert decide(GOOD, found, budget=Budget()).actions == ("skip-step",)
        spent = skipped(Budget(max_skips_in_a_row=3), 498, 499)
        assert decide(GOOD, found, budget=spent).actions == ("skip-step", "stop")

    def test_rollbacks_spent_is_the_end(self) -> None:
        budget = Budget(max_rollbacks=2)
        rolled_back(budget, at=300, to=200)
        assert "rollback" in self.plan(budget=budget, signals=HEARD).actions
        rolled_back(budget, at=400, to=200)
        plan = self.plan(budget=budget, signals=HEARD)
        assert plan.actions == ("rollback", "stop")  # with good weights in place
        assert plan.lr is None
        assert self.plan(budget=budget, signals=HEARD, states=[]).actions == ("skip-step", "stop")


def test_careful_and_observe_leave_out_what_autopilot_would_do() -> None:
    states = [State(300), State(390), State(470)]
    for found, damage, careful in (
        ((STUCK,), Damage.WEIGHTS, ()),
        ((STUCK, NAN), Damage.WEIGHTS, ("skip-step",)),
        ((POISON,), Damage.MOMENTS, ()),
        ((POISON, SPIKE), Damage.MOMENTS, ("rescale",)),
        ((JUMP,), Damage.NONE, ()),
        ((SPIKE,), Damage.NONE, ("rescale",)),
    ):
        diagnosis = diagnosed(*found, damage=damage)
        plans = {
            mode: decide(GOOD, diagnosis, budget=Budget(), mode=mode, states=states)
            for mode in ("observe", "careful", "autopilot")
        }
        assert plans["observe"].proceeds
        assert plans["careful"].actions == careful
        assert plans["careful"].lr is None
        assert plans["careful"].to is None
        assert plans["autopilot"].actions


def test_skips_spent_is_the_end() -> None:
    for found in (diagnosed(NAN), diagnosed(EXTREME)):
        assert decide(GOOD, found, budget=skipped(Budget(max_skips_in_a_row=3), 499)).actions == ("skip-step",)
        spent = skipped(Budget(max_skips_in_a_row=3), 498, 499)
        assert decide(GOOD, found, budget=spent).actions == ("skip-step", "stop")
    assert decide(GOOD, diagnosed(SPIKE), budget=spent).actions == ("rescale",)


def test_skips_spent_with_nobody_to_ask_tries_one_rollback_before_the_end() -> None:
    """Where nothing can be run again it may be the weights."""
    states = [State(300), State(470)]
    asked = replace(GOOD, counterfactual=Counterfactual(step=300, old_loss=math.nan, current_loss=math.nan))
    for signals, found, mode, goes in (
        (GOOD, NAN, "autopilot", True),
        (GOOD, EXTREME, "autopilot", True),
        (GOOD, NAN, "careful", False),
        (asked, NAN, "autopilot", False),  # older weights do no better
        (replace(GOOD, scaled=True), NAN, "autopilot", False),
    ):
        spent = skipped(Budget(max_skips_in_a_row=3), 498, 499)
        spent.see(diagnosed(found))
        plan = decide(signals, diagnosed(found), budget=spent, mode=mode, states=states)
        assert ("rollback" in plan.actions) is goes
        assert ("stop" in plan.actions) is not goes
    spent = skipped(Budget(max_skips_in_a_row=3), 498, 499)
    rolled_back(spent, at=450, to=300)
    skipped(spent, 498, 499)
    assert decide(GOOD, diagnosed(NAN), budget=spent, states=states).actions == ("skip-step", "stop")  # it was tried
    spent = Budget(max_skips=3)
    for step in (494, 496, 498):
        skipped(spent, step)
        spent.count(Outcome(step=step + 1, reading=1.0, stepped=True))
    # with good updates in between it is the data
    assert decide(GOOD, diagnosed(NAN), budget=spent, states=states).actions == ("skip-step", "stop")
    spent = skipped(Budget(max_skips_in_a_row=3), 498, 499)
    never = Limits(rolls_back=False)
    assert decide(GOOD, diagnosed(NAN), budget=spent, states=states, limits=never).actions == ("skip-step", "stop")


SPEAKERS = "non-finite gradient-spike loss-spike not-healing slow-divergence learning-rate-jump poisoned-moments mine"
detectors = st.sampled_from(SPEAKERS.split())
findings = st.builds(
    Finding,
    detector=detectors,
    step=st.just(500),
    severity=st.sampled_from(["info", "warn", "act", "critical"]),
    value=st.floats(0.0, 1e6),
    limit=st.floats(0.01, 100.0),
    baseline=st.floats(0.001, 10.0),
    since=st.none() | st.integers(0, 500),
)
diagnoses = st.builds(
    Diagnosis,
    cause=st.just("unknown"),
    damage=st.sampled_from(Damage),
    findings=st.lists(findings, min_size=1, max_size=4).map(tuple),
)
situations = st.builds(
    Signals,
    step=st.just(500),
    loss=st.floats(),
    losses=st.lists(st.floats(), min_size=1, max_size=3).map(tuple),
    grad_norm=st.floats(min_value=0.0),
    lr=st.floats(1e-6, 1.0),
    repeatable=st.booleans(),
    counterfactual=st.none() | st.just(Counterfactual(step=300, old_loss=1.0, current_loss=2.0)),
)
remembered = st.lists(st.builds(State, st.integers(-1, 499), st.floats(1e-6, 1.0)), max_size=4).map(
    lambda states: sorted(states, key=lambda state: state.step)
)
limits = st.builds(
    Limits,
    rolls_back=st.booleans(),
    trust_steps=st.integers(1, 100),
    lr_mult=st.floats(0.05, 1.0),
    lr_mult_again=st.floats(0.05, 1.0),
    rewarm_steps=st.integers(0, 100),
    skips_batches=st.booleans(),
)


@st.composite
def budgets(draw: st.DrawFn) -> Budget:
    budget = Budget(max_skips_in_a_row=4, max_skips=6, max_rollbacks=2)
    for step, kind in enumerate(draw(st.lists(st.sampled_from(["step", "skip", "rollback"]), max_size=5)), 495):
        if kind == "skip":
            skipped(budget, step)
        elif kind == "rollback":
            rolled_back(budget, at=step, to=draw(st.integers(-1, 400)))
        else:
            budget.count(Outcome(step=step, reading=1.0, stepped=True))
    return budget


@settings(max_examples=250)
@given(situations, diagnoses, remembered, limits, budgets())
def test_observe_never_plans(
    signals: Signals, diagnosis: Diagnosis, states: list[State], limits: Limits, budget: Budget
) -> None:
    assert decide(signals, diagnosis, budget=budget, mode="observe", states=states, limits=limits).proceeds


@settings(max_examples=250)
@given(situations, diagnoses, remembered, limits, budgets())
def test_careful_touches_neither_rate_nor_moments_nor_weights(
    signals: Signals, diagnosis: Diagnosis, states: list[State], limits: Limits, budget: Budget
) -> None:
    plan = decide(signals, diagnosis, budget=budget, mode="careful", states=states, limits=limits)
    assert not NOT_CAREFUL.intersection(plan.actions)
    assert plan.lr is None
    assert plan.to is None


@given(situations, findings, remembered, st.sampled_from(["careful", "autopilot"]))
def test_one_isolated_finding_never_changes_the_rate(
    signals: Signals, found: Finding, states: list[State], mode: str
) -> None:
    """But for a leap of the rate itself, or weights that are damaged already."""
    plan = decide(signals, diagnosed(found), budget=Budget(), mode=mode, states=states)
    if found.detector != "learning-rate-jump":
        assert not LR_STEPS.intersection(plan.actions)
        assert plan.lr is None
        assert "rollback" not in plan.actions


@settings(max_examples=250)
@given(situations, diagnoses, remembered, limits, budgets(), st.none() | st.floats(1e-6, 1.0))
def test_every_plan_makes_sense(
    signals: Signals,
    diagnosis: Diagnosis,
    states: list[State],
    limits: Limits,
    budget: Budget,
    ceiling: float | None,
) -> None:
    budget.see(diagnosis)
    before = budget.state_dict()
    plan = decide(signals, diagnosis, budget=budget, states=states, limits=limits, ceiling=ceiling)
    assert budget.state_dict() == before
    steps = set(plan.actions)
    assert len(steps) == len(plan.actions)
    refused = steps & {"skip-step", "leave-out", "back-off-scale"}
    assert len(refused) <= 1
    assert not (refused and "rescale" in steps)
    assert not (refused and "rollback" in steps)
    if any(f.severity == "critical" for f in diagnosis.findings):
        assert refused or "rollback" in steps
    assert (plan.norm is None) == ("rescale" not in steps)
    if "rescale" in steps:
        assert plan.norm in [f.baseline for f in diagnosis.findings if f.detector == "gradient-spike"]
    assert (plan.to is None) == steps.isdisjoint({"rollback", "restore-moments"})
    assert plan.to is None or plan.to in [state.step for state in states]
    assert (plan.lr is None) == steps.isdisjoint({"cut-lr", "hold-lr"})
    if "stop" in steps:
        assert refused or "rollback" in steps
        assert budget.skips_spent(500) or budget.rollbacks_spent(500)
    if refused and budget.skips_spent(500):
        assert "stop" in steps
    if "rollback" in steps:
        target = next(state for state in reversed(states) if state.step == plan.to)
        assert budget.rollbacks_spent(500) == ("stop" in steps)
        first_sign = 500 if budget.episode.first_sign is None else budget.episode.first_sign
        assert 0 <= target.step <= first_sign - limits.trust_steps
        assert signals.counterfactual is None or target.step <= signals.counterfactual.step
        if plan.lr is not None:
            again = budget.last_target(500) is not None
            used = [signals.lr, target.lr] if again or ceiling is None else [signals.lr]
            lowest = min([*used, ceiling] if again and ceiling is not None else used)
            floor = limits.lr_floor_mult * signals.lr
            assert floor * 0.999 <= plan.lr <= max(lowest, floor) * 1.001


class TestReplayOnly:
    CLOSING = replace(GOOD, counterfactual=Counterfactual(step=300, old_loss=1.0, current_loss=2.0, closing=True))
    STATES = (State(200), State(300))

    def plan(self, budget: Budget) -> Plan:
        found = diagnosed(STUCK, damage=Damage.WEIGHTS)
        budget.see(found)
        return decide(self.CLOSING, found, budget=budget, states=self.STATES, limits=Limits(replays=True))

    def test_all_updates_since_the_state_that_was_tried_or_nothing(self) -> None:
        plan = self.plan(Budget())
        assert (plan.actions, plan.to, plan.until) == (("rollback", "replay"), 300, 490)
        assert (plan.outside, plan.or_nothing, plan.lr, plan.only_whole) == (True, True, None, False)

    def test_not_before_anything_was_seen(self) -> None:
        found = diagnosed(STUCK, damage=Damage.WEIGHTS)
        plan = decide(self.CLOSING, found, budget=Budget(), states=self.STATES, limits=Limits(replays=True))
        assert plan.proceeds

    def test_not_soon_after_a_rollback(self) -> None:
        budget = Budget()
        rolled_back(budget, 400, 300)
        assert self.plan(budget).proceeds


class TestUnderflow:
    ZERO = replace(GOOD, grad_norm=0.0, scaled=True, scale=1.0)
    FOUND = diagnosed(finding("zero-gradient", "info", value=0.0))

    def test_an_update_without_gradients_is_skipped(self) -> None:
        assert decide(self.ZERO, self.FOUND, budget=Budget()).actions == ("skip-step",)
        assert decide(self.ZERO, self.FOUND, budget=Budget(), mode="careful").actions == ("skip-step",)

    def test_only_under_a_scaler_and_without_any_gradient(self) -> None:
        for signals in (replace(self.ZERO, scaled=False), replace(self.ZERO, grad_norm=1e-9)):
            assert decide(signals, self.FOUND, budget=Budget()).proceeds
        assert decide(self.ZERO, diagnosed(finding("no-learning", "info")), budget=Budget()).proceeds

    def test_it_never_ends_a_run(self) -> None:
        budget = skipped(Budget(), *range(481, 500))
        assert decide(self.ZERO, self.FOUND, budget=budget).proceeds
