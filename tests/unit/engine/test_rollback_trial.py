"""Does going back pay? What several batches under two sets of weights come to, and what the judge makes of it."""

import gc
import json
import math
import random
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steadystep.diagnosis import RollbackTrial, RollbackTrialResult
from steadystep.engine.judge import Judge
from steadystep.engine.verdict import Ask, Turns, Verdict, settle
from steadystep.policy import Budget, Limits
from steadystep.records import Finding, Severity, Signals

DETECTORS = st.sampled_from(["not-healing", "slow-divergence", "worse-than-best", "weight-jump"])
LOSSES = st.floats(0.01, 100.0)
STATE = 300


def suspicion(detector: str = "not-healing", severity: Severity = "act", **more: Any) -> Finding:
    """A loss that is usually 1 and has risen; 0.1 would be material."""
    plain = {"detector": detector, "step": 500, "severity": severity, "value": 1.5, "limit": 1.1, "baseline": 1.0}
    return Finding(**plain | {"since": 490} | more)


def opened(found: Finding | None = None) -> RollbackTrial:
    evidence = RollbackTrial()
    evidence.begin(found or suspicion(), state=STATE, lr=0.1)
    return evidence


def verdict(evidence: RollbackTrial, pairs: list[tuple[float, float]]) -> tuple[RollbackTrialResult, int]:
    """What it comes to with so many batches; the last pair is repeated."""
    for count in range(1, 100):
        old_loss, current_loss = pairs[min(count, len(pairs)) - 1]
        told = evidence.add(old_loss=old_loss, current_loss=current_loss)
        if told != "gathering":
            return told, count
    raise AssertionError("no end")


