"""Guards that take turns, and what the judge weighs without running anything."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from steadystep.diagnosis.counterfactual import is_uncertain
from steadystep.engine.judge import Judge, notice
from steadystep.engine.verdict import Ask, Needs, Turns, Verdict, by_plan, conclude, go_on, newest_finite, settle
from steadystep.policy import Budget, Limits
from steadystep.records import Finding, Probe, Severity, Signals


@pytest.fixture(autouse=True)
def _nobody_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Turns, "last", None)


class TestTurns:
    def test_two_in_alternation_are_noticed_at_the_second_turn_of_each(self) -> None:
        one, other = Turns(), Turns()
        one.take()
        other.take()
        assert (one.count, other.count) == (0, 8)
        one.take()
        other.take()
        assert (one.count, other.count) == (8, 16)
        assert (one.are_taken, other.are_taken) == (False, True)

    def test_each_change_counts_eight_up_to_64_and_each_step_alone_takes_one_off(self) -> None:
        one, other = Turns(), Turns()
        for _ in range(20):
            one.take()
            other.take()
        assert (one.count, other.count) == (64, 64)
        for expected in range(63, 15, -1):
            other.take()
            assert (other.count, other.are_taken) == (expected, True)
        other.take()
        assert (other.count, other.are_taken) == (15, False)
        for _ in range(30):
            other.take()
        assert other.count == 0

    def test_one_that_is_gone_was_nobodys_turn(self) -> None:
        one, other = Turns(), Turns()
        one.take()
        del one
        other.take()
        assert other.count == 0


def questions(*whats: Any) -> Iterator[Ask]:
    answers = []
    for what in whats:
        answers.append((yield Ask(what)))
    return answers  # type: ignore[return-value]


def test_questions_are_answered_one_after_the_other() -> None:
    asked: list[str] = []

    def measure(ask: Ask) -> str:
        asked.append(ask.what)
        return f"{ask.what}!"

    said: Any = go_on(questions("states", "losses"))  # type: ignore[arg-type]
    assert isinstance(said, Needs)
    assert settle(said, measure) == ["states!", "losses!"]
    assert asked == ["states", "losses"]
    assert go_on(questions()) == []  # type: ignore[arg-type,comparison-overlap]


class Speaks:
    def __init__(self, name: str, severity: Severity = "warn", **more: Any) -> None:
        self.name, self._severity, self._more = name, severity, more
        self.seen = 0
        self.loaded: list[Any] = []

    def update(self, signals: Signals) -> tuple[Finding, ...]:
        self.seen += 1
        said = {"value": 3.0, "limit": 2.0} | self._more
        return (Finding(detector=self.name, step=signals.step, severity=self._severity, **said),)

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loaded.append(state)


def signals(step: int = 900, **fields: Any) -> Signals:
    return Signals(**{"step": step, "loss": 2.0, "grad_norm": 1.0, "lr": 0.1} | fields)


def judge_of(*detectors: Speaks, **more: Any) -> Judge:
    parts: dict[str, Any] = {"budget": Budget(), "limits": Limits(), "mode": "autopilot"}
    return Judge(detectors=detectors, steady=detectors, **parts | more)


def state(step: int, *, lr: float = 0.1, largest: float = 0.1) -> Any:
    return SimpleNamespace(step=step, updates=step + 1, lr=lr, largest_lr=largest)


def answered(
    judge: Judge, now: Signals, answers: dict[str, Any] | None = None, **more: Any
) -> tuple[Verdict, list[str]]:
    """The verdict, and what was asked for."""
    asked: list[str] = []
    known = {"weight-norms": now, "states": ([], 1.0), "finite-states": ([], 1.0)} | (answers or {})

    def measure(ask: Ask) -> Any:
        asked.append(ask.what)
        return known[ask.what]

    return settle(judge.judge(now, **{"updates": now.step} | more), measure), asked


def test_findings_come_in_the_order_of_the_detectors() -> None:
    found = notice([Speaks("a"), Speaks("b")], signals())
    assert [finding.detector for finding in found] == ["a", "b"]
    verdict = conclude(signals(), found, budget=Budget(), limits=Limits(), states=())
    assert verdict.diagnosis.findings == found


class TestWhoIsAsked:
    def test_those_for_probes_only_with_one(self) -> None:
        every, probes = Speaks("a", "info"), Speaks("b", "info")
        judge = Judge(detectors=(every, probes), steady=(every,), budget=Budget(), limits=Limits(), mode="autopilot")
        answered(judge, signals())
        assert (every.seen, probes.seen) == (1, 0)
        answered(judge, signals(probe=Probe(step=1)))
        assert (every.seen, probes.seen) == (2, 1)

    def test_those_that_need_what_is_missing_are_not(self) -> None:
        needy = Speaks("a", "info")
        needy.needs = "metrics"  # type: ignore[attr-defined]
        judge = judge_of(needy)
        for given in (signals(), signals(metrics={"kl": 1.0}), signals(), signals(metrics={"kl": 1.0})):
            answered(judge, given)
        assert needy.seen == 2


class TestQuestions:
    def test_a_note_or_a_warning_asks_for_states_only(self) -> None:
        for severity in ("info", "warn"):
            assert answered(judge_of(Speaks("clip-rate", severity)), signals())[1] == ["states"]

    @pytest.mark.parametrize(
        ("detector", "severity"), [("gradient-spike", "act"), ("non-finite", "critical"), ("loss-spike", "info")]
    )
    def test_what_is_grave_asks_for_the_weights_too(self, detector: str, severity: Severity) -> None:
        judge = judge_of(Speaks(detector, severity))
        assert answered(judge, signals())[1][0] == "weight-norms"
        measured = signals(weights=("w",), weight_norms=(1.0,))
        assert "weight-norms" not in answered(judge, measured)[1]

    def test_then_only_the_detector_of_weights_is_asked_again(self) -> None:
        spike, weights = Speaks("gradient-spike", "act"), Speaks("weight-jump", "info")
        verdict, _ = answered(judge_of(spike, weights), signals())
        assert (spike.seen, weights.seen) == (1, 2)
        assert len(verdict.diagnosis.findings) == 3

    @pytest.mark.parametrize(("detector", "severity"), [("damaged-state", "act"), ("weight-jump", "act")])
    def test_with_damage_only_finite_states_count(self, detector: str, severity: Severity) -> None:
        broken = Speaks(detector, severity, value=float("inf"), where=("w",))
        assert answered(judge_of(broken), signals())[1][:2] == ["weight-norms", "finite-states"]

    def test_a_zero_gradient_after_64_steps_is_a_doubt(self) -> None:
        judge = judge_of()
        for step in range(64):
            assert answered(judge, signals(step, norms=(1.0, 1.0))) == (Verdict(signals(step, norms=(1.0, 1.0))), [])
        sudden = signals(64, norms=(1.0, 0.0))
        assert answered(judge, sudden) == (Verdict(sudden), ["weight-norms", "states"])


class TestClippedByTheLoop:
    @pytest.mark.parametrize(("norm", "severity"), [(2.0, "info"), (2.1, "act")])
    def test_a_spike_that_was_brought_under_the_limit_is_a_note(self, norm: float, severity: str) -> None:
        judge = judge_of(Speaks("gradient-spike", "act", limit=2.0), Speaks("clip-rate", "info"))
        verdict, asked = answered(judge, signals(), {"norm-now": norm}, clipped=True)
        assert asked[0] == "norm-now"
        assert [finding.severity for finding in verdict.diagnosis.findings] == [severity, "info"]

    def test_without_a_spike_nothing_is_measured(self) -> None:
        for judge in (judge_of(Speaks("gradient-spike", "info")), judge_of(Speaks("clip-rate", "warn"))):
            assert "norm-now" not in answered(judge, signals(), clipped=True)[1]
        assert "norm-now" not in answered(judge_of(Speaks("gradient-spike", "act")), signals())[1]


class TestOfRestingLosses:
    def test_guards_that_take_turns_are_not_told_of_a_loss_at_rest(self) -> None:
        judge = judge_of(Speaks("no-learning", "info"))
        assert len(answered(judge, signals())[0].diagnosis.findings) == 1
        other = Turns()
        for step in range(4):
            other.take()
            verdict, asked = answered(judge, signals(step))
        assert verdict == Verdict(signals(3))
        assert asked == []


class TestOtherWeights:
    def test_detectors_that_measure_by_the_past_begin_anew(self) -> None:
        past, present = Speaks("loss-spike"), Speaks("clip-rate")
        beginning = {"values": [1]}
        judge = judge_of(past, present, beginnings={"loss-spike": beginning})
        judge.start_again(7)
        assert judge.edition == 7
        assert past.loaded == [beginning]
        assert past.loaded[0]["values"] is not beginning["values"]
        assert present.loaded == []


def finding(detector: str, severity: Severity = "warn", **more: Any) -> Finding:
    return Finding(**{"detector": detector, "step": 900, "severity": severity, "value": 3.0, "limit": 2.0} | more)


class TestUntried:
    @pytest.mark.parametrize(
        ("detector", "since", "mode", "severity"),
        [
            ("slow-divergence", 384, "autopilot", "warn"),
            ("slow-divergence", 383, "autopilot", "info"),  # too young to know its own ways
            ("slow-divergence", None, "autopilot", "warn"),
            ("slow-divergence", 10, "observe", "warn"),
            ("weight-jump", 10, "autopilot", "warn"),
            ("worse-than-best", 800, "autopilot", "info"),
            ("worse-than-best", 800, "observe", "warn"),
        ],
    )
    def test_a_curve_alone_is_a_warning_at_most(
        self, detector: str, since: int | None, mode: Any, severity: str
    ) -> None:
        judge = judge_of(mode=mode)
        for claimed in ("warn", "act", "critical"):
            assert judge._untried(finding(detector, claimed, since=since)).severity == severity
        assert judge._untried(finding(detector, "info", since=since)).severity == "info"


def test_only_a_comparison_can_confirm_what_lasts() -> None:
    assert is_uncertain(finding("slow-divergence", "act"))
    assert is_uncertain(finding("weight-jump", "warn"))
    assert not is_uncertain(finding("weight-jump", "act"))
    assert not is_uncertain(finding("gradient-spike", "act"))


@pytest.mark.parametrize(
    ("lr", "announced", "planned"),
    [(1.0, 0.0, False), (1.1, 0.0, False), (1.11, 0.0, True), (2.0, 0.0, True), (2.01, 0.0, False), (2.5, 3.0, True)],
)
def test_a_rate_that_has_risen_to_what_was_known(lr: float, announced: float, planned: bool) -> None:
    assert by_plan(state(5, lr=1.0, largest=2.0), lr, announced) == planned


def test_the_newest_state_under_which_the_batch_is_finite() -> None:
    bad = float("inf")
    states = [state(1, lr=0.1), state(2, lr=0.2), state(3, lr=0.3)]
    tried = newest_finite(states, [9.0, 1.0, 2.0, bad])
    assert (tried.step, tried.old_loss, tried.current_loss, tried.lr) == (2, 2.0, 9.0, 0.2)
    assert newest_finite(states, [9.0, bad, bad, bad]).step == 3


class TestTrial:
    """A loss that stays high: the state to be restored is tried on several batches before anything is done."""

    old, new = state(40), state(60)

    def run(
        self, judge: Judge, steps: int, losses: Any = (2.0, 1.0), states: Any = None, **more: Any
    ) -> tuple[list[Verdict], list[list[str]]]:
        known = [self.old, self.new] if states is None else states
        answers = {"states": (known, 1.0), "losses": losses, "repeats": True} | more
        told = [answered(judge, signals(900 + step), answers) for step in range(steps)]
        return [verdict for verdict, _ in told], [asked for _, asked in told]

    def test_it_is_opened_once_and_ends_after_eight_batches(self) -> None:
        judge = judge_of(Speaks("slow-divergence", "act", baseline=1.0))
        verdicts, asked = self.run(judge, 8, (6.0, 1.0))
        assert [verdict.signals.counterfactual is not None for verdict in verdicts] == [False] * 7 + [True]
        counterfactual = verdicts[-1].signals.counterfactual
        assert counterfactual is not None
        assert (counterfactual.step, counterfactual.batches) == (60, 8)
        assert (counterfactual.old_loss, counterfactual.current_loss) == (1.0, 6.0)
        said = [[found.severity for found in verdict.diagnosis.findings] for verdict in verdicts]
        assert said == [["info"]] * 7 + [["act"]]
        assert [questions[-1] for questions in asked] == ["losses"] * 7 + ["repeats"]
        assert judge.trial.finding is None

    def test_while_it_is_open_the_finding_is_a_note(self) -> None:
        judge = judge_of(Speaks("slow-divergence", "act", baseline=1.0))
        (verdict,), _ = self.run(judge, 1)
        assert [found.severity for found in verdict.diagnosis.findings] == ["info"]
        assert judge.trial.finding is not None

    def test_a_note_opens_none(self) -> None:
        judge = judge_of(Speaks("slow-divergence", "info"))
        _, (asked,) = self.run(judge, 1)
        assert asked == ["states"]
        assert judge.trial.finding is None

    def test_nor_is_one_opened_without_a_state_or_where_guards_take_turns(self) -> None:
        judge = judge_of(Speaks("slow-divergence", "warn"))
        (verdict,), (asked,) = self.run(judge, 1, states=[])
        assert asked == ["states"]
        assert [found.severity for found in verdict.diagnosis.findings] == ["warn"]
        turned = judge_of(Speaks("slow-divergence", "act"))
        turned.turns.count = 40
        turned.turns.take()
        assert turned.turns.are_taken
        _, (asked,) = self.run(turned, 1)
        assert asked == ["weight-norms", "states"]

    def test_a_state_that_is_gone_ends_it(self) -> None:
        judge = judge_of(Speaks("slow-divergence", "act", baseline=1.0))
        self.run(judge, 2)
        (verdict,), (asked,) = self.run(judge, 1, states=[self.old])
        assert asked == ["weight-norms", "states"]
        assert judge.trial.finding is None
        assert [found.severity for found in verdict.diagnosis.findings] == ["warn"]

    def test_losses_that_cannot_be_told_end_it(self) -> None:
        judge = judge_of(Speaks("slow-divergence", "act", baseline=1.0))
        (verdict,), _ = self.run(judge, 1, losses=None)
        assert judge.trial.finding is None
        assert [found.severity for found in verdict.diagnosis.findings] == ["warn"]

    def test_it_goes_on_at_steps_without_a_finding_and_is_closed_with_other_weights(self) -> None:
        judge = judge_of(Speaks("slow-divergence", "act", baseline=1.0))
        self.run(judge, 1)
        judge.steady = ()
        judge.rolls.clear()
        quiet = Judge(detectors=(), steady=(), budget=Budget(), limits=Limits(), mode="autopilot", trial=judge.trial)
        (verdict,), (asked,) = self.run(quiet, 1)
        assert asked == ["states", "losses"]
        assert verdict.plan.proceeds
        quiet.start_again(3)
        assert quiet.trial.finding is None

    def test_a_jump_of_weights_is_tried_on_remembered_batches_at_once(self) -> None:
        judge = judge_of(Speaks("weight-jump", "warn", value=9.0, baseline=1.0, where=("w",)))
        verdicts, (asked,) = self.run(judge, 1, **{"remembered-losses": [(1.0, 2.0)] * 7})
        assert asked == ["states", "remembered-losses", "losses"]
        assert verdicts[0].signals.counterfactual is not None
        assert "rollback" in verdicts[0].plan.actions

    def test_states_that_contain_all_updates_are_no_way_back(self) -> None:
        judge = judge_of(Speaks("slow-divergence", "act", baseline=1.0))
        answers = {"states": ([self.old, self.new], 1.0), "losses": (2.0, 1.0)}
        answered(judge, signals(900), answers, updates=61)
        assert judge.trial.state == 40


class TestSeverity:
    @pytest.mark.parametrize(
        ("result", "fields", "repeats", "severity"),
        [
            ("confirmed", {}, True, "act"),
            ("confirmed", {}, None, "warn"),
            ("confirmed", {}, False, "info"),
            ("confirmed", {"severity": "warn"}, True, "warn"),
            ("confirmed", {"detector": "not-healing"}, None, "act"),
            ("confirmed", {"detector": "not-healing"}, False, "info"),
            ("confirmed", {"detector": "worse-than-best"}, True, "warn"),
            ("cleared", {"detector": "worse-than-best"}, True, "info"),
            ("cleared", {}, True, "warn"),
            ("cleared", {"value": 2.0, "baseline": 1.0}, True, "warn"),
            ("cleared", {"value": 2.1, "baseline": 1.0}, True, "info"),
            ("confirmed", {"value": 2.1, "baseline": 1.0}, True, "act"),
            ("healing", {}, True, "warn"),
            ("healing", {"severity": "warn"}, True, "info"),
        ],
    )
    def test_what_a_trial_comes_to(self, result: Any, fields: dict[str, Any], repeats: Any, severity: str) -> None:
        suspected = finding(**{"detector": "slow-divergence", "severity": "act"} | fields)
        for turns, expected in ((False, severity), (True, "info")):
            judge = judge_of()
            judge.turns.are_taken = turns
            rest: Any = judge._severity(result, state(40), suspected)
            asked: Any = go_on(rest)
            assert (asked.ask.what, [each.step for each in asked.ask.states]) == ("repeats", [40])
            assert asked.answer(repeats) == expected

    @pytest.mark.parametrize(
        ("result", "turns", "severity"),
        [("confirmed", False, "act"), ("confirmed", True, "warn"), ("cleared", False, "warn")],
    )
    def test_a_jump_of_weights_needs_no_more(self, result: Any, turns: bool, severity: str) -> None:
        judge = judge_of()
        judge.turns.are_taken = turns
        rest: Any = judge._severity(result, state(40), finding("weight-jump"))
        assert go_on(rest) == severity


class TestConclusion:
    def test_whoever_cannot_roll_back_is_careful(self) -> None:
        for mode, careful, to in (("autopilot", False, 40), ("autopilot", True, None), ("careful", False, None)):
            broken = Speaks("weight-jump", "act", value=float("inf"), where=("w",))
            answers = {"finite-states": ([state(40)], 1.0)}
            verdict, _ = answered(judge_of(broken, mode=mode), signals(), answers, careful=careful)
            assert verdict.plan.to == to

    def test_a_rollback_closes_an_open_trial(self) -> None:
        broken = Speaks("weight-jump", "act", value=float("inf"), where=("w",))
        judge = judge_of(broken)
        judge.trial.begin(finding("slow-divergence"), state=40, lr=0.1)
        verdict, _ = answered(judge, signals(), {"finite-states": ([state(40)], 1.0), "losses": (2.0, 1.0)})
        assert "rollback" in verdict.plan.actions
        assert judge.trial.finding is None
