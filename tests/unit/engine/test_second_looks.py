"""Closures that are run again: which questions are answered, within which limits, and what is left as it was."""

import math
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from steadystep.engine import parts, reruns
from steadystep.engine.parts import Parts
from steadystep.engine.reruns import BatchReruns, Counterfactuals
from steadystep.engine.verdict import Ask
from steadystep.parallel import SingleProcess
from steadystep.precision import Precision
from steadystep.records import BitFlip, Diagnosis, Signals
from steadystep.snapshots.buffers import Buffers
from tests.unit.engine.test_microbatch_runner import Made

CPU = torch.device("cpu")


class Recovery:
    lr_mult = 0.5

    def __init__(self) -> None:
        self.states, self.missed_after, self.updates = ["a", "b"], [], []

    def finite_states(self) -> list[str]:
        return ["b"]

    def missed(self, updates: int) -> list[Any]:
        self.updates.append(updates)
        return list(self.missed_after)

    def weights_of(self, state: Any) -> Any:
        return ("weights", state)


class Again:
    """Runs nothing: it gives the losses it was told."""

    def __init__(self, *losses: Any) -> None:
        self.told, self.asked = list(losses), []
        self.ranks = SingleProcess()

    def losses(self, work: Any, others: Any, *, backward: bool) -> Any:
        self.asked.append((work(), others, backward))
        return self.told.pop(0)


def recorded(number: int, *, loss: float = 2.0, losses: Any = (), batch: Any = 5) -> Any:
    recipe = SimpleNamespace(again=lambda: ((lambda b: ("batch", b)) if batch else (lambda: ("none", number)), batch))
    signals = Signals(step=number, loss=loss, grad_norm=1.0, losses=tuple(losses))
    return SimpleNamespace(micro_batches=[SimpleNamespace(recipe=recipe)], signals=signals)


STATE = SimpleNamespace(updates=7)


def answering(*losses: Any, at_hand: Any = None, missed: Any = ()) -> tuple[Counterfactuals, Again, Recovery]:
    again, recovery = Again(*losses), Recovery()
    recovery.missed_after = list(missed)
    runner: Any = SimpleNamespace(at_hand=at_hand)
    rollouts = SimpleNamespace(
        answer=lambda ask: ("rollouts", ask.what),
        gradient_factor=lambda reruns, states, since: ("factor", reruns is again, states, since),
    )
    measurer = SimpleNamespace(with_weights=lambda signals: ("weights", signals))
    found = Counterfactuals(recovery, runner, measurer, again, rollouts)  # type: ignore[arg-type]
    return found, again, recovery


class TestQuestions:
    def test_what_needs_no_run(self) -> None:
        answers, _, _ = answering()
        view: Any = SimpleNamespace(signals="signals")
        assert answers.measure(Ask("weight-norms"), view) == ("weights", "signals")
        assert answers.measure(Ask("states"), view) == (["a", "b"], 0.5)
        assert answers.measure(Ask("finite-states"), view) == (["b"], 0.5)
        assert answers.measure(Ask("scores"), view) == ("rollouts", "scores")
        assert answers.measure(Ask("pin"), view) == ("rollouts", "pin")
        assert answers.measure(Ask("gradients", states=[STATE], count=3), view) == ("factor", True, [STATE], 3)

    @pytest.mark.parametrize("backward", [False, True])
    def test_the_batch_at_hand(self, backward: bool) -> None:
        ask = Ask("losses", states=[STATE, "x"], backward=backward)
        answers, again, _ = answering([1.0, 2.0, 3.0], at_hand=(lambda b: ("ran", b), 4))
        assert answers.measure(ask, None) == [1.0, 2.0, 3.0]  # type: ignore[arg-type]
        assert again.asked == [(("ran", 4), [("weights", STATE), ("weights", "x")], backward)]
        answers, again, _ = answering([1.0], at_hand=(lambda: "plain", None))
        answers.measure(ask, None)  # type: ignore[arg-type]
        assert again.asked[0][0] == "plain"
        answers, again, _ = answering()
        assert answers.measure(ask, None) is None  # type: ignore[arg-type]

    def test_where_one_rank_has_none_nobody_runs_it(self) -> None:
        answers, again, _ = answering([1.0], at_hand=(lambda: "plain", None))
        again.ranks = SimpleNamespace(all=lambda flag: False)  # type: ignore[assignment]
        assert answers.measure(Ask("losses", states=[STATE]), None) is None  # type: ignore[arg-type]
        assert again.asked == []

    def test_remembered_batches_old_before_current(self) -> None:
        missed = [recorded(1), recorded(2, batch=None), recorded(3, batch=6)]
        answers, again, recovery = answering([0.1, 0.2], None, missed=missed)
        found = answers.measure(Ask("remembered-losses", states=[STATE], count=2), None)  # type: ignore[arg-type]
        assert found == [(0.2, 0.1)]  # one of them could not be run
        assert [asked[0] for asked in again.asked] == [("none", 2), ("batch", 6)]
        assert again.asked[0][1:] == ([("weights", STATE)], False)
        assert recovery.updates == [7]

    @pytest.mark.parametrize(
        ("then", "now", "same"),
        [(2.0, 2.0, True), (2.0, 2.0018, True), (2.0, 2.0022, False), (0.0, 0.9e-9, True), (0.0, 1.1e-9, False)],
    )
    def test_a_batch_repeats_within_a_thousandth(self, then: float, now: float, same: bool) -> None:
        ask = Ask("repeats", states=[STATE])
        for first in (recorded(1, loss=then), recorded(1, loss=9.0, losses=(then, 9.0))):
            answers, _, _ = answering([99.0, now], missed=[first, recorded(2)])
            assert answers.measure(ask, None) is same  # type: ignore[arg-type]

    def test_a_batch_that_is_not_there_or_cannot_be_run(self) -> None:
        ask = Ask("repeats", states=[STATE])
        assert answering()[0].measure(ask, None) is None  # type: ignore[arg-type]
        assert answering(None, missed=[recorded(1)])[0].measure(ask, None) is False  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("value", "expected", "same"),
    [
        (1.0, 1.0, True),
        (1.0 + 0.9e-6, 1.0, True),
        (1.0 + 1.1e-6, 1.0, False),
        (1.0 - 1.1e-6, 1.0, False),
        (-1.0, -1.0, True),
        (-1.0 - 0.9e-6, -1.0, True),
        (0.0, 0.0, True),
        (1e-9, 0.0, False),
        (math.nan, math.inf, True),
        (1.0, math.nan, False),
        (math.nan, 1.0, False),
    ],
)
def test_a_loss_is_the_same_up_to_rounding(value: float, expected: float, same: bool) -> None:
    assert reruns._same(value, expected, reruns._SAME_ON_HOST) is same
    assert (reruns._SAME_ON_HOST, reruns._SAME_ON_DEVICE) == (1e-6, 1e-4)


