"""The judge asks and is answered: what it needs, which weights are tried, and that it needs no tensor."""

import math
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from steadystep.engine.judge import Judge
from steadystep.engine.verdict import Ask, Needs, Verdict, held_back, settle
from steadystep.policy import Budget, Limits
from steadystep.records import Counterfactual, Finding, Severity, Signals

STUCK = Signals(step=200, loss=math.nan, grad_norm=math.nan, lr=0.1, refused_in_a_row=2)
WELL = Signals(step=201, loss=2.0, grad_norm=1.0, lr=0.1)


class Speaks:
    """Claims, at the steps it is told to, what it is told to."""

    def __init__(self, detector: str, severity: Severity, *steps: int) -> None:
        self.name, self._severity, self._steps = detector, severity, steps

    def update(self, signals: Signals) -> tuple[Finding, ...]:
        if signals.step not in self._steps:
            return ()
        found = Finding(detector=self.name, step=signals.step, severity=self._severity, value=3.0, limit=2.0)
        return (found,)


def judge_of(*detectors: Speaks) -> Judge:
    return Judge(detectors=(), steady=detectors, budget=Budget(), limits=Limits(), mode="autopilot")


def state(step: int, *, lr: float = 0.1, largest: float = 0.1) -> Any:
    return SimpleNamespace(step=step, updates=step + 1, lr=lr, largest_lr=largest)


class TestQuestions:
    def test_a_healthy_step_needs_nothing(self) -> None:
        assert judge_of(Speaks("non-finite", "critical", 200)).judge(WELL, updates=201) == Verdict(WELL)

    def test_one_after_the_other(self) -> None:
        judge, known = judge_of(Speaks("non-finite", "critical", 200)), [state(40)]
        asked, said = [], judge.judge(STUCK, updates=200)
        for answer in (STUCK, (known, 1.0), [math.nan, 1.0]):
            assert isinstance(said, Needs)
            asked.append((said.ask.what, list(said.ask.states)))
            said = said.answer(answer)
        assert asked == [("weight-norms", []), ("states", []), ("losses", known)]
        assert isinstance(said, Verdict)
        assert "rollback" in said.plan.actions

    @pytest.mark.parametrize("taken", [False, True])
    def test_a_sudden_zero_asks_for_the_weights(self, taken: bool) -> None:
        """Also where two optimizers take turns, whose resting losses are no finding."""
        judge = judge_of(Speaks("no-learning", "warn", 64) if taken else Speaks("x", "warn"))
        judge.turns = SimpleNamespace(mark=object(), count=0, take=lambda: None, are_taken=taken)  # type: ignore
        said: Any = None
        for step in range(65):
            norms = (0.0, 1.0) if step == 64 else (1.0, 1.0)
            signals = Signals(step=step, loss=1.0, grad_norm=1.0, lr=0.1, names=("a", "b"), norms=norms)
            said = judge.judge(signals, updates=step)
            assert isinstance(said, Verdict) == (step < 64)
        assert said.ask.what == "weight-norms"

    def test_only_a_spike_of_the_gradient_is_limited_by_clipping(self) -> None:
        found = Speaks("weight-jump", "act", 3).update(Signals(step=3, loss=1.0, grad_norm=1.0))
        with pytest.raises(StopIteration) as left:
            next(held_back(found))
        assert left.value.value == found

    def test_what_is_settled_is_not_asked_again(self) -> None:
        verdict = Verdict(WELL)
        assert settle(verdict, lambda ask: pytest.fail(str(ask))) is verdict

    @pytest.mark.parametrize("answered", [0, 1, 2])
    def test_one_that_is_never_answered_leaves_the_judge_usable(self, answered: int) -> None:
        """A measurement may raise, and the loop go on."""
        judge, known = judge_of(Speaks("non-finite", "critical", 199, 200)), [state(40)]
        left = judge.judge(
            Signals(step=199, loss=math.nan, grad_norm=math.nan, lr=0.1, refused_in_a_row=2), updates=199
        )
        for answer in (STUCK, (known, 1.0))[:answered]:
            assert isinstance(left, Needs)
            left = left.answer(answer)
        assert isinstance(left, Needs)
        del left
        answers = {"weight-norms": STUCK, "states": (known, 1.0), "losses": [math.nan, 1.0]}
        verdict = settle(judge.judge(STUCK, updates=200), lambda ask: answers[ask.what])
        assert "rollback" in verdict.plan.actions
        assert verdict.plan.to == 40
        assert judge.judge(WELL, updates=41) == Verdict(WELL)


