"""A backward pass that gives something else than it gave: known by a remembered batch, run again."""

import math
from collections.abc import Callable, Generator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

import steadystep
from steadystep._utils.numbers import common_factor
from steadystep.engine.judge import Judge
from steadystep.engine.verdict import Ask, BackwardCheck, Verdict
from steadystep.faults import parse
from steadystep.lab.tasks import TASKS
from steadystep.records import Diagnosis, Finding, Outcome, Plan, Signals

START, STEPS = 100, 160


def train(spec: dict[str, Any] | None, *, steps: int = STEPS) -> tuple[nn.Module, list[Outcome]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    guard = steadystep.Guard(model, optimizer)
    fault = None if spec is None else parse({"at": START, **spec}, model=model, optimizer=optimizer)
    outcomes = []

    def loss(batch: tuple[Tensor, Tensor]) -> Tensor:
        return functional.mse_loss(model(batch[0]), batch[1])

    for step in range(steps):
        x = torch.randn(32, 4, generator=torch.Generator().manual_seed(step))
        batch = x, x.sum(-1, keepdim=True).sin()
        if fault is None:
            outcomes.append(guard.step(loss, batch=batch))
        else:
            with fault.at(step):
                outcomes.append(guard.step(loss, batch=batch))
    return model, outcomes


def assert_close(one: nn.Module, other: nn.Module) -> None:
    for mine, clean in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.allclose(mine, clean, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("lasts", [1, 20, "ever"])
def test_a_factor_on_all_gradients_is_divided_out_for_as_long_as_it_is_there(lasts: int | str) -> None:
    clean, _ = train(None)
    model, outcomes = train({"kind": "grad-scale", "factor": 1000, "for": lasts})
    acted = [outcome.step for outcome in outcomes if outcome.plan.actions]
    last = STEPS if lasts == "ever" else START + int(lasts)
    assert acted == list(range(START, last))
    assert {outcome.plan.actions for outcome in outcomes[START:last]} == {("rescale",)}
    assert_close(model, clean)


def test_a_factor_on_one_layer_is_no_common_one() -> None:
    _, outcomes = train({"kind": "grad-scale", "factor": 1e5, "layer": "0"})
    assert "gradient-spike" in {finding.detector for finding in outcomes[START].findings}
    assert "same batch" not in outcomes[START].diagnosis.evidence


def test_a_rollback_waits_until_updates_can_be_replayed() -> None:
    def end(broken: bool) -> tuple[list[Tensor], list[Outcome]]:
        task = TASKS["clusters"].make(1)
        guard = steadystep.Guard(task.model, task.optimizer)
        spec = {"kind": "missing-zero-grad", "at": 210, "for": 20}
        fault = parse(spec, model=task.model, optimizer=task.optimizer, seed=1)
        outcomes = []
        for step in range(240):
            batch = task.batch()
            if broken:
                with fault.at(step):
                    outcomes.append(guard.step(task.loss, batch=batch))
            else:
                outcomes.append(guard.step(task.loss, batch=batch))
        return [p.detach().clone() for p in task.model.parameters()], outcomes

    clean, _ = end(broken=False)
    mine, outcomes = end(broken=True)
    (back,) = [outcome for outcome in outcomes if outcome.plan.actions]
    assert back.step >= 230
    assert back.plan.actions == ("rollback", "replay")
    assert all(torch.equal(a, b) for a, b in zip(mine, clean, strict=True))


def answered(asked: Generator[Ask, Any, Any], answer: float | None, asks: list[Ask] | None = None) -> Any:
    """What comes of it when every question has this answer."""
    try:
        ask = next(asked)
        while True:
            if asks is not None:
                asks.append(ask)
            ask = asked.send(answer)
    except StopIteration as end:
        return end.value


def signals(step: int, norm: float = 10.0) -> Signals:
    return Signals(step=step, loss=1.0, grad_norm=norm, lr=0.1, names=("a",), norms=(norm,))


SPIKE = Finding(detector="gradient-spike", step=5, severity="act", value=10.0, limit=6.0, baseline=1.0)
JUMP = Finding(detector="weight-jump", step=5, severity="act", value=2.0, limit=1.0, baseline=0.5)
STATE: Any = SimpleNamespace(step=3)
BACK = Plan(actions=("rollback", "replay"), to=3, until=4)


class TestFactor:
    @pytest.mark.parametrize("answer", [None, 1.0, 1.9, 0.1, math.nan, math.inf])
    def test_only_one_that_is_known_and_matters(self, answer: float | None) -> None:
        check = BackwardCheck()
        assert answered(check.explain(signals(5), (SPIKE,), []), answer) == (SPIKE,)
        assert check.factor == 1.0

    def test_a_note_is_no_reason_to_ask(self) -> None:
        asks: list[Ask] = []
        answered(BackwardCheck().explain(signals(5), (JUMP,), []), 10.0, asks)
        assert asks == []

    @given(st.floats(2.0, 1e6))
    def test_what_is_shown_is_without_it_and_what_is_reported_with_it(self, factor: float) -> None:
        check = BackwardCheck()
        (found,) = answered(check.explain(signals(5, factor), (SPIKE,), []), factor)
        assert found.baseline == pytest.approx(1.0)
        shown = answered(check.check(signals(6, factor)), factor)
        assert shown.grad_norm == pytest.approx(1.0)
        assert shown.norms == (pytest.approx(1.0),)
        verdict = check.divided(signals(6, factor), Verdict(shown))
        assert verdict.signals.grad_norm == factor
        assert verdict.plan.actions == ("rescale",)
        assert verdict.plan.norm == pytest.approx(1.0)
        assert verdict.diagnosis.cause == "exploding-gradient"

    def test_it_is_measured_again_every_16_steps_and_when_it_seems_gone(self) -> None:
        check = BackwardCheck()
        answered(check.explain(signals(5), (SPIKE,), []), 10.0)
        asks: list[Ask] = []
        for step in range(6, 22):
            answered(check.check(signals(step)), 10.0, asks)
        assert len(asks) == 1
        assert asks[0].count == 5
        assert answered(check.check(signals(22, norm=1.0)), 1.0, asks).grad_norm == 1.0
        assert len(asks) == 2
        assert check.factor == 1.0

    def test_an_optimizer_with_second_moments_follows_a_lasting_factor(self) -> None:
        check = BackwardCheck()
        answered(check.explain(signals(5), (SPIKE,), [SimpleNamespace(second_moment=1.0)]), 10.0)  # type: ignore[list-item]
        shown = [answered(check.check(signals(step)), 10.0).grad_norm for step in range(6, 22)]
        assert shown == [1.0] * 15 + [10.0]
        assert check.factor == 1.0
        assert answered(check.explain(signals(22), (SPIKE,), []), 10.0) == (SPIKE,)
        answered(check.explain(signals(521), (SPIKE,), []), 10.0)
        assert check.factor == 10.0

    def test_a_refused_update_stays_refused(self) -> None:
        check = BackwardCheck()
        answered(check.explain(signals(5), (SPIKE,), []), 10.0)
        for action in ("skip-step", "rollback"):
            verdict = Verdict(signals(6, 1.0), Diagnosis(), Plan(actions=(action,)))  # type: ignore[arg-type]
            assert check.divided(signals(6), verdict).plan == verdict.plan


class TestWait:
    def verdict(self, plan: Plan = BACK, finding: Finding = JUMP) -> Verdict:
        return Verdict(signals(5), Diagnosis(findings=(finding,)), plan)

    def test_while_backward_gives_something_else(self) -> None:
        check = BackwardCheck()
        waits = answered(check.wait(signals(5), self.verdict(), [STATE]), math.nan)
        assert not waits.plan.actions
        assert check.pending(12) == ()
        assert [finding.step for finding in check.pending(13)] == [13]
        back = answered(check.wait(signals(13), self.verdict(), [STATE]), 1.0)
        assert back.plan == BACK
        assert check.due == math.inf

    def test_not_for_ever(self) -> None:
        check = BackwardCheck()
        plans = {
            step: answered(check.wait(signals(step), self.verdict(), [STATE]), math.nan).plan
            for step in range(5, 78, 8)
        }
        assert [step for step, plan in plans.items() if plan.actions] == [69]

    def test_a_step_without_a_rollback_ends_nothing(self) -> None:
        check = BackwardCheck()
        answered(check.wait(signals(5), self.verdict(), [STATE]), math.nan)
        answered(check.wait(signals(6), self.verdict(Plan()), [STATE]), math.nan)
        assert check.pending(13)

    @pytest.mark.parametrize(
        ("plan", "finding", "states", "norm"),
        [
            (Plan(actions=("rollback",), to=3), JUMP, [STATE], 1.0),
            (Plan(actions=("rollback", "replay"), to=3, until=4, or_nothing=True), JUMP, [STATE], 1.0),
            (BACK, Finding(detector="weight-jump", step=5, severity="act", value=math.inf, limit=1.0), [STATE], 1.0),
            (BACK, JUMP, [], 1.0),
            (BACK, JUMP, [STATE], math.inf),
        ],
    )
    def test_never_where_nothing_is_replayed_or_nothing_finite_is_there(
        self, plan: Plan, finding: Finding, states: Sequence[Any], norm: float
    ) -> None:
        asks: list[Ask] = []
        verdict = self.verdict(plan, finding)
        assert answered(BackwardCheck().wait(signals(5, norm), verdict, states), math.nan, asks) == verdict
        assert asks == []


@given(st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=8), st.floats(0.1, 100.0))
def test_the_common_factor_of_norms(then: list[float], factor: float) -> None:
    assert common_factor([factor * norm for norm in reversed(then)], then) == pytest.approx(factor)


@pytest.mark.parametrize(("now", "then"), [([1.0, 20.0], [1.0, 2.0]), ([1.0], [1.0, 2.0]), ([0.0], [0.0])])
def test_without_a_common_factor(now: list[float], then: list[float]) -> None:
    assert math.isnan(common_factor(now, then))


def flipped(steps: Callable[[int], bool]) -> tuple[list[Tensor], list[Outcome]]:
    """The LSTM with the wrong sign of all gradients at some steps: it heals slowly, by itself."""
    task = TASKS["rnn"].make(0)
    guard = steadystep.Guard(task.model, task.optimizer)
    spec = {"kind": "grad-sign-flip", "at": 200, "for": 20}
    fault = parse(spec, model=task.model, optimizer=task.optimizer)
    outcomes = []
    for step in range(252):
        batch = task.batch()
        with fault.at(step if steps(step) else 0):
            outcomes.append(guard.step(task.loss, batch=batch))
    return [p.detach().clone() for p in task.model.parameters()], outcomes


@pytest.mark.slow
def test_what_heals_slowly_is_replayed_where_that_goes_better() -> None:
    clean, _ = flipped(lambda step: False)
    mine, outcomes = flipped(lambda step: True)
    (back,) = [outcome for outcome in outcomes if outcome.plan.actions]
    assert back.plan.or_nothing
    assert back.plan.actions == ("rollback", "replay")
    assert all(torch.equal(a, b) for a, b in zip(mine, clean, strict=True))


@pytest.mark.parametrize("repeats", [True, False])
def test_a_replay_that_leads_to_nothing_leaves_the_bits_of_a_run_without_it(
    monkeypatch: pytest.MonkeyPatch, repeats: bool
) -> None:
    finding = Finding(detector="slow-divergence", step=100, severity="act", value=2.0, limit=1.0, since=80)
    plan = Plan(actions=("rollback", "replay"), to=59, until=80, outside=True, or_nothing=True)
    judged, offset = Judge.judge, [0.0]

    def judge(self: Judge, signals: Signals, **more: Any) -> Any:
        if signals.step != 100:
            return judged(self, signals, **more)
        offset[0] = 0.0 if repeats else 1.0  # the closure gives another loss when it is run again
        return Verdict(signals, Diagnosis(cause="unknown", findings=(finding,)), plan)

    def end() -> tuple[list[Tensor], list[Outcome]]:
        torch.manual_seed(0)
        offset[0] = 0.0
        layers = (nn.Linear(4, 16), nn.BatchNorm1d(16), nn.Dropout(0.2), nn.Linear(16, 1))
        model = nn.Sequential(*layers)
        guard = steadystep.Guard(model, torch.optim.Adam(model.parameters(), lr=0.01))

        def loss(batch: Tensor) -> Tensor:
            more = offset[0] if int(batch[0, 0] * 1e6) != last[0] else 0.0
            return functional.mse_loss(model(batch), batch.sum(-1, keepdim=True)) + more

        outcomes = []
        for step in range(120):
            x = torch.randn(32, 4, generator=torch.Generator().manual_seed(step))
            last[0] = int(x[0, 0] * 1e6)
            outcomes.append(guard.step(loss, batch=x))
            offset[0] = 0.0
        return [t.clone() for t in model.state_dict().values()], outcomes

    last = [0]
    clean, _ = end()
    monkeypatch.setattr(Judge, "judge", judge)
    mine, outcomes = end()
    assert outcomes[100].stepped
    assert not outcomes[100].plan.actions
    assert [found.severity for found in outcomes[100].findings] == ["warn"]
    assert all(torch.equal(a, b) for a, b in zip(mine, clean, strict=True))
