"""One micro-batch and its group: weights, what a closure may do, what a loss must be, whose random numbers matter."""

import math
import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch._dynamo  # every optimizer imports it: here, so that no test pays for it
from torch import nn

from steadystep.engine.closures import BatchClosure
from steadystep.engine.microbatch_group import Draws, Group, MicroBatch, OnlyTheLoss, called, checked_loss
from steadystep.errors import MisuseError

CPU = torch.device("cpu")
RECIPE: Any = BatchClosure(lambda: torch.ones(()), None, None)


def member(weight: float = 1.0, *, repeats: bool = True) -> MicroBatch:
    return MicroBatch(loss=torch.tensor(1.0), weight=weight, recipe=RECIPE if repeats else None)


class TestGroup:
    def test_it_is_full_at_its_size(self) -> None:
        group = Group(2)
        seen = []
        for _ in range(3):
            seen.append(group.full)
            group.add(member())
        assert seen == [False, False, True]
        assert group.full

    def test_it_can_be_repeated_if_every_member_can(self) -> None:
        for given, expected in (
            ((), False),
            ((True,), True),
            ((False,), False),
            ((True, True), True),
            ((True, False), False),
            ((False, True), False),
            ((True, False, True), False),
        ):
            group = Group(4)
            for repeats in given:
                group.add(member(repeats=repeats))
            assert group.repeatable is expected, given

    def test_the_next_update_starts_without_a_trace(self) -> None:
        group = Group(3)
        group.add(member(group.check_weight(5.0)))
        group.stale, group.shared_by = True, 1
        assert group.weighted
        group.clear()
        assert (group.members, group.repeatable, group.stale, group.weighted, group.shared_by) == (
            [],
            False,
            False,
            False,
            3,
        )
        assert group.largest_weight == 5.0
        assert group.check_weight(None) == 1.0

    def test_weights_are_given_for_all_or_none(self) -> None:
        for first, second in ((None, 2.0), (2.0, None)):
            group = Group(2)
            group.check_weight(first)
            with pytest.raises(MisuseError):
                group.check_weight(second)
            assert group.check_weight(first) == (1.0 if first is None else first)

    def test_a_weight_is_a_finite_number_of_at_least_zero(self) -> None:
        for weight in (-1.0, math.nan, math.inf, "3"):
            with pytest.raises(MisuseError):
                Group(2).check_weight(weight)  # type: ignore[arg-type]
        assert Group(2).check_weight(0.0) == 0.0
        assert Group(2).check_weight(torch.tensor(3)) == 3.0  # type: ignore[arg-type]

    def test_asking_for_a_weight_decides_nothing(self) -> None:
        group = Group(2)
        assert group.weight_of(7.0) == 7.0
        assert group.weight_of(None) is None
        assert (group.weighted, group.largest_weight) == (False, 0.0)

    def test_the_reference_is_the_largest_weight_of_earlier_groups_on_all_ranks(self) -> None:
        asked: list[list[float]] = []

        def mean(numbers: Any) -> list[float]:
            asked.append(list(numbers))
            return [4.0, *numbers[1:]]

        group = Group(2, mean)
        group.check_weight(0.0)
        assert asked == [[1.0]]  # a weight of nothing is no measure
        assert group.scaled(torch.tensor(1.0), 2.0).item() == 2.0 / 4.0 / 2
        group.clear()
        group.check_weight(6.0)
        group.check_weight(8.0)
        assert asked[1:] == [[6.0]]
        group.clear()
        group.check_weight(1.0)
        assert asked[2:] == [[8.0]]

    def test_the_total_and_the_largest_weight_are_means_over_ranks(self) -> None:
        group = Group(2, lambda numbers: [10.0 * number for number in numbers])
        for weight in (2.0, 3.0):
            group.add(member(group.check_weight(weight)))
        assert group.total([0, 1]) == 50.0
        assert group.largest_weight == 30.0
        assert group.total([1]) == 30.0

    def test_without_weights_nobody_is_asked(self) -> None:
        group = Group(2, lambda _: pytest.fail("no rank need be asked"))
        for _ in range(2):
            group.add(member(group.check_weight(None)))
        assert group.total([0, 1]) == 2.0
        assert group.correction([0, 1]) == 1.0
        assert group.correction([0]) == 2.0  # divided by two, and there is one
        group.shared_by = 1
        assert group.correction([0]) == 1.0

    def test_a_group_of_nothing_is_not_corrected(self) -> None:
        group = Group(2)
        group.add(member(group.check_weight(0.0)))
        assert group.correction([0]) == 1.0

    def test_a_loss_alone_goes_into_backward_as_it_is(self) -> None:
        group, loss = Group(1), torch.tensor(3.0)
        assert group.scaled(loss, group.check_weight(None)) is loss
        assert Group(4).scaled(loss, 1.0).item() == 0.75
        weighted = Group(1)
        assert weighted.scaled(loss, weighted.check_weight(5.0)) is loss

    def test_the_largest_weight_is_saved(self) -> None:
        one, other = Group(2), Group(2)
        one.check_weight(9)
        other.load_state_dict(one.state_dict())
        assert other.largest_weight == 9.0


