"""Batches under the weights of earlier states: what is measured, and that asking leaves no trace."""

import math
import random
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import steadystep
from steadystep.engine.closures import BatchClosure
from steadystep.engine.microbatches import MicroBatchRunner
from steadystep.engine.reruns import BatchReruns, Counterfactuals
from steadystep.engine.verdict import Ask
from steadystep.parallel import SingleProcess
from steadystep.precision import Precision
from steadystep.records import Finding, Signals
from steadystep.snapshots.buffers import Buffers
from steadystep.snapshots.replay_buffer import RecordedMicroBatch, RecordedUpdate
from tests.loops import assert_same, batches, full_state, small_net, squared

CPU = torch.device("cpu")
VIEW: Any = None  # none of these questions is about the gradients at hand


@dataclass
class Asked:
    """A runner, and its batch at hand under other weights; each "state" is a context that puts them in place."""

    runner: MicroBatchRunner
    optimizer: torch.optim.Optimizer
    counterfactuals: Counterfactuals

    def losses(self, others: list[Any], *, backward: bool) -> list[float] | None:
        losses: list[float] | None = self.counterfactuals.measure(Ask("losses", states=others, backward=backward), VIEW)
        return losses


def asked(model: nn.Module, recovery: Any = None) -> Asked:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    trained: Any = SimpleNamespace(parameters=list(model.parameters()))
    precision = Precision("fp32", device_type="cpu", autocast=True)
    buffers = Buffers(model, restores=True)
    runner = MicroBatchRunner(optimizer, precision, buffers, trained, size=1, device=CPU, retry=True)
    reruns = BatchReruns(precision, buffers, trained, CPU, SingleProcess())
    recovery = recovery or SimpleNamespace(weights_of=lambda state: state)
    return Asked(runner, optimizer, Counterfactuals(recovery, runner, None, reruns, None))  # type: ignore[arg-type]


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
        made = asked(model)
        x = batches(1)[0]

        def closure() -> Tensor:
            if made.runner.group.members:  # a loop of its own habits: it clears gradients, in place
                made.optimizer.zero_grad(set_to_none=False)
            return squared(model, x)

        made.runner.add(closure, batch=None, weight=None)
        before, grads = everything(model, made.optimizer), [p.grad for p in model.parameters()]
        losses = made.losses([nullcontext(), scaled(model, 4.0), nullcontext()], backward=backward)
        assert losses is not None
        assert losses[0] == losses[1] == losses[3]
        assert losses[2] != losses[0]
        assert_same(before, everything(model, made.optimizer))
        assert all(p.grad is grad for p, grad in zip(model.parameters(), grads, strict=True))
        assert len(made.runner.group.members) == 1

    @pytest.mark.parametrize("backward", [True, False])
    def test_of_a_closure_that_raises(self, backward: bool) -> None:
        model = small_net()
        made = asked(model)
        calls = []

        def closure() -> Tensor:
            loss = squared(model, batches(1)[0])  # moves buffers and random numbers
            calls.append(loss)
            if len(calls) > 1:
                made.optimizer.zero_grad()
                random.choice([])
            return loss

        made.runner.add(closure, batch=None, weight=None)
        before = everything(model, made.optimizer)
        assert made.losses([nullcontext()], backward=backward) is None
        assert len(calls) == 2
        assert_same(before, everything(model, made.optimizer))

    def test_a_closure_that_takes_another_batch_each_time_cannot_be_asked(self) -> None:
        model = small_net()
        made = asked(model)
        data = iter(batches(9))
        made.runner.add(lambda: squared(model, next(data)), batch=None, weight=None)
        assert made.losses([nullcontext()], backward=False) is None

    def test_a_loss_that_was_given_cannot_be_asked(self) -> None:
        model = small_net()
        made = asked(model)
        made.runner.add(squared(model, batches(1)[0]), batch=None, weight=None)
        assert made.losses([nullcontext()], backward=False) is None

    def test_a_batch_that_was_given_is_used(self) -> None:
        model = small_net(dropout=0.0)
        made = asked(model)
        member = made.runner.add(lambda x: squared(model, x), batch=batches(1)[0], weight=None)
        losses = made.losses([], backward=False)
        assert losses == [pytest.approx(float(member.loss))]

    def test_with_backward_a_bad_gradient_or_buffer_is_an_infinite_loss(self) -> None:
        model = small_net(dropout=0.0)
        x = batches(1)[0]
        for closure, loss in (
            (lambda: (model(x) * 0.0).abs().sum().sqrt(), 0.0),
            (lambda: (squared(model, x * 1e20) * 0.0).nan_to_num(), 0.0),
        ):
            made = asked(model)
            made.runner.add(closure, batch=None, weight=None)
            assert made.losses([], backward=False) == [loss]
            assert made.losses([], backward=True) == [math.inf]
            made.runner.reset()


