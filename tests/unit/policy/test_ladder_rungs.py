"""The rarer rungs of the ladder: weights that are not finite, a loss that multiplied at once, damaged state."""

import math
from dataclasses import replace
from typing import Any

import pytest

from steadystep.policy import Budget, Limits, decide, has_broken_weights, restorable
from steadystep.policy.budget import better_policy, coefficient_for
from steadystep.records import Counterfactual, Damage, Diagnosis, Finding, Outcome, Plan, Signals
from tests.unit.policy.test_ladder import (
    GOOD,
    GROUP,
    HEARD,
    NAN,
    OVERFLOW,
    POISON,
    SPIKE,
    STUCK,
    State,
    diagnosed,
    finding,
    rolled_back,
    skipped,
)

BROKEN = finding("weight-jump", value=math.nan, since=487)
EARLY = finding("early-divergence", since=5)
YOUNG = replace(GOOD, step=10)


def planned(
    *found: Finding,
    signals: Signals = GOOD,
    damage: Damage = Damage.WEIGHTS,
    budget: Budget | None = None,
    states: tuple[State, ...] = (),
    seen: bool = True,
    **more: Any,
) -> Plan:
    diagnosis = Diagnosis(cause="a-cause", damage=damage, findings=found)
    budget = budget or Budget()
    if seen:
        budget.see(diagnosis)
    plan = decide(signals, diagnosis, budget=budget, states=states, **more)
    assert plan.reason == ("a-cause" if plan.actions else "")
    return replace(plan, reason="")


def foretold(budget: Budget | None = None) -> Budget:
    """A warning shortly before, so that what follows is not sudden."""
    budget = budget or Budget()
    budget.see(diagnosed(finding("loss-spike", "warn", value=5.0)))
    return budget


def gone_back(*pairs: tuple[int, int], most: int = 3) -> Budget:
    budget = Budget(max_rollbacks=most)
    for at, to in pairs:
        rolled_back(budget, at=at, to=to)
    return budget


@pytest.mark.parametrize(
    ("detector", "severity", "value", "broken"),
    [
        ("weight-jump", "act", math.nan, True),
        ("weight-jump", "act", math.inf, True),
        ("weight-jump", "act", 1e38, True),
        ("weight-jump", "act", 1e6, False),
        ("weight-jump", "warn", math.nan, False),
        ("loss-spike", "act", math.nan, False),
    ],
)
def test_which_weights_are_broken(detector: str, severity: Any, value: float, broken: bool) -> None:
    one = finding(detector, severity, value=value)
    assert has_broken_weights([one]) is broken
    assert has_broken_weights([STUCK, one]) is broken
    assert not has_broken_weights([])