class TestUnderOtherWeights:
    def made(self) -> tuple[nn.Module, BatchReruns]:
        model = nn.Linear(1, 1, bias=False)
        nn.init.constant_(model.weight, 3.0)
        model.register_parameter("unused", nn.Parameter(torch.ones(1)))
        model.register_parameter("frozen", nn.Parameter(torch.ones(1), requires_grad=False))
        model.register_buffer("calls", torch.zeros(()))
        trained: Any = SimpleNamespace(parameters=list(model.parameters()))
        precision = Precision("fp32", device_type="cpu", autocast=True)
        return model, BatchReruns(precision, Buffers(model, restores=True), trained, CPU, SingleProcess())

    @contextmanager
    def weight(self, model: Any, value: float) -> Any:
        before = model.weight.detach().clone()
        model.weight.data.fill_(value)
        yield
        model.weight.data.copy_(before)

    def test_now_then_and_everything_as_it_was(self) -> None:
        model, again = self.made()
        model.weight.grad = gradient = torch.ones(1, 1)

        def work() -> Tensor:
            model.zero_grad()
            model.calls += 1
            return model(torch.rand(1, 1)).sum() * 0 + model.weight.sum()

        numbers = torch.get_rng_state()
        others = [self.weight(model, 5.0), self.weight(model, math.inf)]
        found = again.losses(work, others, backward=False)
        assert found is not None
        assert found[:2] == [3.0, 5.0]
        assert math.isnan(found[2]) or math.isinf(found[2])
        assert model.weight.grad is gradient
        assert torch.equal(torch.get_rng_state(), numbers)
        assert model.calls.item() == 0.0

    def test_what_does_not_repeat_or_raises_tells_nothing(self) -> None:
        model, again = self.made()
        drawn = iter(range(9))
        assert again.losses(lambda: model.weight.sum() + next(drawn), [], backward=False) is None

        def raising() -> Tensor:
            if model.weight.item() == 5.0:
                raise KeyError
            return model.weight.sum()

        assert again.losses(raising, [], backward=False) == [3.0]
        assert again.losses(raising, [self.weight(model, 5.0)], backward=False) is None
        nan = again.losses(lambda: model.weight.sum() * math.nan, [], backward=False)
        assert nan is not None
        assert math.isnan(nan[0])

    def test_a_gradient_or_a_buffer_that_is_not_finite_is_an_infinite_loss(self) -> None:
        model, again = self.made()

        def work() -> Tensor:
            return torch.sqrt(model.weight - 3.0).sum() + 2.0  # its slope is infinite at 3

        assert again.losses(work, [], backward=False) == [2.0]
        assert again.losses(work, [], backward=True) == [math.inf]
        assert again.losses(lambda: model.weight.sum(), [], backward=True) == [3.0]

        def spoils() -> Tensor:
            model.calls.fill_(math.nan)
            return model.weight.sum()

        assert again.losses(spoils, [], backward=True) == [math.inf]
        assert model.calls.item() == 0.0


class Shortage:
    """Memory ran out on some rank, or on none."""

    def __init__(self, seen: bool) -> None:
        self._seen, self.asked = seen, []

    def seen(self) -> bool:
        return self._seen

    def attempt(self, run: Any, batch: Any, *, unreduced: bool) -> Tensor:
        return run(batch, 1.0).detach().reshape(1)

    def split(self, batches: Any, *, step: int) -> None:
        self.asked.append((list(batches), step))