class TestOnlyTheLoss:
    def made(self) -> tuple[nn.Module, torch.optim.Optimizer, OnlyTheLoss]:
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        trained: Any = SimpleNamespace(parameters=list(model.parameters()))
        return model, optimizer, OnlyTheLoss(optimizer, trained)

    def test_computing_it_is_fine_also_with_gradients_there(self) -> None:
        model, optimizer, only = self.made()
        for _ in range(2):
            with only:
                loss = model(torch.ones(1, 2)).sum()
            loss.backward()
        optimizer.step()

    def test_a_step_is_refused_and_the_optimizer_is_as_it_was(self) -> None:
        _, optimizer, only = self.made()
        with pytest.raises(MisuseError, match=r"optimizer\.step"), only:
            optimizer.step()
        assert "step" not in optimizer.__dict__

        def own(*_: object) -> str:
            return "stepped"

        optimizer.step = own  # type: ignore[method-assign,assignment]
        with pytest.raises(MisuseError), only:
            optimizer.step()
        assert optimizer.__dict__["step"] is own

    def test_a_gradient_that_came_went_or_changed_is_refused(self) -> None:
        def backward(model: nn.Module, _: torch.optim.Optimizer) -> None:
            model(torch.ones(1, 2)).sum().backward()

        def clears(_: nn.Module, optimizer: torch.optim.Optimizer) -> None:
            optimizer.zero_grad()

        def first(model: nn.Module, _: torch.optim.Optimizer) -> None:
            model.weight.grad = None

        def last(model: nn.Module, _: torch.optim.Optimizer) -> None:
            model.bias.grad = None

        for before, act in ((False, backward), (True, backward), (True, clears), (True, first), (True, last)):
            model, optimizer, only = self.made()
            if before:
                backward(model, optimizer)
            with pytest.raises(MisuseError, match="backward"), only:
                act(model, optimizer)

    def test_an_exception_of_the_closure_comes_first(self) -> None:
        model, _, only = self.made()

        def work() -> None:
            model(torch.ones(1, 2)).sum().backward()
            raise KeyError

        with pytest.raises(KeyError), only:
            work()


class TestCalled:
    def test_with_its_batch_or_without(self) -> None:
        assert called(lambda: "alone", None) == "alone"  # type: ignore[arg-type,return-value]
        assert called(lambda x: x + 1, 0) == 1

    def test_a_call_that_cannot_be_is_the_callers_mistake(self) -> None:
        for work, batch in ((lambda x: x, None), (lambda: 0, 3), (nn.Linear(2, 1), None)):
            with pytest.raises(MisuseError) as raised:
                called(work, batch)
            assert isinstance(raised.value.__cause__, TypeError)

    def test_a_type_error_inside_is_its_own(self) -> None:
        with pytest.raises(TypeError, match="unsupported operand"):
            called(lambda: 1 + "a", None)  # type: ignore[operator,return-value]
        with pytest.raises(MisuseError, match="the model"):
            called(nn.Linear(2, 1), 3)


def test_a_loss_is_one_real_number_with_a_graph() -> None:
    one = torch.ones(1, requires_grad=True)
    for loss in (one, one.sum(), one.reshape(1, 1), one.double()):
        assert checked_loss(loss) is loss
    for wrong in (
        1.0,
        torch.ones(2, requires_grad=True),
        torch.ones(0, requires_grad=True),
        torch.tensor(1),
        torch.tensor(1j, requires_grad=True),
        torch.tensor(1.0),
        torch.ones((), device="meta", requires_grad=True),
    ):
        with pytest.raises(MisuseError):
            checked_loss(wrong)


class TestDraws:
    """The first eight passes are looked at, then each 256th."""

    def passes(self, draws: Draws, count: int, draw: Any = lambda: None) -> list[bool]:
        seen = []
        for _ in range(count):
            seen.append(draws.before() is not None)
            draw()
            draws.after(last=True)
        return seen

    def test_a_pass_that_draws_nothing_is_looked_at_now_and_then(self) -> None:
        seen = self.passes(Draws(CPU, by_modules=False), 513)
        assert [number for number, given in enumerate(seen, 1) if given] == [*range(1, 9), 256, 512]

    def test_modules_that_draw_are_believed(self) -> None:
        assert all(self.passes(Draws(CPU, by_modules=True), 20))

    @pytest.mark.parametrize("draw", [lambda: torch.rand(1), random.random, np.random.rand])
    def test_each_source_of_numbers_matters_once_it_was_used(self, draw: Any) -> None:
        draws = Draws(CPU, by_modules=False)
        self.passes(draws, 3)
        self.passes(draws, 1, draw)
        assert all(self.passes(draws, 20))
        state = draws.before()
        assert state is not None
        expected = draw()
        state.restore()
        assert draw() == expected

    def test_torch_alone_costs_no_look_at_the_others(self) -> None:
        draws = Draws(CPU, by_modules=True)
        self.passes(draws, 8)
        state = draws.before()
        assert state is not None
        before = random.getstate(), np.random.get_state(legacy=False)["state"]["pos"]
        random.random()
        moved = random.getstate()
        state.restore()
        assert random.getstate() == moved != before[0]

    def test_later_passes_of_an_update_are_looked_at_with_the_first(self) -> None:
        draws = Draws(CPU, by_modules=False)
        self.passes(draws, 7)
        first = draws.before()
        draws.after()
        assert draws.looked_at is first
        draws.after(last=True)
        assert draws.looked_at is None
        assert draws.before() is None
        draws.after(last=True)