class TestBrokenWeights:
    @pytest.mark.parametrize(
        ("states", "step", "to"),
        [
            ((300, 499), 500, 300),  # trusted goes before new
            ((499,), 500, 499),  # any finite one is better than that
            ((495, 499), 500, 499),
            ((-1, 25), 30, 25),  # and one that has learned better than one that has not
            ((-1, 0), 30, 0),
            ((-1,), 30, -1),
            ((-1, 3), 500, 3),
        ],
    )
    def test_to_which_state(self, states: tuple[int, ...], step: int, to: int) -> None:
        signals = replace(GOOD, step=step)
        found = replace(BROKEN, step=step, since=step - 1)
        plan = planned(found, signals=signals, states=tuple(map(State, states)))
        assert plan == Plan(actions=("rollback", "skip-batches"), to=to)

    def test_states_that_were_found_finite_move_the_beginning(self) -> None:
        """The first sign is at 300, but the state of 480 is finite: it came after that."""
        found = replace(BROKEN, since=300)
        plan = planned(found, states=(State(300), State(480)), limits=Limits(replays=True))
        assert (plan.to, plan.until, plan.outside) == (300, 481, True)
        before = planned(found, states=(State(200), State(299)), limits=Limits(replays=True))
        assert (before.to, before.until) == (200, 300)

    def test_out_of_nowhere_the_last_target_is_not_to_blame(self) -> None:
        states = (State(300), State(390))
        assert planned(BROKEN, budget=gone_back((450, 390)), states=states).to == 390
        assert planned(BROKEN, budget=foretold(gone_back((450, 390))), states=states).to == 300

    def test_weights_that_are_finite_leave_the_last_target_behind(self) -> None:
        """However suddenly it came: only a weight that is not finite clears the state that was restored last."""
        assert planned(NAN, budget=gone_back((450, 390)), states=(State(300), State(390))).to == 300

    def test_a_counterfactual_is_not_passed_over(self) -> None:
        assert planned(BROKEN, signals=HEARD, states=(State(300), State(390))).to == 300

    @pytest.mark.parametrize(
        ("budget", "lr", "limits", "plan"),
        [
            (Budget(), 0.1, Limits(), Plan(actions=("rollback",))),
            (foretold(), 0.1, Limits(), Plan(actions=("rollback", "cut-lr", "rewarm"), lr=0.7 * 0.1)),
            (foretold(), 0.1, Limits(rewarm_steps=0), Plan(actions=("rollback", "cut-lr"), lr=0.7 * 0.1)),
            (foretold(), 0.0, Limits(), Plan(actions=("rollback",))),
            (foretold(), 0.1, Limits(lr_mult=1.0), Plan(actions=("rollback",))),
            (foretold(gone_back((450, 390))), 0.1, Limits(), Plan(actions=("rollback", "cut-lr", "rewarm"), lr=0.05)),
            (foretold(gone_back((450, 390))), 0.1, Limits(lr_mult_again=1.0), Plan(actions=("rollback",))),
            (gone_back((450, 390)), 0.1, Limits(), Plan(actions=("rollback",))),
        ],
    )
    def test_without_a_state_a_checkpoint_is_the_place(
        self, budget: Budget, lr: float, limits: Limits, plan: Plan
    ) -> None:
        assert planned(BROKEN, signals=replace(GOOD, lr=lr), budget=budget, limits=limits) == plan

    def test_with_the_budget_spent_it_ends_with_good_weights(self) -> None:
        spent = gone_back((450, 390), most=1)
        stop = ("rollback", "stop")
        assert planned(BROKEN, budget=spent) == Plan(actions=stop)
        assert planned(BROKEN, budget=spent, states=(State(300), State(499))) == Plan(actions=stop, to=300)

    def test_where_no_weights_may_be_touched_it_ends(self) -> None:
        end = Plan(actions=("rollback", "stop"))
        assert planned(BROKEN, states=(State(300),), mode="careful") == end
        assert planned(BROKEN, states=(State(300),), limits=Limits(rolls_back=False)) == end
        assert planned(BROKEN, damage=Damage.NONE) == end
        assert planned(BROKEN, states=(State(300),), mode="observe").proceeds


BEGIN = Plan(actions=("rollback", "cut-lr", "skip-batches", "rewarm"), to=-1, lr=0.1 * 0.1, hold=1600)


