"""A step that the loop takes itself: what the guard does before it and after it."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from steadystep.actions import Around
from steadystep.engine.closures import ByHand, by_hand
from steadystep.errors import MisuseError
from steadystep.records import Outcome, Plan
from tests.unit.actions.parts import FOUND, Bench


def around(bench: Bench) -> Around:
    return Around(bench.optimizer, bench.updater, bench.learning_rate, bench.probes)


def test_everything_up_to_the_step() -> None:
    bench = Bench()
    bench.probes.on = lambda step: step == 7
    view = bench.view()
    plan = Plan(actions=("rescale", "hold-lr"), norm=2.0, lr=0.25)
    outcome = around(bench).before(plan, view, FOUND, shrunk=False)
    assert outcome == Outcome.of(plan, view.signals, FOUND, stepped=True, clipped=True, lr_mult=0.5)
    assert bench.norm() == pytest.approx(2.0)
    assert bench.optimizer.param_groups[0]["lr"] == 0.25
    assert bench.said.calls == [("restore_kept", ()), ("before",)]
    assert bench.optimizer.steps == 0
    bench.said.calls.clear()
    around(bench).after(outcome)
    assert bench.optimizer.param_groups[0]["lr"] == 0.5
    assert bench.said.calls == [("after", 7), ("close",)]


def test_nothing_to_do() -> None:
    bench = Bench()
    view = bench.view()
    outcome = around(bench).before(Plan(), view, FOUND, shrunk=False)
    assert outcome == Outcome.of(Plan(), view.signals, FOUND, stepped=True)
    around(bench).after(outcome)
    assert bench.norm() == pytest.approx(5.0)
    assert bench.said.calls == [("restore_kept", ()), ("close",)]


@pytest.mark.parametrize("action", ["skip-step", "leave-out", "back-off-scale"])
def test_a_refused_step_finds_no_gradient(action: str) -> None:
    bench = Bench()
    bench.probes.on = lambda step: True
    bench.learning_rate.ceiling.limit(0.25)
    view, plan = bench.view(), Plan(actions=(action,))  # type: ignore[arg-type]
    outcome = around(bench).before(plan, view, FOUND, shrunk=False)
    assert outcome == Outcome.of(plan, view.signals, FOUND, stepped=False)
    assert bench.grads() == view.grads == []
    assert bench.optimizer.param_groups[0]["lr"] == 0.5
    assert bench.said.calls == [("restore_kept", ()), ("put_back",), ("close",)]
    bench.said.calls.clear()
    before = bench.learning_rate.ceiling.state_dict()
    around(bench).after(outcome)
    assert bench.said.calls == []
    assert bench.learning_rate.ceiling.state_dict() == before


@pytest.mark.parametrize(("limit", "norm"), [(2.0, 1.0), (0.5, 0.5)])
def test_after_the_loops_own_clipping_the_norm_is_measured_again(limit: float, norm: float) -> None:
    bench = Bench(clip_norm=limit)
    view = bench.view()
    for grad in bench.grads():
        grad.div_(5.0)
    assert around(bench).before(Plan(), view, FOUND, shrunk=True).clipped
    assert bench.norm() == pytest.approx(norm, rel=1e-5)


def test_each_update_under_a_ceiling_counts() -> None:
    bench = Bench()
    bench.learning_rate.ceiling.limit(0.25, hold=0)
    outcome = around(bench).before(Plan(), bench.view(), FOUND, shrunk=False)
    around(bench).after(outcome)
    assert bench.learning_rate.ceiling.lr == pytest.approx(0.25 * 1.02)
    assert bench.learning_rate.ceiling.asked == 0.5


def test_what_was_never_judged_is_over_with_the_rate_put_back() -> None:
    bench = Bench()
    bench.learning_rate.ceiling.limit(0.25, hold=0)
    outcome = around(bench).before(Plan(), bench.view(), FOUND, shrunk=False)
    bench.said.calls.clear()
    around(bench).after(replace(outcome, signals=None))
    assert bench.optimizer.param_groups[0]["lr"] == 0.5
    assert bench.said.calls == []
    assert bench.learning_rate.ceiling.lr == 0.25


def test_a_step_that_raised_leaves_the_rate_of_the_user() -> None:
    bench = Bench()
    bench.learning_rate.ceiling.limit(0.25)
    around(bench).before(Plan(), bench.view(), FOUND, shrunk=False)
    around(bench).abandon()
    assert bench.optimizer.param_groups[0]["lr"] == 0.5


def test_gradients_of_all_groups_are_dropped() -> None:
    bench = Bench()
    extra = nn.Parameter(torch.zeros(1))
    bench.optimizer.add_param_group({"params": [extra]})
    bench.view()
    extra.grad = torch.ones(1)
    around(bench).drop()
    assert bench.grads() == []
    assert extra.grad is None


class TestByHand:
    def test_it_holds_what_takes_a_gradient_and_never_steps(self) -> None:
        model = nn.Linear(2, 1)
        model.bias.requires_grad_(False)
        optimizer = by_hand(model, None, None, None)
        assert isinstance(optimizer, ByHand)
        (group,) = optimizer.param_groups
        assert len(group["params"]) == 1
        assert group["params"][0] is model.weight
        assert "lr" not in group  # 0 would be a rate, and a fault
        with pytest.raises(MisuseError):
            optimizer.step()

    def test_nothing_to_train_is_a_mistake(self) -> None:
        model = nn.Linear(2, 1).requires_grad_(False)
        with pytest.raises(MisuseError):
            ByHand(model)

    @pytest.mark.parametrize("place", [0, 1, 2])
    def test_a_rate_or_a_schedule_has_nobody_to_use_it(self, place: int) -> None:
        given: list[object] = [None, None, None]
        given[place] = object()
        with pytest.raises(MisuseError):
            by_hand(nn.Linear(2, 1), *given)