class TestVerdict:
    def test_older_weights_that_do_better_on_all_of_eight(self) -> None:
        for detector in ("not-healing", "slow-divergence", "weight-jump"):
            assert verdict(opened(suspicion(detector)), [(1.0, 3.0)]) == ("confirmed", 8)

    def test_older_weights_that_do_no_better(self) -> None:
        for detector in ("not-healing", "slow-divergence", "weight-jump"):
            for old_loss in (3.0, 2.99, 5.0):
                told, count = verdict(opened(suspicion(detector)), [(old_loss, 3.0)])
                assert (told, count >= 8) == ("cleared", True)

    def test_batches_that_are_bad_under_any_weights_tell_nothing_about_these(self) -> None:
        """Five with wrong labels, then good ones that older weights do a little better on."""
        pairs = [*[(3.0, 2.9)] * 5, (1.0, 1.1)]
        trial = RollbackTrial()
        trial.begin(suspicion("slow-divergence"), state=STATE, lr=0.1, replays=True)
        assert verdict(trial, pairs) == ("confirmed", 5 + 8)
        assert verdict(opened(suspicion("slow-divergence")), pairs)[0] == "cleared"  # what follows would be lost

    def test_two_bad_batches_are_in_every_run(self) -> None:
        trial = RollbackTrial()
        trial.begin(suspicion("slow-divergence"), state=STATE, lr=0.1, replays=True)
        assert verdict(trial, [*[(3.0, 2.9)] * 2, (1.0, 1.1)])[0] == "cleared"  # 0.1 is less than twice its margin

    def test_bad_batches_without_end_are_the_data(self) -> None:
        trial = RollbackTrial()
        trial.begin(suspicion("not-healing"), state=STATE, lr=0.1, replays=True)
        assert verdict(trial, [(3.0, 3.2)]) == ("cleared", 24)

    def test_a_high_loss_that_older_weights_undo_is_not_put_aside(self) -> None:
        trial = RollbackTrial()
        trial.begin(suspicion("slow-divergence"), state=STATE, lr=0.1, replays=True)
        assert verdict(trial, [(1.2, 3.0)]) == ("confirmed", 8)

    def test_half_of_a_jump_must_be_undone(self) -> None:
        """It rose from 1 to 3: under the old state it is at 2.5, so harder data is most of it."""
        assert verdict(opened(), [(2.5, 3.0)])[0] == "cleared"
        assert verdict(opened(), [(1.5, 3.0)])[0] == "confirmed"

    def test_a_creeping_loss_is_confirmed_by_more_than_what_is_material(self) -> None:
        creeping = suspicion("slow-divergence", value=1.5)
        assert verdict(opened(creeping), [(1.35, 1.5)])[0] == "cleared"
        assert verdict(opened(creeping), [(1.1, 1.5)])[0] == "confirmed"

    def test_for_weights_that_jumped_any_real_difference_is_enough(self) -> None:
        jumped = suspicion("weight-jump", baseline=40.0, limit=60.0, value=90.0)  # norms, and not losses
        assert verdict(opened(jumped), [(1.0, 1.1)])[0] == "confirmed"
        assert verdict(opened(jumped), [(1.0, 1.01)])[0] != "confirmed"

    def test_a_gap_that_closes_is_healing(self) -> None:
        closing = [(1.0, 1.0 + 2.0 * 0.8**i) for i in range(24)]
        assert verdict(opened(), closing)[0] == "healing"

    def test_but_not_the_one_of_weights_that_jumped(self) -> None:
        closing = [(1.0, 1.0 + 2.0 * 0.8**i) for i in range(24)]
        assert verdict(opened(suspicion("weight-jump")), closing)[0] == "confirmed"

    def test_noise_is_looked_at_for_longer_and_for_24_batches_at_most(self) -> None:
        rng = random.Random(0)
        pairs = [(3.0, 3.0 + rng.gauss(1.0, 3.0)) for _ in range(24)]
        told, count = verdict(opened(), pairs)
        assert told == "cleared"
        assert 8 < count <= 24

    def test_four_batches_that_are_finite_under_the_old_state_only(self) -> None:
        for current_loss in (math.nan, math.inf):
            assert verdict(opened(), [(1.0, current_loss)]) == ("confirmed", 4)

    def test_a_single_overflow_is_not_gathered_for_ever(self) -> None:
        """Each batch costs two passes."""
        told, count = verdict(opened(), [(1.0, math.inf), (1.0, 1.0)])
        assert (told, count <= 24) == ("cleared", True)

    def test_a_batch_that_is_not_finite_under_the_old_state_either_is_the_datas_fault(self) -> None:
        for old_loss in (math.nan, math.inf):
            assert verdict(opened(), [(1.0, 3.0), (old_loss, math.nan)]) == ("cleared", 2)
        told = opened()
        for _ in range(20):  # nor does it become the weights' by adding up
            assert told.add(old_loss=math.nan, current_loss=math.nan) == "cleared"

    @given(DETECTORS, st.lists(st.tuples(LOSSES, LOSSES), min_size=1, max_size=24))
    def test_never_on_fewer_than_eight_and_never_for_ever(
        self, detector: str, pairs: list[tuple[float, float]]
    ) -> None:
        _, count = verdict(opened(suspicion(detector)), pairs)
        assert 8 <= count <= 24

    @given(
        DETECTORS,
        st.lists(st.tuples(LOSSES, st.floats(0.0, 50.0)), min_size=24, max_size=24),
        st.lists(st.integers(0, 23), max_size=11),
    )
    def test_never_when_the_old_weights_do_no_better_on_most_batches(
        self, detector: str, drawn: list[tuple[float, float]], lucky: list[int]
    ) -> None:
        """However much better they do on the others."""
        pairs = [
            (old_loss, old_loss + by if i in lucky else max(old_loss - by, 0.0))
            for i, (old_loss, by) in enumerate(drawn)
        ]
        told, count = verdict(opened(suspicion(detector)), pairs)
        if sum(current_loss <= old_loss for old_loss, current_loss in pairs[:count]) > count // 2:
            assert told != "confirmed"

    @given(DETECTORS, st.lists(st.tuples(LOSSES, LOSSES), min_size=24, max_size=24))
    def test_what_is_confirmed_is_worse_by_more_than_chance(
        self, detector: str, pairs: list[tuple[float, float]]
    ) -> None:
        evidence = opened(suspicion(detector))
        told, count = verdict(evidence, pairs)
        counterfactual = evidence.counterfactual
        assert counterfactual.batches == count
        assert counterfactual.current_loss == pytest.approx(
            sum(current_loss for _, current_loss in pairs[:count]) / count
        )
        assert (counterfactual.step, counterfactual.lr) == (STATE, 0.1)
        if told == "confirmed":
            assert counterfactual.current_loss > 1.02 * counterfactual.old_loss

    @given(st.integers(0, 2**32), st.floats(0.05, 2.0))
    def test_weights_that_are_as_good_are_rarely_blamed(self, seed: int, noise: float) -> None:
        rng = random.Random(seed)
        blamed = 0
        for _ in range(50):
            pairs = [(3.0 + rng.gauss(0.0, noise), 3.0 + rng.gauss(0.0, noise)) for _ in range(24)]
            blamed += verdict(opened(suspicion("slow-divergence")), pairs)[0] == "confirmed"
        assert blamed <= 1

    @given(st.integers(0, 2**32), st.floats(0.75, 0.88))
    def test_a_jump_that_heals_by_itself_is_never_confirmed(self, seed: int, left: float) -> None:
        rng = random.Random(seed)
        pairs = [(1.0, 1.0 + 2.0 * left**i * rng.uniform(0.97, 1.03)) for i in range(24)]
        assert verdict(opened(), pairs)[0] != "confirmed"