class TestBeginAgain:
    @pytest.mark.parametrize(
        ("limits", "expected"),
        [
            (Limits(), BEGIN),
            (Limits(replays=True), BEGIN),
            (Limits(skips_batches=False), replace(BEGIN, actions=("rollback", "cut-lr", "rewarm"))),
            (Limits(rewarm_steps=0), replace(BEGIN, actions=("rollback", "cut-lr", "skip-batches"))),
            (Limits(early_hold=7), replace(BEGIN, hold=7)),
            (Limits(lr_floor_mult=0.5), replace(BEGIN, lr=0.5 * 0.1)),
            (Limits(lr_mult=1.0), Plan()),
        ],
    )
    def test_from_the_start_with_a_tenth(self, limits: Limits, expected: Plan) -> None:
        plan = planned(EARLY, signals=YOUNG, states=(State(-1),), limits=limits)
        assert replace(plan, lr=None) == replace(expected, lr=None)
        assert plan.lr == (None if expected.lr is None else pytest.approx(expected.lr))

    def test_the_second_time_with_a_hundredth(self) -> None:
        plan = planned(EARLY, signals=YOUNG, states=(State(-1),), budget=gone_back((4, -1)))
        assert plan.to == -1
        assert plan.lr == pytest.approx(0.001)

    def test_the_last_rollback_of_a_window_is_kept(self) -> None:
        budget = gone_back((3, -1), (4, -1))
        assert planned(EARLY, signals=YOUNG, states=(State(-1),), budget=budget).proceeds

    @pytest.mark.parametrize("found", [(EARLY,), (EARLY, NAN)])
    @pytest.mark.parametrize(
        ("lr", "states"), [(0.0, (State(-1),)), (math.nan, (State(-1),)), (0.1, ()), (0.1, (State(9),))]
    )
    def test_where_it_cannot_be_helped_only_a_bad_update_is_refused(
        self, found: tuple[Finding, ...], lr: float, states: tuple[State, ...]
    ) -> None:
        plan = planned(*found, signals=replace(YOUNG, lr=lr), states=states)
        assert plan == (Plan(actions=("skip-step",)) if NAN in found else Plan())

    @pytest.mark.parametrize(("tried", "to"), [(None, 0), (0, 0), (3, 0), (-1, -1)])
    def test_what_was_tried_is_what_is_restored(self, tried: int | None, to: int) -> None:
        asked = None if tried is None else Counterfactual(step=tried, old_loss=1.0, current_loss=9.0)
        signals = replace(YOUNG, counterfactual=asked)
        assert planned(EARLY, signals=signals, states=(State(-1), State(0)), limits=Limits(trust_steps=5)).to == to

    def test_trusted_before_the_first_sign_or_before_now(self) -> None:
        states, limits = (State(-1), State(0)), Limits(trust_steps=10)
        assert planned(EARLY, signals=YOUNG, states=states, limits=limits).to == -1
        assert planned(EARLY, signals=YOUNG, states=states, limits=limits, seen=False).to == 0

    def test_not_where_weights_jumped_or_nothing_was_asked_for(self) -> None:
        """Then it is a rollback as usual: no deep cut with a long hold."""
        for found in ((EARLY, finding("weight-jump")), (replace(EARLY, severity="warn"), STUCK)):
            plan = planned(*found, signals=YOUNG, states=(State(-1),))
            assert "rollback" in plan.actions
            assert plan.hold is None
        warned = (EARLY, finding("weight-jump", "warn"))
        assert planned(*warned, signals=YOUNG, states=(State(-1),)).hold == 1600


class TestDamagedState:
    @pytest.mark.parametrize(
        ("where", "expected"),
        [
            (("0.exp_avg",), Plan(actions=("restore-moments",), to=480)),
            (("kept.ema",), Plan(actions=("restore-kept",), kept=("kept.ema",))),
            (("kept.ema", "0.exp_avg"), Plan(actions=("restore-moments", "restore-kept"), to=480, kept=("kept.ema",))),
            (("exp_kept.x",), Plan(actions=("restore-moments",), to=480)),
        ],
    )
    def test_what_is_restored(self, where: tuple[str, ...], expected: Plan) -> None:
        found, states = finding("damaged-state", where=where), (State(300), State(480))
        assert planned(found, damage=Damage.MOMENTS, states=states) == expected
        with_nan = planned(found, NAN, damage=Damage.MOMENTS, states=states)
        assert set(with_nan.actions) == {*expected.actions, "skip-step"}
        assert planned(found, damage=Damage.MOMENTS).proceeds  # there is no state
        assert planned(found, damage=Damage.MOMENTS, states=states, mode="careful").proceeds
        assert planned(found, damage=Damage.NONE, states=states).proceeds
        noted = replace(found, severity="warn")
        assert planned(noted, damage=Damage.MOMENTS, states=states).proceeds

    def test_poison_by_numbers(self) -> None:
        poison = replace(POISON, since=100, baseline=1.0)
        for moment, to in ((10.0, 450), (10.5, None), (None, None)):
            assert planned(poison, damage=Damage.MOMENTS, states=(State(450, 0.1, moment),)).to == to
        assert planned(poison, damage=Damage.MOMENTS, states=(State(450, 0.1, 1.0), State(460, 0.1, 2.0))).to == 460
        unknown = replace(poison, baseline=None)
        assert planned(unknown, damage=Damage.MOMENTS, states=(State(450, 0.1, 1.0),)).proceeds

    def test_an_untrained_state_holds_no_moments(self) -> None:
        poison = replace(POISON, since=-5, baseline=1.0)
        assert planned(poison, damage=Damage.MOMENTS, states=(State(-1, 0.1, 0.0),)).proceeds
        assert planned(poison, damage=Damage.MOMENTS, states=(State(0, 0.1, 0.0),)).to == 0


