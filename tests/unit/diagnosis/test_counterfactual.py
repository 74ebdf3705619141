"""Would older weights do better? When that is asked, what the answer weighs, and that asking leaves no trace."""

import math
import random
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import steadystep
from steadystep.diagnosis import first_sign, needs_counterfactual, weigh
from steadystep.diagnosis.explain import is_worse, reach
from steadystep.engine.microbatches import MicroBatchRunner
from steadystep.engine.rollback import InMemory
from steadystep.precision import Precision
from steadystep.records import Counterfactual, Damage, Finding, Outcome, Severity, Signals
from steadystep.snapshots.buffers import Buffers
from tests.loops import assert_same, batches, full_state, small_net, squared

CALM = Signals(step=100, loss=2.0, grad_norm=1.0, lr=0.1)
SEVERITIES = st.sampled_from(["info", "warn", "act", "critical"])


def finding(detector: str, severity: Severity = "act", *, value: float = 3.0, **more: object) -> Finding:
    plain = {"detector": detector, "step": 100, "severity": severity, "value": value, "limit": 2.2, "baseline": 2.0}
    return Finding(**plain | more)


class TestWhenItIsAsked:
    def test_when(self) -> None:
        for found, refused, input_finite, asked in (
            (finding("weight-jump", "warn"), 0, None, False),
            (finding("not-healing"), 0, None, False),  # one batch is not enough
            (finding("slow-divergence", "info"), 0, None, False),
            (finding("worse-than-best"), 0, None, False),
            (finding("gradient-spike"), 5, None, False),
            (finding("non-finite", "critical"), 1, None, False),
            (finding("non-finite", "critical"), 2, None, True),
            (finding("non-finite", "critical"), 2, True, True),
            (finding("non-finite", "critical"), 2, False, False),  # the data is the cause
            (finding("non-finite", "info"), 9, None, False),  # a scaler's routine
        ):
            signals = replace(CALM, refused_in_a_row=refused, input_finite=input_finite)
            assert needs_counterfactual(signals, (found,)) is asked, found
            assert needs_counterfactual(signals, (finding("loss-spike", "info"), found)) is asked, found

    def test_weights_that_are_no_longer_finite_need_no_witness(self) -> None:
        stuck = replace(CALM, refused_in_a_row=2)
        nan = finding("non-finite", "critical")
        assert needs_counterfactual(stuck, (nan, finding("weight-jump", "warn")))
        assert not needs_counterfactual(stuck, (nan, finding("weight-jump", "act")))

    def test_nothing_found_asks_nobody(self) -> None:
        assert not needs_counterfactual(replace(CALM, refused_in_a_row=9), ())

    def test_weights_must_be_older_than_the_first_sign(self) -> None:
        assert first_sign((finding("a", since=80), finding("b", since=90), finding("c"))) == 80
        assert first_sign((finding("c"),)) == 100


def heard(old_loss: float, current_loss: float, *, loss: float = 3.0) -> Signals:
    return replace(
        CALM, loss=loss, counterfactual=Counterfactual(step=50, old_loss=old_loss, current_loss=current_loss)
    )


class TestWhatItWeighs:
    @given(st.sampled_from(["weight-jump", "not-healing", "gradient-spike", "mine"]), SEVERITIES)
    def test_nobody_heard_changes_nothing(self, detector: str, severity: Severity) -> None:
        found = (finding(detector, severity),)
        assert weigh(CALM, found) == found

    @given(SEVERITIES)
    def test_older_weights_that_do_better_make_a_suspicion_a_case(self, severity: Severity) -> None:
        (found,) = weigh(heard(2.0, 3.0), (finding("weight-jump", severity),))
        assert found == finding("weight-jump", "act")

    @given(st.floats(0.0, 0.5))
    def test_older_weights_that_do_no_better_take_the_urgency_away(self, worse: float) -> None:
        (found,) = weigh(heard(2.0 + worse, 2.0), (finding("weight-jump"),))
        assert found.severity == "warn"

    def test_others_are_not_its_business(self) -> None:
        found = (finding("gradient-spike"), finding("non-finite", "critical"), finding("mine"), finding("not-healing"))
        assert weigh(heard(2.0, 2.0), found) == weigh(heard(2.0, 3.0), found) == found


def test_what_is_worse() -> None:
    """A fiftieth is chance, and a batch that is not finite under older weights either is the data's fault."""
    for old_loss, current_loss, worse in (
        (2.0, 2.03, False),
        (2.0, 2.05, True),
        (30.0, 30.5, False),
        (30.0, 30.7, True),
        (-30.0, -29.5, False),
        (-30.0, -29.3, True),
        (2.0, 1.0, False),
        (2.0, math.nan, True),
        (2.0, math.inf, True),
        (math.nan, math.nan, False),
        (math.inf, math.inf, False),
        (math.nan, 2.0, False),
    ):
        assert is_worse(Counterfactual(step=50, old_loss=old_loss, current_loss=current_loss)) is worse, (
            old_loss,
            current_loss,
        )