class TestSuspicion:
    def test_the_newest_numbers_of_the_same_one_count_and_the_gravest_severity(self) -> None:
        evidence = opened(suspicion("slow-divergence", "warn"))
        evidence.heard(suspicion("slow-divergence", "act", value=4.0))
        evidence.heard(suspicion("slow-divergence", "warn", value=5.0))
        evidence.heard(suspicion("not-healing", "act", value=9.0))
        assert evidence.finding is not None
        assert (evidence.finding.value, evidence.finding.severity) == (5.0, "act")

    def test_closed_it_is_dated_and_there_is_a_pause(self) -> None:
        evidence = opened()
        assert evidence.close(520).step == 520
        assert evidence.finding is None
        evidence.begin(suspicion(step=530), state=STATE, lr=0.1)
        assert evidence.finding is None
        evidence.begin(suspicion(step=600), state=STATE, lr=0.1)
        assert evidence.finding is not None

    def test_opened_again_it_knows_nothing_of_the_last_one(self) -> None:
        evidence = opened()
        for _ in range(7):
            assert evidence.add(old_loss=1.0, current_loss=3.0) == "gathering"
        evidence.close(520)
        evidence.begin(suspicion(step=600), state=STATE, lr=0.1)
        assert verdict(evidence, [(3.0, 3.0)])[0] == "cleared"

    def test_warnings_are_rationed_and_nothing_else_is(self) -> None:
        evidence = RollbackTrial()
        told = [evidence.once(suspicion(severity="warn", step=step)).severity for step in (100, 101, 300, 900)]
        assert told == ["warn", "info", "info", "warn"]
        for severity in ("info", "act", "critical"):
            assert evidence.once(suspicion(severity=severity, step=901)).severity == severity

    @given(st.integers(0, 7), st.integers(0, 1000))
    def test_saved_and_loaded_it_goes_on_without_the_suspicion(self, pairs: int, later: int) -> None:
        """The states in memory do not survive a resume, so nothing could be compared."""
        evidence = opened()
        evidence.once(suspicion(severity="warn", step=400))
        for _ in range(pairs):
            evidence.add(old_loss=1.0, current_loss=3.0)
        saved = json.loads(json.dumps(evidence.state_dict(), allow_nan=False))
        twin = opened(suspicion(step=7))
        twin.load_state_dict(saved)
        assert twin.finding is None
        assert twin.state_dict() == saved
        evidence.close(500)
        twin.load_state_dict(evidence.state_dict())
        for each in (evidence, twin):
            each.begin(suspicion(step=500 + later), state=STATE, lr=0.1)
        assert (twin.finding is None) == (evidence.finding is None)
        assert twin.once(suspicion(severity="warn", step=later)) == evidence.once(
            suspicion(severity="warn", step=later)
        )


