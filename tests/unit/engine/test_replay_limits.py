"""When a replayed update counts as the one that was, and what becomes of a plan."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from steadystep.engine.replay import Replayer, _as_of, _identical, _Usual
from steadystep.engine.reruns import _same as same_loss
from steadystep.engine.rollback import as_carried_out
from steadystep.records import Action, Plan, Probe, Signals


def signals(step: int = 5, **fields: Any) -> Signals:
    plain: dict[str, Any] = {"loss": 1.0, "losses": (1.0,), "grad_norm": 1.0, "norms": (1.0,), "lr": 0.1}
    return Signals(step=step, **plain | fields)


def done(step: int = 5, **fields: Any) -> Any:
    return SimpleNamespace(signals=signals(step, **fields))


def replayer(device: str = "cpu") -> Replayer:
    none: Any = None
    return Replayer(runner=none, updater=none, recovery=none, detectors=(), device=torch.device(device))


class TestTheSame:
    @pytest.mark.parametrize(
        ("device", "loss", "norm", "same"),
        [
            ("cpu", 1.000009, 1.0, True),
            ("cpu", 1.00002, 1.0, False),
            ("cpu", 1.0, 1.0009, True),
            ("cpu", 1.0, 1.002, False),
            ("meta", 1.00009, 1.0, True),
            ("meta", 1.0002, 1.0, False),
            ("meta", 1.0, 1.009, True),
            ("meta", 1.0, 1.02, False),
        ],
    )
    def test_up_to_rounding(self, device: str, loss: float, norm: float, same: bool) -> None:
        assert replayer(device)._same(signals(loss=loss, grad_norm=norm), signals()) == same

    @pytest.mark.parametrize(
        ("now", "then", "identical"),
        [
            ({}, {}, True),
            ({"loss": 2.0}, {}, True),  # the mean of the losses follows from them
            ({"losses": (1.1,)}, {}, False),
            ({"grad_norm": 1.1}, {}, False),
            ({"norms": (1.1,)}, {}, False),
            ({"buffers": ("mean",), "buffer_peaks": (1.0,)}, {}, True),  # seen by one look only
            ({"buffers": ("mean",), "buffer_peaks": (1.0,)}, {"buffers": ("mean",), "buffer_peaks": (1.0,)}, True),
            ({"buffers": ("mean",), "buffer_peaks": (1.0,)}, {"buffers": ("mean",), "buffer_peaks": (2.0,)}, False),
            ({"weight_norms": (1.0,)}, {}, True),  # seen by one look only
            ({}, {"weight_norms": (1.0,)}, True),
            ({"weight_norms": (1.0,)}, {"weight_norms": (1.0,)}, True),
            ({"weight_norms": (1.0,)}, {"weight_norms": (2.0,)}, False),
        ],
    )
    def test_bit_for_bit(self, now: dict[str, Any], then: dict[str, Any], identical: bool) -> None:
        assert _identical(signals(**now), signals(**then)) == identical

    @pytest.mark.parametrize(
        ("value", "expected", "same"),
        [
            (2.0, 2.0, True),
            (2.25, 2.0, True),
            (1.75, 2.0, True),
            (2.26, 2.0, False),
            (-2.25, -2.0, True),
            (0.0, 0.0, True),
            (math.inf, math.nan, True),
            (1.0, math.nan, False),
            (math.nan, 1.0, False),
            (math.inf, 1.0, False),
        ],
    )
    def test_a_loss_that_was_run_again(self, value: float, expected: float, same: bool) -> None:
        assert same_loss(value, expected, 0.125) == same


class TestMayGoOn:
    @pytest.mark.parametrize(
        ("step", "made", "healed", "outside", "goes_on"),
        [
            (9, 0, False, False, True),  # before the first sign, which is at step 10
            (10, 5, False, False, False),
            (10, 0, False, True, True),
            (50, 3, True, False, True),
            (50, 2, True, False, False),  # the first three have to repeat
            (50, 2, True, True, False),
        ],
    )
    def test_where(self, step: int, made: int, healed: bool, outside: bool, goes_on: bool) -> None:
        before: Any = [done()] * made
        assert Replayer._may_go_on(before, done(step), 10, healed=healed, outside=outside) == goes_on


class TestNoWorseThanUsual:
    """Before the first sign, at step 10, losses were up to 2 and norms up to 4."""

    usual = _Usual(
        [done(8, loss=2.0, grad_norm=3.0), done(9, loss=1.0, grad_norm=4.0), done(10, loss=9.0, grad_norm=99.0)], 10
    )

    @pytest.mark.parametrize(
        ("loss", "norm", "covered"), [(2.0, 8.0, True), (2.1, 1.0, False), (1.0, 8.1, False), (-5.0, 0.0, True)]
    )
    def test_of_a_step_like_the_others(self, loss: float, norm: float, covered: bool) -> None:
        now: Any = SimpleNamespace(signals=signals(loss=loss, grad_norm=norm))
        assert self.usual.covers(now, done(12, loss=1.5, grad_norm=1.0)) == covered

    @pytest.mark.parametrize(
        ("loss", "norm", "covered"), [(102.0, 20.0, True), (102.1, 1.0, False), (1.0, 20.1, False)]
    )
    def test_of_a_step_that_was_worse_itself(self, loss: float, norm: float, covered: bool) -> None:
        now: Any = SimpleNamespace(signals=signals(loss=loss, grad_norm=norm))
        assert self.usual.covers(now, done(12, loss=100.0, grad_norm=10.0)) == covered

    @pytest.mark.parametrize(("loss", "norm", "covered"), [(4.0, 16.0, True), (4.1, 1.0, False), (1.0, 16.1, False)])
    def test_of_a_step_that_was_not_finite(self, loss: float, norm: float, covered: bool) -> None:
        now: Any = SimpleNamespace(signals=signals(loss=loss, grad_norm=norm))
        assert self.usual.covers(now, done(12, loss=math.nan)) == covered

    def test_without_one_before_the_sign_the_first_counts(self) -> None:
        usual = _Usual([done(10, loss=-2.0, grad_norm=3.0), done(11, loss=9.0, grad_norm=9.0)], 10)
        for loss, covered in ((0.0, True), (0.1, False)):
            now: Any = SimpleNamespace(signals=signals(loss=loss, grad_norm=12.0))
            assert usual.covers(now, done(12, loss=math.nan)) == covered


def test_what_was_measured_this_time_at_the_step_of_then() -> None:
    probe = Probe(step=3)
    then = signals(3, loss=5.0, lr=0.5, metrics={"kl": 1.0}, probe=probe)
    seen = _as_of(then, signals(90, loss=2.0, lr=0.01))
    assert (seen.step, seen.loss, seen.lr, seen.metrics, seen.probe, seen.inputs) == (
        3,
        2.0,
        0.5,
        {"kl": 1.0},
        probe,
        None,
    )


PLAN = Plan(
    actions=(Action.ROLLBACK, Action.REPLAY, Action.CUT_LR, Action.REWARM), to=3, until=9, lr=0.5, hold=7, reason="x"
)


@pytest.mark.parametrize(
    ("whole", "some", "innocent", "actions", "until", "lr", "hold"),
    [
        (True, True, False, {"rollback", "replay"}, 9, None, None),
        (False, True, False, {"rollback", "replay", "cut-lr", "rewarm"}, 9, 0.5, 7),
        (False, False, False, {"rollback", "cut-lr", "rewarm"}, None, 0.5, 7),
        (False, True, True, {"rollback", "replay"}, 9, None, 7),
        (False, False, True, {"rollback"}, None, None, 7),
    ],
)
def test_what_becomes_of_a_plan(
    whole: bool, some: bool, innocent: bool, actions: set[str], until: int | None, lr: float | None, hold: int | None
) -> None:
    plan = as_carried_out(PLAN, whole=whole, some=some, innocent=innocent)
    assert {str(action) for action in plan.actions} == actions
    assert (plan.to, plan.until, plan.lr, plan.hold, plan.reason) == (3, until, lr, hold, "x")