class TestReach:
    def test_how_far(self) -> None:
        """Weights that jumped are damaged for certain; all else only where older ones were tried, and do better."""
        better, same = (
            Counterfactual(step=50, old_loss=1.0, current_loss=2.0),
            Counterfactual(step=50, old_loss=2.0, current_loss=2.0),
        )
        nan, poison, jump = finding("non-finite", "critical"), finding("poisoned-moments"), finding("weight-jump")
        for found, changes, expected in (
            ((jump,), {}, Damage.WEIGHTS),
            ((finding("odd-replica"),), {}, Damage.WEIGHTS),
            ((replace(jump, severity="warn"),), {}, Damage.NONE),
            ((finding("not-healing"),), {}, Damage.NONE),
            ((finding("slow-divergence"),), {}, Damage.NONE),
            ((finding("worse-than-best"),), {"counterfactual": better}, Damage.NONE),
            ((finding("not-healing", "warn"),), {"counterfactual": better}, Damage.NONE),
            ((finding("not-healing"),), {"counterfactual": better}, Damage.WEIGHTS),
            ((finding("slow-divergence"),), {"counterfactual": better}, Damage.WEIGHTS),
            ((finding("not-healing"),), {"counterfactual": same}, Damage.NONE),
            ((finding("not-healing"), poison), {"counterfactual": same}, Damage.MOMENTS),
            ((finding("not-healing"), poison), {"counterfactual": better}, Damage.WEIGHTS),
            ((jump, poison), {}, Damage.WEIGHTS),
            ((nan,), {"refused_in_a_row": 1, "counterfactual": better}, Damage.NONE),
            ((nan,), {"refused_in_a_row": 2, "counterfactual": better}, Damage.WEIGHTS),
            ((nan,), {"refused_in_a_row": 2}, Damage.NONE),  # nobody knows
            ((nan,), {"refused_in_a_row": 2, "input_finite": False, "counterfactual": better}, Damage.NONE),
            ((nan,), {"refused_in_a_row": 2, "counterfactual": same}, Damage.NONE),
            ((nan, replace(jump, severity="warn")), {"refused_in_a_row": 2}, Damage.WEIGHTS),
            ((nan, replace(jump, severity="warn")), {"refused_in_a_row": 1}, Damage.NONE),
            ((nan, replace(jump, severity="warn")), {"refused_in_a_row": 2, "counterfactual": same}, Damage.NONE),
            ((finding("non-finite", "info"),), {"refused_in_a_row": 9, "counterfactual": better}, Damage.NONE),
            ((finding("gradient-spike"),), {"refused_in_a_row": 9, "counterfactual": better}, Damage.NONE),
        ):
            assert reach(replace(CALM, **changes), found) is expected, (found, changes)