class TestRefusals:
    @pytest.mark.parametrize("detector", ["buffer-jump", "input-scale"])
    def test_nobody_knows_which_micro_batch_it_was(self, detector: str) -> None:
        assert planned(finding(detector), signals=GROUP, damage=Damage.NONE) == Plan(actions=("skip-step",))
        assert planned(finding(detector, "warn"), signals=GROUP, damage=Damage.NONE).proceeds

    def test_one_micro_batch_is_not_left_out_of_itself(self) -> None:
        alone = replace(GROUP, losses=(2.0,))
        assert planned(NAN, signals=alone, damage=Damage.NONE).actions == ("skip-step",)

    def test_after_one_refusal_the_weights_are_not_suspected(self) -> None:
        states = (State(300),)
        one = skipped(Budget(max_skips_in_a_row=2), 499)
        assert planned(NAN, budget=one, damage=Damage.NONE, states=states).actions == ("skip-step", "stop")
        overflows = Budget(max_skips_in_a_row=3)
        skipped(overflows, 497)
        for step in (498, 499):
            backed_off = Plan(actions=("back-off-scale",))
            overflows.count(Outcome(step=step, reading=1.0, stepped=False, plan=backed_off))
        assert planned(NAN, budget=overflows, damage=Damage.NONE, states=states).actions == ("skip-step", "stop")

    def test_routine_overflows_end_too(self) -> None:
        spent = skipped(Budget(max_skips_in_a_row=3), 498, 499)
        signals = replace(GOOD, grad_norm=math.inf, scaled=True)
        plan = planned(OVERFLOW, signals=signals, budget=spent, damage=Damage.NONE)
        assert plan.actions == ("back-off-scale", "stop")


class TestCuts:
    def test_with_no_learning_rate_there_is_nothing_to_cut_from(self) -> None:
        plan = planned(STUCK, signals=replace(GOOD, lr=0.0), states=(State(300, 0.0),))
        assert plan.lr == 0.0
        assert planned(STUCK, signals=replace(GOOD, lr=0.0), states=(State(300, 0.2),)).lr == pytest.approx(0.14)

    def test_the_second_cut_has_a_setting_of_its_own(self) -> None:
        budget = gone_back((450, 390))
        plan = planned(STUCK, signals=HEARD, budget=budget, states=(State(300),), limits=Limits(lr_mult_again=1.0))
        assert (plan.lr, plan.actions) == (None, ("rollback", "skip-batches"))

    def test_the_floor_is_a_share_of_what_is_asked_for(self) -> None:
        assert planned(STUCK, states=(State(300, 1e-9),), limits=Limits(lr_floor_mult=0.2)).lr == pytest.approx(0.02)

    def test_what_lasts_is_cut_however_it_began(self) -> None:
        for detector, cut in (("not-healing", True), ("slow-divergence", True), ("mine", False)):
            lasting = finding(detector, value=math.nan, since=487)  # foretells nothing, so that it is sudden
            plan = planned(NAN, lasting, states=(State(300),))
            assert ("cut-lr" in plan.actions) is cut

    def test_a_spike_and_a_jump_are_dealt_with_together(self) -> None:
        jump = finding("learning-rate-jump", baseline=0.02)
        plan = planned(SPIKE, jump, damage=Damage.NONE, limits=Limits(unmeant_hold=9), ceiling=0.01)
        assert plan == Plan(actions=("rescale", "hold-lr"), norm=3.0, lr=0.02, hold=9)