class TestInParts:
    def group(self, seen: bool | None) -> tuple[Made, Any]:
        made = Made(size=2)
        for number in (1.0, 2.0):
            made.add(lambda x: made.loss(x), batch=torch.full((1, 2), number))
        made.runner._shortage = shortage = None if seen is None else Shortage(seen)  # type: ignore[assignment]
        return made, shortage

    @pytest.mark.parametrize("seen", [None, False])
    def test_only_where_memory_ran_out(self, seen: bool | None) -> None:
        made, shortage = self.group(seen)
        before = made.grad
        assert made.runner.in_parts([0, 1], step=3) is False
        assert made.grad == before
        assert shortage is None or shortage.asked == []

    @pytest.mark.parametrize(("kept", "grad"), [([0, 1], 1.5), ([1], 1.0)])
    def test_those_that_are_kept_are_computed_again(self, kept: list[int], grad: float) -> None:
        made, shortage = self.group(True)
        before = made.grad
        losses = [member.loss.clone() for member in made.runner.group.members]
        for member in made.runner.group.members:
            member.loss = torch.zeros(())
        numbers = torch.get_rng_state()
        assert made.runner.in_parts(kept, step=3) is True
        assert made.grad == [grad, grad]
        assert before == [1.5, 1.5]
        ((batches, step),) = shortage.asked
        assert [batch[0, 0].item() for batch in batches] == [i + 1.0 for i in kept]
        assert step == 3
        members = made.runner.group.members
        assert [members[i].loss.item() for i in kept] == [losses[i].item() for i in kept]
        assert all(members[i].loss.shape == () for i in kept)
        assert torch.equal(torch.get_rng_state(), numbers)

    def test_losses_that_were_given_cannot_be_split(self) -> None:
        made, _ = self.group(True)
        made.runner.group.members.clear()
        made.runner.given_losses = True
        shortage: Any = made.runner._shortage
        assert made.runner.in_parts([], step=5) is True
        assert shortage.asked == [([None], 5)]


class TestParts:
    @pytest.mark.parametrize(("armed", "repaired"), [(False, True), (True, True), (True, False)])
    def test_what_flipped_is_said_before_a_checkpoint(
        self, monkeypatch: pytest.MonkeyPatch, armed: bool, repaired: bool
    ) -> None:
        said: list[str] = []
        asked: list[bool] = []
        monkeypatch.setattr(parts, "warn", said.append)

        def verify(*, everything: bool) -> tuple[BitFlip, ...]:
            asked.append(everything)
            return (BitFlip(tensor="w", index=3, bit=1, repaired=repaired),)

        held: Any = SimpleNamespace(checksums=SimpleNamespace(armed=armed, verify=verify))
        Parts._verify(held)
        assert asked == [True] * armed
        end = "was put back" if repaired else "could not be put back"
        assert said == [f"before a checkpoint: bit 1 of element 3 of w flipped, and {end}"] * armed

    def test_what_is_kept_is_checked_first_and_known_to_all(self) -> None:
        calls: list[Any] = []

        def called(name: str) -> Any:
            return lambda *given, **more: calls.append((name, *given, *more.values()))

        held: Any = SimpleNamespace(
            run_state=SimpleNamespace(check=called("check"), loop=SimpleNamespace(keep=called("loop"))),
            recovery=SimpleNamespace(keep=called("recovery")),
        )
        Parts.keep(held, "ema", "thing", check=True, update=len)  # type: ignore[arg-type]
        assert calls == [("check", "ema", "thing"), ("recovery", "ema", "thing", len), ("loop", "ema", "thing", True)]

    def test_a_step_that_begins_ends_what_was_open(self) -> None:
        calls: list[str] = []
        held: Any = SimpleNamespace(
            around=SimpleNamespace(abandon=lambda: calls.append("abandon")),
            probes=SimpleNamespace(drop_pass=lambda: calls.append("drop")),
            edits=SimpleNamespace(expect=lambda: calls.append("expect")),
            checksums=SimpleNamespace(drop=lambda: calls.append("drop sums")),
        )
        Parts.begin_step(held)
        assert calls == ["abandon", "drop"]
        Parts.expect_edits(held)
        assert calls[2:] == ["expect", "drop sums"]

    @pytest.mark.parametrize(
        ("at", "story", "told"), [(5, ("story",), "story"), (4, ("story",), "run"), (5, (), "run")]
    )
    def test_an_examination_counts_until_the_next_step(self, at: int, story: Any, told: str) -> None:
        history = SimpleNamespace(diagnose=lambda: ("run",), verdict=lambda: Diagnosis())
        held: Any = SimpleNamespace(progress=SimpleNamespace(examined=(at, story), attempts=5), run_history=history)
        held.diagnose = lambda: Parts.diagnose(held)
        assert Parts.diagnose(held) == (told,)
        assert Parts.verdict(held) == told
        history.verdict = lambda: None
        assert Parts.verdict(held) is None
