"""Guards that take turns, and what the judge weighs without running anything."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from steadystep.engine.judge import Judge, _by_plan, _is_uncertain, _newest_finite, conclude, notice
from steadystep.engine.verdict import Ask, Needs, Turns, Verdict, go_on, settle
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
    assert _is_uncertain(finding("slow-divergence", "act"))
    assert _is_uncertain(finding("weight-jump", "warn"))
    assert not _is_uncertain(finding("weight-jump", "act"))
    assert not _is_uncertain(finding("gradient-spike", "act"))


@pytest.mark.parametrize(
    ("lr", "announced", "planned"),
    [(1.0, 0.0, False), (1.1, 0.0, False), (1.11, 0.0, True), (2.0, 0.0, True), (2.01, 0.0, False), (2.5, 3.0, True)],
)
def test_a_rate_that_has_risen_to_what_was_known(lr: float, announced: float, planned: bool) -> None:
    assert _by_plan(state(5, lr=1.0, largest=2.0), lr, announced) == planned


def test_the_newest_state_under_which_the_batch_is_finite() -> None:
    bad = float("inf")
    states = [state(1, lr=0.1), state(2, lr=0.2), state(3, lr=0.3)]
    tried = _newest_finite(states, [9.0, 1.0, 2.0, bad])
    assert (tried.step, tried.old_loss, tried.current_loss, tried.lr) == (2, 2.0, 9.0, 0.2)
    assert _newest_finite(states, [9.0, bad, bad, bad]).step == 3