def runner(model: nn.Module) -> tuple[MicroBatchRunner, torch.optim.Optimizer]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    parameters = list(model.parameters())
    precision = Precision("fp32", device_type="cpu", autocast=True)
    device = torch.device("cpu")
    buffers = Buffers(model, restores=True)
    return MicroBatchRunner(
        optimizer, precision, buffers, lambda: parameters, size=1, device=device, retry=True
    ), optimizer


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    grads = {f"grad {n}": p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return full_state(model, optimizer) | grads | {"rng": torch.get_rng_state()}


@contextmanager
def scaled(model: nn.Module, times: float) -> Iterator[None]:
    with torch.no_grad():
        model[6].weight.mul_(times)
    yield
    with torch.no_grad():
        model[6].weight.div_(times)


class TestAskingLeavesNoTrace:
    @pytest.mark.parametrize("backward", [True, False])
    def test_of_itself(self, backward: bool) -> None:
        """The present batch with the random numbers of its neighbour would be another loss: dropout is on."""
        model = small_net(dropout=0.5)
        made, optimizer = runner(model)
        x = batches(1)[0]

        def closure() -> Tensor:
            if made.group.members:  # a loop of its own habits: it clears gradients, in place
                optimizer.zero_grad(set_to_none=False)
            return squared(model, x)

        made.add(closure, batch=None, weight=None)
        before, grads = everything(model, optimizer), [p.grad for p in model.parameters()]
        losses = made.compare([nullcontext(), scaled(model, 4.0), nullcontext()], backward=backward)
        assert losses is not None
        assert losses[0] == losses[1] == losses[3]
        assert losses[2] != losses[0]
        assert_same(before, everything(model, optimizer))
        assert all(p.grad is grad for p, grad in zip(model.parameters(), grads, strict=True))
        assert len(made.group.members) == 1

    @pytest.mark.parametrize("backward", [True, False])
    def test_of_a_closure_that_raises(self, backward: bool) -> None:
        model = small_net()
        made, optimizer = runner(model)
        calls = []

        def closure() -> Tensor:
            loss = squared(model, batches(1)[0])  # moves buffers and random numbers
            calls.append(loss)
            if len(calls) > 1:
                optimizer.zero_grad()
                random.choice([])
            return loss

        made.add(closure, batch=None, weight=None)
        before = everything(model, optimizer)
        assert made.compare([nullcontext()], backward=backward) is None
        assert len(calls) == 2
        assert_same(before, everything(model, optimizer))

    def test_a_closure_that_takes_another_batch_each_time_cannot_be_asked(self) -> None:
        model = small_net()
        made, _ = runner(model)
        data = iter(batches(9))
        made.add(lambda: squared(model, next(data)), batch=None, weight=None)
        assert made.compare([nullcontext()], backward=False) is None

    def test_a_loss_that_was_given_cannot_be_asked(self) -> None:
        model = small_net()
        made, _ = runner(model)
        made.add(squared(model, batches(1)[0]), batch=None, weight=None)
        assert made.compare([nullcontext()], backward=False) is None

    def test_a_batch_that_was_given_is_used(self) -> None:
        model = small_net(dropout=0.0)
        made, _ = runner(model)
        member = made.add(lambda x: squared(model, x), batch=batches(1)[0], weight=None)
        losses = made.compare([], backward=False)
        assert losses == [pytest.approx(float(member.loss))]

    def test_with_backward_a_bad_gradient_or_buffer_is_an_infinite_loss(self) -> None:
        model = small_net(dropout=0.0)
        x = batches(1)[0]
        for closure, loss in (
            (lambda: (model(x) * 0.0).abs().sum().sqrt(), 0.0),
            (lambda: (squared(model, x * 1e20) * 0.0).nan_to_num(), 0.0),
        ):
            made, _ = runner(model)
            made.add(closure, batch=None, weight=None)
            assert made.compare([], backward=False) == [loss]
            assert made.compare([], backward=True) == [math.inf]
            made.reset()


class Fakes:
    """Stands for snapshots and passes at once: the losses are made up, what is asked and taken is written down."""

    given_losses = False

    def __init__(self, losses: list[float] | None = None, states: tuple[Any, ...] = ()) -> None:
        self.losses, self.states = losses, states
        self.asked: list[tuple[int, bool]] = []
        self.taken: list[dict[str, Any]] = []

    def weights_of(self, state: Any) -> Any:
        return nullcontext()

    def compare(self, others: list[Any], *, backward: bool) -> list[float] | None:
        self.asked.append((len(others), backward))
        return self.losses

    def due(self, step: int) -> bool:
        return True

    def take(self, **more: Any) -> None:
        self.taken.append(more)
        self.states = (*self.states, SimpleNamespace(**more))

    def keep(self, name: str, thing: Any, update: Any = None) -> None:
        pass

    def forget(self) -> None:
        self.states = ()


def state(step: int, *, lr: float = 0.1, largest: float = 0.1) -> Any:
    return SimpleNamespace(step=step, lr=lr, largest_lr=largest)


class TestWhichWeightsAreTried:
    states = (state(40), state(60), state(80))

    def ask(self, losses: list[float] | None, **more: Any) -> tuple[Counterfactual | None, Fakes]:
        fakes = Fakes(losses, more.pop("states", self.states))
        return InMemory(fakes, fakes, {}).testify(replace(CALM, **more), fakes.states), fakes

    def test_the_newest_under_which_the_batch_is_finite_counts(self) -> None:
        """The younger ones may hold the damage already."""
        for old_loss, step in (
            ((1.0, 2.0, 3.0), 80),
            ((1.0, 2.0, math.nan), 60),
            ((1.0, math.inf, math.nan), 40),
            ((math.inf, 1.0, math.inf), 60),
            ((math.nan, math.nan, math.nan), 80),
        ):
            counterfactual, fakes = self.ask([math.inf, *old_loss])
            assert (counterfactual.step, counterfactual.current_loss, counterfactual.lr) == (step, math.inf, 0.1)
            assert fakes.asked == [(3, False)]

    def test_nobody_can_be_asked(self) -> None:
        assert self.ask(None)[0] is None
        counterfactual, fakes = self.ask([1.0], states=())
        assert counterfactual is None
        assert fakes.asked == []

    def test_after_a_refusal_the_gradient_counts_too(self) -> None:
        assert self.ask([3.0, 1.0, 1.0, 1.0], refused_in_a_row=1)[1].asked == [(3, True)]

    def test_a_pair_is_the_loss_then_and_now(self) -> None:
        for losses, pair in (([3.0, 1.0], (1.0, 3.0)), (None, None)):
            fakes = Fakes(losses)
            assert InMemory(fakes, fakes, {}).compare(state(40)) == pair
            assert fakes.asked == [(1, False)]

    def test_a_learning_rate_that_rose_by_plan_explains_a_worse_loss(self) -> None:
        low = [state(40, lr=0.05, largest=0.1)]
        for changes, kept in (
            ({"lr": 0.1}, False),  # it has been there before
            ({"lr": 0.2}, True),
            ({"lr": 0.2, "announced_lr": 0.2}, False),
            ({"lr": 0.052}, True),  # hardly more
        ):
            fakes = Fakes()
            assert InMemory(fakes, fakes, {}).comparable(replace(CALM, **changes), low) == (low if kept else [])


class TestWhenAStateIsTaken:
    def made(self) -> tuple[InMemory, Fakes]:
        fakes = Fakes()
        recovery = InMemory(fakes, fakes, {})
        recovery.begin(step=0, updates=0)
        assert [taken["step"] for taken in fakes.taken] == [-1]  # what the user came with
        return recovery, fakes

    def after(self, recovery: InMemory, step: int, **more: Any) -> None:
        plain = {"calm": True, "suspected_since": None, "updates": step + 1}
        outcome = Outcome(step=step, reading=1.0, stepped=more.pop("stepped", True), signals=CALM, lr_mult=0.5)
        recovery.after(outcome, **plain | more)
        recovery.begin(step=step + 1, updates=step + 1)

    def test_with_the_learning_rate_that_was_in_use(self) -> None:
        recovery, fakes = self.made()
        self.after(recovery, 7)
        taken = fakes.taken[-1]
        assert (taken["step"], taken["updates"]) == (7, 8)
        assert taken["lr"] == taken["largest_lr"] == pytest.approx(0.05)
        assert taken["suspected_since"] is None

    def test_what_is_set_aside_under_suspicion_was_trusted_when_it_began(self) -> None:
        recovery, fakes = self.made()  # 20 steps of trust
        self.after(recovery, 100, suspected_since=90)
        kept = fakes.taken[-1]["suspected_since"]
        assert [step for step in (69, 70, 71) if step < kept] == [69, 70]

    def test_not_in_trouble_nor_after_a_refusal(self) -> None:
        recovery, fakes = self.made()
        self.after(recovery, 7, calm=False)
        self.after(recovery, 8, stepped=False)
        assert len(fakes.taken) == 1

    def test_at_once_when_something_new_is_kept(self) -> None:
        recovery, fakes = self.made()
        recovery.keep("ema", nn.Linear(1, 1))
        recovery.begin(step=5, updates=5)
        assert [taken["step"] for taken in fakes.taken] == [-1, 4]

    def test_before_the_next_forward_pass_when_losses_are_given(self) -> None:
        recovery, fakes = self.made()
        fakes.given_losses = True
        outcome = Outcome(step=7, reading=1.0, stepped=True, signals=CALM)
        recovery.after(outcome, updates=8, calm=True, suspected_since=None)
        assert fakes.taken[-1]["step"] == 7


class Asks:
    """Warns every few steps of something that no weights can confirm, so that older ones are tried on many batches."""

    name = "slow-divergence"

    def update(self, signals: Signals) -> tuple[Finding, ...]:
        found = finding(self.name, "warn", step=signals.step, since=signals.step, baseline=0.0, limit=1e9)
        return (found,) if signals.step > 10 and signals.step % 3 == 0 else ()

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def test_a_run_that_is_asked_all_the_time_is_the_run_that_is_not() -> None:
    states, heard_from = [], []
    for asks in (True, False):
        model = small_net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        guard = steadystep.Guard(
            model,
            optimizer,
            config={"training": {"stability_monitoring": False}, "recovery": {"trust_steps": 4}},
            detectors=[Asks()] if asks else [],
        )
        torch.manual_seed(1)
        for x in batches(150):
            outcome = guard.step(lambda x=x, model=model: squared(model, x))
            heard_from += [outcome.signals.counterfactual] if outcome.signals.counterfactual else []
            assert outcome.plan.proceeds
        states.append(full_state(model, optimizer) | {"rng": torch.get_rng_state()})
    assert_same(*states)
    assert len(heard_from) >= 3
    assert all(
        counterfactual.old_loss > 0.0 and counterfactual.current_loss > 0.0 and counterfactual.batches >= 8
        for counterfactual in heard_from
    )