def test_odd_weights_without_a_healthy_rank_are_rolled_back() -> None:
    odd = finding("odd-replica", value=1.0)
    states = (State(300),)
    assert "rollback" in planned(odd, states=states).actions
    healthy = replace(GOOD, healthy_rank=0)
    assert planned(odd, signals=healthy, states=states) == Plan(actions=("copy-replica", "skip-step"), rank=0)
    assert planned(replace(odd, severity="warn"), signals=healthy, states=states).rank is None
    no_rollbacks = Limits(rolls_back=False)
    assert planned(odd, signals=healthy, states=states, limits=no_rollbacks).rank == 0


class TestTrusted:
    @pytest.mark.parametrize(
        ("states", "before", "step", "last", "retreats", "good"),
        [
            ((300, 480), 500, 500, None, True, [300, 480]),
            ((300, 481), 500, 500, None, True, [300]),
            ((-1, 0), 20, 63, None, True, [-1, 0]),
            ((-1, 0), 20, 64, None, True, [0]),
            ((-1, 0), 19, 63, None, True, [-1]),
            ((300, 390, 400), 500, 500, 390, True, [300]),
            ((300, 390, 400), 500, 500, 390, False, [300, 390, 400]),
            ((390, 400), 500, 500, 390, True, [390]),
            ((), 500, 500, 390, True, []),
        ],
    )
    def test_old_enough_and_older_than_what_did_not_help(
        self, states: tuple[int, ...], before: int, step: int, last: int | None, retreats: bool, good: list[int]
    ) -> None:
        budget = Budget() if last is None else gone_back((step - 1, last))
        found = restorable(
            [State(at) for at in states], before=before, step=step, budget=budget, limits=Limits(), retreats=retreats
        )
        assert [state.step for state in found] == good
        if retreats:
            usual = restorable([State(at) for at in states], before=before, step=step, budget=budget, limits=Limits())
            assert usual == found

    def test_how_long_is_a_setting(self) -> None:
        states = [State(300), State(380)]
        for trust, good in ((20, [300, 380]), (120, [300, 380]), (121, [300]), (201, [])):
            found = restorable(states, before=500, step=500, budget=Budget(), limits=Limits(trust_steps=trust))
            assert [state.step for state in found] == good


ENTROPY, KL = finding("entropy-collapse", "warn"), finding("kl-blow-up", "warn")


class TestCoefficients:
    @pytest.mark.parametrize(
        ("found", "allowed", "raised"),
        [
            ((ENTROPY,), ("kl_coef", "entropy_coef"), "entropy_coef"),
            ((ENTROPY,), ("kl_coef",), "kl_coef"),
            ((ENTROPY,), (), ""),
            ((KL,), ("entropy_coef",), ""),
            ((replace(KL, severity="info"), ENTROPY), ("kl_coef", "entropy_coef"), "entropy_coef"),
            ((replace(ENTROPY, severity="info"),), ("entropy_coef",), ""),
            ((finding("reward-collapse", "act"),), ("entropy_coef", "kl_coef"), "kl_coef"),
            ((SPIKE,), ("entropy_coef", "kl_coef"), ""),
        ],
    )
    def test_the_first_that_counters_a_warning(
        self, found: tuple[Finding, ...], allowed: tuple[str, ...], raised: str
    ) -> None:
        assert coefficient_for(Diagnosis(findings=found), allowed) == raised

    def test_one_is_raised_where_the_run_stands(self) -> None:
        limits = Limits(coefficients=("kl_coef",))
        plan = planned(KL, damage=Damage.NONE, limits=limits)
        assert (plan.actions, plan.raises) == (("raise-coefficient",), "kl_coef")
        assert planned(KL, damage=Damage.NONE, limits=limits, mode="careful") == Plan()
        assert planned(KL, damage=Damage.NONE, limits=Limits()) == Plan()
        mended = planned(SPIKE, KL, damage=Damage.NONE, limits=limits)
        assert (mended.actions, mended.raises) == (("rescale", "raise-coefficient"), "kl_coef")
        assert not planned(SPIKE, damage=Damage.NONE, limits=limits).raises