class TestSeveralRanks:
    """All ranks run a closure equally often, whatever it does on one of them."""

    def losses(
        self, work: Any, *, sharded: bool, agree: bool = True, others: int = 1, size: int = 2
    ) -> tuple[Any, int, list[bool]]:
        model, calls, flags = small_net(dropout=0.0), [], []

        def all_of_them(flag: bool) -> bool:
            flags.append(flag)
            return flag and agree

        def counted() -> Tensor:
            calls.append(len(calls))
            return work(model, len(calls))

        ranks: Any = SimpleNamespace(
            size=size,
            sharded=sharded,
            all=all_of_them,
            mean_loss=lambda losses: [2.0 * loss for loss in losses],
            no_sync=nullcontext,
            together=lambda work: work,
        )
        trained: Any = SimpleNamespace(parameters=list(model.parameters()))
        precision = Precision("fp32", device_type="cpu", autocast=True)
        reruns = BatchReruns(precision, Buffers(model, restores=True), trained, CPU, ranks)
        return reruns.losses(counted, [nullcontext()] * others, backward=True), len(calls), flags

    def test_one_that_raises_is_tried_as_often_as_the_others(self) -> None:
        def raises(_: nn.Module, number: int) -> Tensor:
            if number == 1:
                raise KeyError
            return torch.tensor(3.0)

        assert self.losses(raises, sharded=True) == (None, 2, [False])
        assert self.losses(raises, sharded=False) == (None, 2, [False])  # a model may send messages of its own

        def never(_: nn.Module, number: int) -> Tensor:
            raise KeyError

        assert self.losses(never, sharded=True) == (None, 2, [False])
        assert self.losses(never, sharded=False) == (None, 2, [False])
        assert self.losses(never, sharded=False, size=1) == (None, 1, [False])

    def test_losses_are_means_over_ranks(self) -> None:
        def constant(model: nn.Module, _: int) -> Tensor:
            return squared(model, batches(1)[0]) * 0.0 + 3.0

        assert self.losses(constant, sharded=True) == ([6.0, 6.0], 3, [True, True])
        assert self.losses(constant, sharded=False) == ([6.0, 6.0], 3, [True, True])
        assert self.losses(constant, sharded=False, agree=False) == (None, 2, [True])

    def test_one_that_differs_cannot_be_told_unless_it_is_not_finite(self) -> None:
        def moves(model: nn.Module, number: int) -> Tensor:
            return squared(model, batches(1)[0]) * 0.0 + float(number)

        assert self.losses(moves, sharded=False) == (None, 2, [False])

        def infinite(_: nn.Module, number: int) -> Tensor:
            return torch.tensor(math.nan, requires_grad=True) * number

        losses, calls, flags = self.losses(infinite, sharded=True)
        assert (len(losses), calls, flags) == (2, 3, [True, True])
        assert all(math.isnan(loss) for loss in losses)

    def test_one_that_raises_under_older_weights_cannot_be_told(self) -> None:
        def later(model: nn.Module, number: int) -> Tensor:
            if number == 3:
                raise KeyError
            return squared(model, batches(1)[0]) * 0.0 + 3.0

        assert self.losses(later, sharded=False, others=2) == (None, 4, [True, False])


class TestRememberedBatches:
    """Of two remembered updates, under weights that are twice what they were."""

    def made(self, model: nn.Module, *, moved: float = 0.0) -> tuple[Asked, list[float]]:
        target = [0.0]

        def closure(x: Tensor) -> Tensor:
            return squared(model, x) + target[0]

        data = batches(2)
        then = [float(closure(x).detach()) for x in data]
        missed = tuple(
            RecordedUpdate(
                (RecordedMicroBatch(BatchClosure(closure, x, None), None),),
                Signals(step=i, loss=loss, grad_norm=1.0, lr=0.1, losses=(loss,)),
                ({},),
                None,
                i + 1,
            )
            for i, (x, loss) in enumerate(zip(data, then, strict=True))
        )
        target[0] = moved
        with torch.no_grad():
            model[6].weight.mul_(2.0)
        recovery = SimpleNamespace(missed=lambda updates: missed[updates:], weights_of=lambda _: scaled(model, 0.5))
        return asked(model, recovery), then

    def test_each_has_the_loss_then_and_now(self) -> None:
        model = small_net(dropout=0.0)
        made, then = self.made(model)
        now = [float(squared(model, x).detach()) for x in batches(2)]
        before = everything(model, made.optimizer)
        for count in (1, 2, 7):
            ask = Ask("remembered-losses", states=[SimpleNamespace(updates=0)], count=count)
            told = made.counterfactuals.measure(ask, VIEW)
            assert [pair[0] for pair in told] == pytest.approx(then[-count:])
            assert [pair[1] for pair in told] == pytest.approx(now[-count:])
        assert_same(before, everything(model, made.optimizer))

    @pytest.mark.parametrize(("moved", "updates", "repeats"), [(0.0, 0, True), (1.0, 0, False), (0.0, 2, None)])
    def test_an_objective_that_has_moved_does_not_repeat(
        self, moved: float, updates: int, repeats: bool | None
    ) -> None:
        made, _ = self.made(small_net(dropout=0.0), moved=moved)
        ask = Ask("repeats", states=[SimpleNamespace(updates=updates)])
        assert made.counterfactuals.measure(ask, VIEW) is repeats


class Asks:
    """Warns every few steps of something that no weights can confirm, so that older ones are tried on many batches."""

    name = "slow-divergence"

    def update(self, signals: Signals) -> tuple[Finding, ...]:
        found = Finding(
            detector=self.name,
            step=signals.step,
            severity="warn",
            value=3.0,
            limit=1e9,
            baseline=0.0,
            since=signals.step,
        )
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