class Speaks:
    """Claims, at the steps it is told to, what it is told to."""

    def __init__(self, *found: Finding) -> None:
        self.name = found[0].detector
        self.found = found

    def update(self, signals: Signals) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.found if finding.step == signals.step)


def state(step: int) -> SimpleNamespace:
    return SimpleNamespace(step=step, updates=step + 1, lr=0.1, largest_lr=0.1)


class Memory:
    """Two states, and batches that do as asked under them."""

    def __init__(
        self, old_loss: float, current_loss: float, *, repeats: bool | None = True, runs_again: bool = True
    ) -> None:
        self.states = [state(step) for step in (200, STATE)]
        self.pair = (old_loss, current_loss) if runs_again else None
        self.repeats = repeats
        self.remembered: list[tuple[float, float]] = []
        self.compared: list[int] = []
        self.tried: list[list[int]] = []

    def answer(self, ask: Ask, signals: Signals) -> Any:
        """What the weights would tell; batches that are tried after refused updates cannot be run again."""
        if ask.what == "weight-norms":
            return signals
        if ask.what in ("states", "finite-states"):
            return self.states, 1.0
        if ask.what == "losses" and ask.backward:
            self.tried.append([each.step for each in ask.states])
            return None
        if ask.what == "losses":
            (compared,) = ask.states
            self.compared.append(compared.step)
            return None if self.pair is None else [self.pair[1], self.pair[0]]
        if ask.what == "remembered-losses":
            return self.remembered[-ask.count :]
        assert ask.what == "repeats"
        return self.repeats


@dataclass
class Case:
    """A judge, and who answers it."""

    judge: Judge
    memory: Memory

    def verdict(self, signals: Signals) -> Verdict:
        said = self.judge.judge(signals, updates=signals.step)
        return settle(said, lambda ask: self.memory.answer(ask, signals))


def judge_of(memory: Memory, *found: Finding) -> Case:
    steady = tuple(Speaks(finding) for finding in found)
    judge = Judge(detectors=(), steady=steady, budget=Budget(), limits=Limits(), mode="autopilot")
    return Case(judge, memory)


def run(case: Case, *, start: int = 500, steps: int = 30) -> list[Verdict]:
    return [case.verdict(Signals(step=start + i, loss=3.0, grad_norm=1.0, lr=0.1)) for i in range(steps)]


def told(judged: list[Verdict]) -> list[str]:
    """The severities that were heard, notes left out."""
    return [f.severity for each in judged for f in each.diagnosis.findings if f.severity != "info"]