class TestBetterPolicy:
    EARNED = replace(GOOD, lr=0.1, counterfactual=Counterfactual(step=40, old_loss=1.0, current_loss=2.0))

    def planned(self, *pairs: tuple[int, int], lr: float = 0.1, **more: Any) -> Plan:
        signals = replace(self.EARNED, lr=lr)
        diagnosis = Diagnosis(cause="reward-collapse", findings=(finding("reward-collapse", "act"),))
        return better_policy(signals, diagnosis, gone_back(*pairs), Limits(**more))

    def test_back_with_smaller_steps(self) -> None:
        plan = self.planned()
        assert plan.actions == ("rollback", "cut-lr", "skip-batches")
        assert (plan.to, plan.reason, plan.hold, plan.raises) == (40, "reward-collapse", 50, "")
        assert plan.lr == pytest.approx(0.03)

    def test_smaller_still_when_it_happens_again(self) -> None:
        step = self.EARNED.step
        again = self.planned((step - 5, 3))
        assert (again.lr, again.hold) == (pytest.approx(0.009), 1600)
        assert self.planned((step - 5, 3), lr_floor_mult=0.2).lr == pytest.approx(0.02)

    def test_a_cause_is_waited_out(self) -> None:
        """A smaller rate is no remedy for a sampler or a grader: the policy stays nearly as it is."""
        diagnosis = Diagnosis(
            cause="policy-collapse", findings=(replace(finding("reward-collapse", "act"), where=("policy-mismatch",)),)
        )
        for pairs in ((), ((self.EARNED.step - 5, 3),)):
            plan = better_policy(self.EARNED, diagnosis, gone_back(*pairs), Limits())
            assert (plan.lr, plan.hold) == (pytest.approx(0.001), 200)

    def test_the_run_ends_with_the_last_rollback(self) -> None:
        step = self.EARNED.step
        last = self.planned((step - 5, 3), (step - 4, 3))
        assert (last.actions, last.to, last.reason) == (("rollback", "stop"), 40, "reward-collapse")

    def test_without_rollbacks_a_coefficient_may_be_raised(self) -> None:
        raised = self.planned(rolls_back=False, coefficients=("kl_coef",))
        assert (raised.actions, raised.raises) == (("raise-coefficient",), "kl_coef")
        assert raised.reason == "reward-collapse"
        assert self.planned(rolls_back=False) == Plan()

    @pytest.mark.parametrize("off", [{"lr": 0.0}, {"lr_mult": 1.0}])
    def test_a_rate_that_cannot_be_cut_is_left(self, off: dict[str, float]) -> None:
        plan = self.planned(**off, coefficients=("kl_coef",), skips_batches=False)
        assert plan.actions == ("rollback", "raise-coefficient")
        assert (plan.lr, plan.hold, plan.raises) == (None, None, "kl_coef")

    def test_rollouts_decide(self) -> None:
        tried = Counterfactual(step=40, old_loss=1.0, current_loss=2.0, rollouts=True)
        earned = replace(GOOD, lr=0.1, counterfactual=tried)
        found = finding("reward-collapse", "act")
        assert planned(found, signals=earned, damage=Damage.NONE).to == 40
        batches = replace(earned, counterfactual=replace(tried, rollouts=False))
        assert planned(found, signals=batches, damage=Damage.NONE).to is None