class TestWhichWeightsAreTried:
    states = (state(20), state(40), state(60), state(80))

    def tried(
        self, losses: list[float] | None, states: tuple[Any, ...] = states, lr_mult: float = 1.0, **more: Any
    ) -> tuple[Counterfactual | None, list[Ask]]:
        signals, asked = Signals(**{"step": 200, "loss": math.nan, "grad_norm": math.nan, "lr": 0.1} | more), []

        def measure(ask: Ask) -> Any:
            if ask.what == "losses":
                asked.append(ask)
            return {"weight-norms": signals, "states": (list(states), lr_mult), "losses": losses}[ask.what]

        judge = judge_of(Speaks("non-finite", "critical", 200))
        return settle(judge.judge(signals, updates=200), measure).signals.counterfactual, asked

    def test_the_newest_under_which_the_batch_is_finite_counts(self) -> None:
        """The younger ones may hold the damage already; of more than three the oldest are left alone."""
        for old_loss, step in (
            ((1.0, 2.0, 3.0), 80),
            ((1.0, 2.0, math.nan), 60),
            ((1.0, math.inf, math.nan), 40),
            ((math.inf, 1.0, math.inf), 60),
            ((math.nan, math.nan, math.nan), 80),
        ):
            counterfactual, asked = self.tried([math.inf, *old_loss], refused_in_a_row=2)
            assert counterfactual is not None
            assert (counterfactual.step, counterfactual.current_loss, counterfactual.lr) == (step, math.inf, 0.1)
            assert [[each.step for each in ask.states] for ask in asked] == [[40, 60, 80]]

    def test_nobody_can_be_asked(self) -> None:
        assert self.tried(None, refused_in_a_row=2)[0] is None
        assert self.tried([1.0], (), refused_in_a_row=2) == (None, [])

    def test_after_a_refusal_the_gradient_counts_too(self) -> None:
        _, (ask,) = self.tried([3.0, 1.0, 1.0, 1.0], refused_in_a_row=2)
        assert ask.backward

    def test_a_learning_rate_that_rose_by_plan_explains_a_worse_loss(self) -> None:
        low = (state(40, lr=0.05, largest=0.1),)
        for changes, kept in (
            ({"lr": 0.1}, False),  # it has been there before
            ({"lr": 0.2}, True),
            ({"lr": 0.2, "announced_lr": 0.2}, False),
            ({"lr": 0.2, "lr_mult": 0.5}, False),  # the one in use counts
            ({"lr": 0.052}, True),  # hardly more
        ):
            _, asked = self.tried([math.nan, 1.0], low, refused_in_a_row=2, **changes)
            assert [list(ask.states) for ask in asked] == ([list(low)] if kept else []), changes


def test_a_judge_is_made_and_asked_without_torch() -> None:
    script = """
import sys
sys.modules["torch"] = None  # importing it would fail
from steadystep.engine.judge import Judge
from steadystep.policy import Budget, Limits
from steadystep.records import Signals
judge = Judge(detectors=(), steady=(), budget=Budget(), limits=Limits(), mode="autopilot")
print(judge.judge(Signals(step=0, loss=1.0, grad_norm=1.0, lr=0.1), updates=0).plan.proceeds)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.stdout.strip(), done.stderr) == ("True", "")