class TestJudge:
    def test_a_loss_that_stays_high_is_acted_on_when_the_state_to_restore_does_better(self) -> None:
        memory = Memory(1.0, 3.0)
        judged = run(judge_of(memory, suspicion()))
        plans = [each.plan for each in judged if each.plan.actions]
        assert [plan.to for plan in plans] == [STATE]
        assert set(memory.compared) == {STATE}
        assert len(memory.compared) == 8
        acted = next(each.diagnosis for each in judged if each.plan.actions)
        assert (acted.damage, acted.findings[0].step) == ("weights", 507)
        assert "the mean loss of the last 8 batches is 3 now and 1 with the weights of step 300" in acted.evidence
        assert told(judged) == ["act"]

    @pytest.mark.parametrize("detector", ["not-healing", "slow-divergence", "worse-than-best"])
    @pytest.mark.parametrize("old_loss", [3.0, 3.5])
    def test_never_when_it_does_not(self, detector: str, old_loss: float) -> None:
        judged = run(judge_of(Memory(old_loss, 3.0), suspicion(detector)))
        assert not [each.plan for each in judged if each.plan.actions]
        assert told(judged) == ([] if detector == "worse-than-best" else ["warn"])

    def test_older_weights_that_do_no_better_on_a_loss_that_has_multiplied_make_it_a_note(self) -> None:
        """Returns or targets have grown."""
        assert told(run(judge_of(Memory(30.0, 30.0), suspicion(value=30.0)))) == []

    @pytest.mark.parametrize("detector", ["not-healing", "slow-divergence"])
    def test_nor_when_nothing_can_be_run_again(self, detector: str) -> None:
        """What a curve alone says is a warning at most."""
        for memory in (Memory(1.0, 3.0, runs_again=False), Memory(1.0, 3.0)):
            memory.states = memory.states if memory.pair is None else []
            judged = run(judge_of(memory, suspicion(detector)))
            assert not [each.plan for each in judged if each.plan.actions]
            assert told(judged) == ["warn"]

    @pytest.mark.parametrize("detector", ["not-healing", "slow-divergence"])
    def test_nor_when_the_detector_only_warns(self, detector: str) -> None:
        judged = run(judge_of(Memory(1.0, 3.0), suspicion(detector, "warn")))
        assert not [each.plan for each in judged if each.plan.actions]
        assert told(judged) == ["warn"]

    def test_worse_than_best_never(self) -> None:
        judged = run(judge_of(Memory(1.0, 3.0), suspicion("worse-than-best")))
        assert not [each.plan for each in judged if each.plan.actions]

    def test_a_note_opens_nothing(self) -> None:
        memory = Memory(1.0, 3.0)
        assert told(run(judge_of(memory, suspicion(severity="info")))) == []
        assert memory.compared == []

    def test_an_objective_that_has_moved_makes_it_a_note(self) -> None:
        """A target network, an adversary: what was the loss then is not what it would be now."""
        for detector in ("not-healing", "slow-divergence"):
            judged = run(judge_of(Memory(1.0, 3.0, repeats=False), suspicion(detector)))
            assert told(judged) == []
            assert not [each.plan for each in judged if each.plan.actions]

    def test_where_that_cannot_be_told_only_a_jump_is_acted_on(self) -> None:
        for detector, heard in (("not-healing", "act"), ("slow-divergence", "warn")):
            assert told(run(judge_of(Memory(1.0, 3.0, repeats=None), suspicion(detector)))) == [heard]

    def test_a_jump_of_weights_is_confirmed_alike_and_whatever_became_of_the_objective(self) -> None:
        for old_loss, repeats, heard in ((1.0, False, "act"), (1.0, True, "act"), (3.0, True, "warn")):
            jumped = suspicion("weight-jump", "warn", baseline=40.0, limit=60.0)
            judged = run(judge_of(Memory(old_loss, 3.0, repeats=repeats), jumped))
            assert told(judged) == [heard]
            assert bool([each for each in judged if "rollback" in each.plan.actions]) is (heard == "act")

    def test_a_jump_of_weights_is_confirmed_at_once_where_batches_are_remembered(self) -> None:
        """What damaged them is over, and each step with them is wasted; a loss that stays high is not so sudden."""
        for detector, severity, steps in (("weight-jump", "warn", 1), ("not-healing", "act", 8)):
            memory = Memory(1.0, 3.0)
            memory.remembered = [(1.0, 3.0)] * 20
            run(judge_of(memory, suspicion(detector, severity)))
            assert len(memory.compared) == steps

    def test_remembered_batches_can_clear_them_too(self) -> None:
        for remembered in ([(3.0, 3.0)] * 20, [(math.nan, math.nan)] * 20):
            memory = Memory(1.0, 3.0)
            memory.remembered = remembered
            judged = run(judge_of(memory, suspicion("weight-jump", "warn")))
            assert not [each.plan for each in judged if each.plan.actions]

    def test_weights_that_are_no_longer_finite_need_no_comparison(self) -> None:
        memory = Memory(1.0, 3.0)
        judged = run(judge_of(memory, suspicion("weight-jump", value=math.inf)), steps=1)
        assert judged[0].plan.to == STATE
        assert memory.compared == []

    def test_guards_that_take_turns_get_notes(self) -> None:
        """Nor are losses that rest told of: a critic at ln 4 has met its match."""
        for detector in ("not-healing", "slow-divergence", "no-learning", "constant-prediction"):
            one, other = judge_of(Memory(1.0, 3.0), suspicion(detector)), judge_of(Memory(1.0, 1.0), suspicion(step=-1))
            for step in range(500):
                for judge in (one, other):
                    run(judge, start=step, steps=1)
            judged = []
            for step in range(500, 530):
                judged += run(one, start=step, steps=1)
                run(other, start=step, steps=1)
            assert told(judged) == []
            assert not [each.plan for each in judged if each.plan.actions]

    def test_a_run_too_young_to_know_its_own_ways_gets_notes_unless_it_is_confirmed(self) -> None:
        early = suspicion(step=90, since=80)
        assert told(run(judge_of(Memory(1.0, 3.0, runs_again=False), early), start=90)) == []
        memory = Memory(1.0, 3.0)
        memory.states = [state(40)]
        assert told(run(judge_of(memory, early), start=90)) == ["act"]

    def test_a_state_that_was_given_up_meanwhile_cannot_be_compared(self) -> None:
        memory = Memory(1.0, 3.0)
        judge = judge_of(memory, suspicion())
        run(judge, steps=4)
        memory.states = memory.states[:1]
        judged = run(judge, start=504)
        assert told(judged) == ["warn"]
        assert not [each.plan for each in judged if each.plan.actions]

    def test_a_rollback_for_another_reason_ends_the_comparison(self) -> None:
        """What was compared with are other weights now; seven batches of before must not count against them."""
        memory = Memory(1.0, 3.0)
        broken = suspicion("weight-jump", step=506, since=506, value=math.inf)
        case = judge_of(memory, suspicion(), broken)
        judged = run(case, steps=7)
        assert [each.plan.to for each in judged if each.plan.actions] == [STATE]
        assert case.judge.trial.finding is None
        memory.pair = (1.0, 1.0)
        assert not [each for each in run(case, start=507) if each.plan.actions]

    def test_what_a_curve_says_beside_refused_updates_is_no_more_than_a_warning(self) -> None:
        refused = Signals(step=500, loss=3.0, grad_norm=math.nan, lr=0.1, refused_in_a_row=2)
        memory = Memory(1.0, 3.0)
        case = judge_of(memory, suspicion(), suspicion("non-finite", "critical", since=None))
        verdict = case.verdict(refused)
        assert memory.tried == [[200, STATE]]
        assert verdict.plan.actions == ("skip-step",)
        assert {f.detector: f.severity for f in verdict.diagnosis.findings} == {
            "not-healing": "warn",
            "non-finite": "critical",
        }


