"""Closures that mean the same batch when they are run again, and what becomes of one that raises."""

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from steadystep._utils.rng import RngState
from steadystep.engine.closures import BatchClosure, ClosureErrors, RepeatableClosure, TapedClosure
from steadystep.errors import MisuseError
from steadystep.policy import Budget, Limits
from steadystep.records import Outcome
from steadystep.schedule.learning_rate_cut import Ceiling

CPU = torch.device("cpu")
batch_of_the_module = 1
scale = 10


def helper(times: int = 2, *, plus: int = 5) -> int:
    return times * batch_of_the_module + plus


def recursive(n: int) -> int:
    return batch_of_the_module if n == 0 else recursive(n - 1)


def repeatable(work: Any, batch: Any = None) -> RepeatableClosure:
    return RepeatableClosure(work, batch, RngState(CPU))


class TestBinding:
    def test_a_local_name_keeps_its_value(self) -> None:
        x = 1
        made = repeatable(lambda: x)
        x = 2
        work, batch = made.bound()
        assert (work(), batch) == (1, None)

    def test_global_names_keep_theirs_also_for_functions_of_the_module(self, monkeypatch: pytest.MonkeyPatch) -> None:
        made = [
            repeatable(lambda: batch_of_the_module),
            repeatable(lambda: helper()),
            repeatable(lambda: recursive(3)),
            repeatable(lambda: sum([batch_of_the_module for _ in range(1)])),
            repeatable(helper),
        ]
        monkeypatch.setitem(globals(), "batch_of_the_module", 100)
        assert [each.bound()[0]() for each in made] == [1, 7, 1, 1, 7]
        assert helper() == 205

    def test_functions_in_cells_are_bound_too(self) -> None:
        x = 1

        def inner() -> int:
            return x + scale

        made = repeatable(lambda: inner())
        x = 50
        assert made.bound()[0]() == 11

    def test_a_name_that_is_not_there_yet_is_looked_up_when_it_runs(self) -> None:
        def work() -> int:
            return later

        made = repeatable(work)
        with pytest.raises(NameError):
            made.bound()[0]()
        later = 3
        assert work() == later

    def test_defaults_stay(self) -> None:
        def work(a: int = 3, *, b: int = 4) -> tuple[int, int]:
            return a, b

        assert repeatable(work).bound()[0]() == (3, 4)

    def test_what_is_no_function_is_kept_as_it_is(self) -> None:
        thing: Any = SimpleNamespace()
        made = repeatable(thing, 7)
        assert made.bound() == (thing, 7)

    def test_the_function_itself_is_left_alone(self) -> None:
        x = [1]

        def work() -> list[int]:
            return x

        twin, _ = repeatable(work).bound()
        assert twin is not work
        assert twin() is x


@pytest.mark.parametrize("kind", ["repeatable", "batch", "taped"])
def test_random_numbers_are_put_back_to_where_the_pass_began(kind: str) -> None:
    begun = RngState(CPU, python=True)

    def work(*_: Any) -> tuple[float, float]:
        return float(torch.rand(1)), random.random()

    recipe: Any = {"repeatable": RepeatableClosure, "batch": BatchClosure, "taped": TapedClosure}[kind](
        work, "batch", begun
    )
    expected = work()
    closure, batch = recipe.again()
    assert batch == (None if kind == "taped" else "batch")
    assert recipe.batch == "batch"
    assert recipe.closure is work
    assert closure() == expected
    assert (recipe.rng is begun) is (kind != "taped")


@pytest.mark.parametrize("kind", [BatchClosure, TapedClosure])
def test_without_a_state_they_go_on(kind: Any) -> None:
    before = torch.get_rng_state()
    kind(lambda: None, None, None).again()
    assert torch.equal(torch.get_rng_state(), before)


class Updater:
    def __init__(self, *, collecting: bool = True, members: int = 0) -> None:
        group = SimpleNamespace(members=[None] * members)
        self.runner = SimpleNamespace(failed_collecting=collecting, group=group)
        self.prepared: list[Any] = []

    def prepare(self, plan: Any) -> None:
        self.prepared.append(plan)

    def drop(self, step: int, diagnosis: Any, *, plan: Any) -> Any:
        return "dropped", step, diagnosis.cause, plan


def errors(updater: Any = None, *, rates: tuple[float, ...] = (0.1, 0.4), **more: Any) -> ClosureErrors:
    rate: Any = SimpleNamespace(options=lambda: tuple({"lr": each} for each in rates), ceiling=Ceiling())
    given: dict[str, Any] = {"limits": Limits(), "mode": "autopilot", "most": 2, "budget": Budget()} | more
    return ClosureErrors(updater=updater or Updater(), learning_rate=rate, **given)


class TestErrors:
    def test_half_of_the_largest_rate_in_use(self) -> None:
        updater = Updater()
        caught = errors(updater)
        caught.learning_rate.ceiling.limit(0.2)
        dropped: Any = caught.outcome(ValueError("bad"), step=7)
        how, step, cause, plan = dropped
        assert (how, step, cause) == ("dropped", 7, "exception-in-step")
        assert plan.actions == ("skip-step", "cut-lr")
        assert plan.lr == pytest.approx(0.1)
        assert updater.prepared == [plan]

    def test_but_no_less_than_the_floor(self) -> None:
        caught = errors(limits=Limits(lr_floor_mult=0.75))
        outcome: Any = caught.outcome(ValueError("bad"), step=7)
        assert outcome[-1].lr == pytest.approx(0.3)

    @pytest.mark.parametrize(
        "more", [{"mode": "careful"}, {"limits": Limits(rolls_back=False)}, {"rates": (0.0,)}, {"rates": ()}]
    )
    def test_only_skipped_where_no_rate_may_be_cut(self, more: dict[str, Any]) -> None:
        outcome: Any = errors(**more).outcome(ValueError("bad"), step=7)
        assert outcome[-1].actions == ("skip-step",)

    def test_a_group_that_goes_on_is_pending(self) -> None:
        outcome: Any = errors(Updater(members=1)).outcome(ValueError("bad"), step=7)
        assert isinstance(outcome, Outcome)
        assert (outcome.pending, outcome.stepped, outcome.step) == (True, False, 7)
        assert outcome.plan.reason == outcome.diagnosis.cause == "exception-in-step"

    def test_what_is_not_the_closures_is_raised(self) -> None:
        assert errors(Updater(collecting=False)).outcome(ValueError("bad"), step=7) is None
        assert errors().outcome(MisuseError("ours"), step=7) is None
        assert errors(mode="observe").outcome(ValueError("bad"), step=7) is None
        assert errors(most=0).outcome(ValueError("bad"), step=7) is None

    def test_one_too_many_is_raised_with_a_note(self) -> None:
        caught, last = errors(), ValueError("bad")
        assert caught.outcome(ValueError("bad"), step=1) is not None
        assert caught.outcome(ValueError("bad"), step=2) is not None
        assert caught.outcome(last, step=3) is None
        (note,) = last.__notes__
        assert "3" in note
        assert "max_exceptions" in note