class TestTurns:
    def test_one_alone_takes_none(self) -> None:
        turns = Turns()
        for _ in range(100):
            turns.take()
        assert not turns.are_taken

    def test_two_that_alternate_do_and_so_do_five_steps_against_one(self) -> None:
        for steps in (1, 5):
            one, other = Turns(), Turns()
            for _ in range(40):
                for _ in range(steps):
                    one.take()
                other.take()
            assert one.are_taken
            assert other.are_taken

    def test_one_run_after_another_does_not(self) -> None:
        """Also where the first guard is still there, and where it is used once more."""
        one, other = Turns(), Turns()
        for turns in (one, other, one):
            for _ in range(100):
                turns.take()
            assert not turns.are_taken

    def test_it_is_over_when_the_other_is_gone(self) -> None:
        one, other = Turns(), Turns()
        for _ in range(40):
            one.take()
            other.take()
        assert one.are_taken
        del other
        gc.collect()
        for _ in range(200):
            one.take()
        assert not one.are_taken


def test_only_warnings_of_the_same_step_are_compared_with_the_trusted_state() -> None:
    """The newest state that was trusted before the first sign: not one from after it."""
    memory = Memory(1.0, 3.0)
    memory.states.append(state(480))
    run(judge_of(memory, replace(suspicion(), since=490)))
    assert set(memory.compared) == {STATE}
