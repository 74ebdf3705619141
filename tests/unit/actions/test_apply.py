"""One update: clipped, taken, taken again or refused; called directly, without a training loop."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import Parameter

from steadystep.actions import ByTensors, ByUnits
from steadystep.clip import PercentileClip, TensorEMAClip
from steadystep.records import Outcome, Plan, Signals
from steadystep.snapshots.replay_buffer import RecordedMicroBatch, RecordedUpdate
from tests.unit.actions.parts import FOUND, Bench, Noted

GRADS = [[3.0, 0.0], [4.0]]


def as_lists(bench: Bench) -> list[list[float]]:
    return [grad.tolist() for grad in bench.grads()]


def flat(lists: list[list[float]]) -> list[float]:
    return [value for values in lists for value in values]


def versions(bench: Bench) -> list[int]:
    return [grad._version for grad in bench.grads()]


class Told:
    """A rule with a fixed limit that remembers what it was taught."""

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self.learned: list[float] = []

    def limit(self, norm: float) -> float:
        assert norm not in self.learned, "asked after it was taught"
        return self._limit

    def learn(self, norm: float) -> None:
        self.learned.append(norm)


class TestClip:
    @pytest.mark.parametrize(
        ("clip_norm", "learned", "limit", "norm"),
        [
            (None, None, None, 5.0),
            (1.0, None, None, 1.0),
            (10.0, None, None, 5.0),
            (None, 2.0, None, 2.0),
            (None, 7.0, None, 5.0),
            (None, None, 3.0, 3.0),
            (None, None, 8.0, 5.0),
            (None, 2.0, 3.0, 2.0),
            (None, 3.0, 2.0, 2.0),
            (1.0, 2.0, 3.0, 1.0),
            (4.0, 2.0, None, 2.0),
            (4.0, None, 2.0, 2.0),
            (4.0, 4.5, None, 4.0),
            (4.0, 6.0, 7.0, 4.0),
        ],
    )
    @pytest.mark.parametrize("again", [False, True])
    def test_the_lowest_of_all_limits_holds(
        self, clip_norm: float | None, learned: float | None, limit: float | None, norm: float, again: bool
    ) -> None:
        rule = None if learned is None else Told(learned)
        bench = Bench(clip_norm=clip_norm, clip_rule=rule)
        clipped = bench.updater.clip_(bench.view(), limit=limit, again=again)
        assert bench.norm() == pytest.approx(norm, rel=1e-5)
        assert clipped is (norm < 5.0)
        assert rule is None or rule.learned == [5.0]
        assert as_lists(bench)[1][0] / as_lists(bench)[0][0] == pytest.approx(4 / 3)

    @pytest.mark.parametrize("learned", [5.0, math.inf])
    def test_a_gradient_at_its_limit_is_not_written_to(self, learned: float) -> None:
        bench = Bench(clip_rule=Told(learned))
        view = bench.view()
        before = versions(bench)
        assert not bench.updater.clip_(view, limit=None)
        assert versions(bench) == before

    @given(st.floats(0.1, 100.0), st.floats(0.1, 100.0))
    def test_by_norm_it_has_the_bits_of_torch(self, max_norm: float, size: float) -> None:
        bench = Bench(clip_norm=max_norm)
        view = bench.view(((size, 0.3), (0.7 * size,)))
        twins = [Parameter(torch.zeros_like(weight)) for weight in bench.weights]
        for twin, grad in zip(twins, bench.grads(), strict=True):
            twin.grad = grad.clone()
        torch.nn.utils.clip_grad_norm_(twins, max_norm)
        bench.updater.clip_(view, limit=None)
        assert as_lists(bench) == [twin.grad.tolist() for twin in twins if twin.grad is not None]

    @pytest.mark.parametrize(("max_norm", "written"), [(50.0, False), (5.01, False), (5.0001, True), (4.9, True)])
    def test_it_is_written_to_only_at_the_limit_or_above(self, max_norm: float, written: bool) -> None:
        bench = Bench(clip_norm=max_norm)
        view = bench.view()
        before = versions(bench)
        bench.updater.clip_(view, limit=None)
        assert (versions(bench) != before) is written

    def test_so_near_the_limit_the_device_decides(self) -> None:
        """The norm that torch adds up may be above the limit where the one that was read is just below it."""
        bench = Bench(clip_norm=5.0 * (1 - 1e-5))
        view = bench.view(grad_norm=5.0 * (1 - 5e-5))
        bench.updater.clip_(view, limit=None)
        assert bench.norm() == pytest.approx(5.0 * (1 - 1e-5), rel=1e-6)
        assert bench.norm() < 5.0

    def test_half_precision_is_left_to_the_arithmetic_of_torch(self) -> None:
        bench = Bench(clip_norm=50.0)
        view = bench.view(dtype=torch.bfloat16)
        before = versions(bench)
        bench.updater.clip_(view, limit=None)
        assert versions(bench) != before
        assert as_lists(bench) == GRADS
        free = Bench()
        view = free.view(dtype=torch.bfloat16)
        before = versions(free)
        free.updater.clip_(view, limit=None)
        assert versions(free) == before

    def test_a_nan_does_what_torch_does_with_it(self) -> None:
        bench = Bench(clip_norm=1.0)
        assert not bench.updater.clip_(bench.view(((math.nan, 1.0), (4.0,))), limit=None)
        assert all(map(math.isnan, flat(as_lists(bench))))

    @pytest.mark.parametrize("norm", [math.nan, math.inf])
    def test_what_is_not_finite_teaches_nothing(self, norm: float) -> None:
        rule = Told(1.0)
        bench = Bench(clip_rule=rule)
        clipped = bench.updater.clip_(bench.view(grad_norm=norm), limit=None)
        assert not clipped
        assert rule.learned == []
        assert as_lists(bench) == GRADS

    def test_the_rule_learns_each_norm(self) -> None:
        rule = PercentileClip(percentile=50)
        bench = Bench(clip_rule=rule)
        for size in (1.0, 2.0, 9.0):
            bench.updater.clip_(bench.view(((size, 0.0), (0.0,))), limit=None)
        assert rule.state_dict() == {"history": [1.0, 2.0, 9.0]}
        assert bench.norm() == pytest.approx(2.0)

    @pytest.mark.parametrize("max_norm", [None, 1.0])
    def test_single_values_are_held_too(self, max_norm: float | None) -> None:
        bench = Bench(clip_value=0.7, clip_norm=max_norm)
        clipped = bench.updater.clip_(bench.view(), limit=None)
        expected = [[0.7, 0.0], [0.7]] if max_norm is None else [[0.6, 0.0], [0.7]]
        assert flat(as_lists(bench)) == pytest.approx(flat(expected))
        assert clipped is (max_norm is not None)

    def test_after_the_loops_own_clipping_the_norm_is_measured_again(self) -> None:
        """The view says 5, the gradients have come down to 1 since: a limit of 2 has nothing left to do."""
        for limit, norm in ((2.0, 1.0), (0.5, 0.5)):
            bench = Bench(clip_norm=limit)
            view = replace(bench.view(), stacked=torch.tensor([3.0, 4.0]))
            for grad in bench.grads():
                grad.div_(5.0)
            assert bench.updater.clip_(view, limit=None, again=True)
            assert bench.norm() == pytest.approx(norm, rel=1e-5)

    @pytest.mark.parametrize(("norm", "clipped"), [(math.inf, True), (math.nan, False), (2.0, False), (1.0, False)])
    def test_again_leaves_alone_what_is_within_the_limit_or_not_finite(self, norm: float, clipped: bool) -> None:
        bench = Bench(clip_norm=2.0)
        view = bench.view(grad_norm=norm)
        before = versions(bench)
        assert bench.updater.clip_(view, limit=None, again=True) is clipped
        assert versions(bench) == before

    def test_of_sharded_gradients_torch_adds_up_the_norm(self) -> None:
        """What this rank measured is not the whole norm; the parameters are clipped by what they hold together."""

        class Spread:
            parameters: tuple[Parameter, ...] = ()

        bench = Bench(clip_norm=1.0, sharded=Spread())
        view = bench.view()
        Spread.parameters = (bench.weights[0],)
        bench.updater.clip_(view, limit=None)
        assert [grad.norm().item() for grad in bench.grads()] == pytest.approx([1.0, 4.0], rel=1e-5)


def warm(*norms: float) -> TensorEMAClip:
    rule = TensorEMAClip(warmup_steps=1, warmup_max_norm=100.0)
    rule.learn(dict(zip(("a", "b"), norms, strict=True)))
    return rule


class Holding:
    """What an optimizer trains."""

    parameters: Sequence[Parameter] = ()


class TestTensorByTensor:
    @pytest.mark.parametrize(
        ("past", "grads", "after"),
        [
            ((3.0, 4.0), GRADS, GRADS),
            ((1.0, 4.0), GRADS, [[1.05, 0.0], [4.0]]),
            ((3.0, 2.0), GRADS, [[3.0, 0.0], [2.1]]),
            ((4.0, 6.0), GRADS, GRADS),  # well within its limit, it is not scaled up
            ((3.0, 4.0), [[0.0, 0.0], [4.0]], [[0.0, 0.0], [4.0]]),
            ((3.0, 1.0), [[0.0, 0.0], [4.0]], [[0.0, 0.0], [1.05]]),
        ],
    )
    def test_each_against_its_own_past(
        self, past: tuple[float, float], grads: list[list[float]], after: list[list[float]]
    ) -> None:
        bench = Bench(tensor_clip=ByTensors(warm(*past)))
        view = bench.view(grads)
        before = versions(bench)
        clipped = bench.updater.clip_(view, limit=None)
        assert flat(as_lists(bench)) == pytest.approx(flat(after))
        assert clipped is (grads != after)
        assert [now != then for now, then in zip(versions(bench), before, strict=True)] == [
            g != a for g, a in zip(grads, after, strict=True)
        ]

    def test_it_learns_after_it_was_asked(self) -> None:
        rule, alone = warm(1.0, 1.0), warm(1.0, 1.0)
        Bench(tensor_clip=ByTensors(rule)).updater.clip_(Bench().view(), limit=None)
        alone.learn({"a": 3.0, "b": 4.0})
        assert rule.state_dict() == alone.state_dict()

    @pytest.mark.parametrize("past", [(1.0, 4.0), (3.0, 4.0)])
    def test_the_global_limit_comes_after_it(self, past: tuple[float, float]) -> None:
        bench = Bench(tensor_clip=ByTensors(warm(*past)), clip_norm=2.0)
        assert bench.updater.clip_(bench.view(), limit=None) is (past[0] == 1.0)
        assert bench.norm() == pytest.approx(2.0, rel=1e-5)
        expected = 1.05 / 4.0 if past[0] == 1.0 else 3.0 / 4.0
        assert as_lists(bench)[0][0] / as_lists(bench)[1][0] == pytest.approx(expected)

    @pytest.mark.parametrize("norm", [math.nan, math.inf])
    def test_what_is_not_finite_is_left_to_the_judge(self, norm: float) -> None:
        rule = warm(1.0, 1.0)
        saved = rule.state_dict()
        bench = Bench(tensor_clip=ByTensors(rule))
        bench.updater.clip_(bench.view(grad_norm=norm), limit=None)
        assert as_lists(bench) == GRADS
        assert rule.state_dict() == saved

    def test_unit_by_unit_it_says_nothing_and_skips_what_has_no_gradient(self) -> None:
        held = Holding()
        bench = Bench(tensor_clip=ByUnits(held))
        held.parameters = bench.weights
        view = bench.view()
        bench.weights[1].grad = None
        assert not bench.updater.clip_(view, limit=None)
        assert as_lists(bench)[0] == pytest.approx([1e-5, 0.0])  # a hundredth of the least norm that counts, 1e-3


def taken(bench: Bench, plan: Plan | None = None, **more: Any) -> Outcome:
    left_out = more.pop("left_out", ())
    return bench.updater.take(plan or Plan(), bench.view(**more), FOUND, left_out=left_out)


class TestTake:
    def test_the_whole_of_it(self) -> None:
        bench = Bench(clip_norm=1.0)
        view, plan = bench.view(), Plan(actions=("rescale",), norm=0.5)
        outcome = bench.updater.take(plan, view, FOUND, left_out=(1,))
        expected = Outcome.of(plan, view.signals, FOUND, stepped=True, left_out=(1,), clipped=True, lr_mult=1.0)
        assert outcome == expected
        assert bench.weights[0].tolist() == pytest.approx([-0.5 * 0.3, 0.0])
        assert bench.grads() == []
        assert view.grads == []
        assert bench.said.calls == [("step",), ("close",)]

    @pytest.mark.parametrize(
        ("scaled", "norm", "stepped"),
        [(False, 5.0, True), (False, math.inf, True), (True, 5.0, True), (True, math.inf, False)],
    )
    def test_an_overflow_is_skipped_by_the_scaler_itself(self, scaled: bool, norm: float, stepped: bool) -> None:
        assert taken(Bench(), scaled=scaled, grad_norm=norm).stepped is stepped

    @pytest.mark.parametrize("mult", [0.5, 0.25])
    def test_under_a_ceiling_the_rate_is_lower_for_this_update_only(self, mult: float) -> None:
        bench = Bench()
        bench.learning_rate.ceiling.limit(0.5 * mult, hold=1)
        outcomes = [taken(bench) for _ in range(2)]
        assert [outcome.lr_mult for outcome in outcomes] == [mult, mult]
        assert bench.optimizer.lrs == (0.5 * mult, 0.5 * mult)
        assert bench.optimizer.param_groups[0]["lr"] == 0.5
        assert bench.learning_rate.ceiling.lr == pytest.approx(0.5 * mult * 1.02)  # lifted after its hold of one update

    def test_the_rate_comes_back_when_the_step_raises(self) -> None:
        bench = Bench()
        bench.learning_rate.ceiling.limit(0.25)
        bench.optimizer.step = lambda closure=None: 1 / 0
        with pytest.raises(ZeroDivisionError):
            taken(bench)
        assert bench.optimizer.param_groups[0]["lr"] == 0.5

    def test_an_update_is_probed_where_that_is_due(self) -> None:
        for due, on in (({0, 2, 8}, {0, 2, 8}.__contains__), (set(), lambda step: False)):
            bench = Bench()
            bench.probes.on = on
            for step in range(10):
                taken(bench, step=step)
            assert {call[1] for call in bench.said.of("after")} == due
            assert len(bench.said.of("before")) == len(due)
        bench = Bench()
        bench.probes.on = lambda step: True
        taken(bench, step=0)
        assert bench.said.calls == [("before",), ("step",), ("after", 0), ("close",)]

    def test_after_the_first_steps_only_multiples_are_asked_for(self) -> None:
        bench, asked = Bench(), []
        bench.probes.on = lambda step: bool(asked.append(step))
        for step in range(13):
            taken(bench, step=step)
        assert asked == [0, 1, 2, 3, 4, 8, 12]

    def test_without_any_gradient_the_optimizer_steps_all_the_same(self) -> None:
        bench = Bench()
        view = bench.view()
        view.grads.clear()
        bench.updater.take(Plan(), view, FOUND)
        assert bench.optimizer.steps == 1
        assert bench.said.calls == [("refuse", False), ("close",)]


def done(*touches: Any, norm: float | None = None, lr: float = 0.1) -> RecordedUpdate:
    micro_batches = tuple(RecordedMicroBatch(None, None, touch) for touch in touches)  # type: ignore[arg-type]
    signals = Signals(step=3, loss=1.0, grad_norm=5.0)
    return RecordedUpdate(micro_batches, signals, ({"lr": lr},), norm)


class TestTakeAgain:
    @pytest.mark.parametrize(("norm", "size"), [(None, 5.0), (2.0, 2.0), (9.0, 5.0)])
    def test_as_it_was_taken_then(self, norm: float | None, size: float) -> None:
        bench = Bench()
        view = bench.view()
        bench.updater.take_again(view, done(None, norm=norm))
        assert torch.cat(list(bench.weights)).norm().item() == pytest.approx(0.1 * size)
        assert bench.optimizer.lrs == (0.1,)
        assert bench.optimizer.param_groups[0]["lr"] == 0.5
        assert bench.grads() == view.grads == []
        assert bench.said.calls == [("step",), ("close",)]

    def test_what_the_loop_did_to_the_gradients_is_done_again_first(self) -> None:
        """Its own clipping, after the last pass: to 1, so that a limit of 2 finds nothing left to do."""
        for limit, size in ((2.0, 1.0), (0.5, 0.5)):
            bench = Bench(clip_norm=limit)
            view = bench.view()

            def touch(bench: Bench = bench) -> None:
                for grad in bench.grads():
                    grad.div_(5.0)

            bench.updater.take_again(view, done(None, touch))
            assert torch.cat(list(bench.weights)).norm().item() == pytest.approx(0.1 * size, rel=1e-5)

    def test_only_the_last_pass_is_followed_by_it(self) -> None:
        def never() -> None:
            raise AssertionError("this touch belongs to an earlier pass")

        bench = Bench()
        bench.updater.take_again(bench.view(), done(never, None))
        assert bench.optimizer.steps == 1

    def test_within_the_limit_it_has_the_bits_of_the_first_time(self) -> None:
        """Without a touch, what was measured holds: nothing is measured again and nothing near the limit is scaled."""
        bench = Bench(clip_norm=4.0)
        view = replace(bench.view(), norms=[torch.tensor(6.0), torch.tensor(8.0)])
        bench.updater.take_again(view, done(None))
        assert torch.cat(list(bench.weights)).norm().item() == pytest.approx(0.1 * 5.0 * 4.0 / 10.0, rel=1e-5)


class TestRefuse:
    @pytest.mark.parametrize("overflow", [True, False])
    def test_no_gradient_is_left(self, overflow: bool) -> None:
        bench = Bench()
        view, plan = bench.view(), Plan(actions=("skip-step",))
        outcome = bench.updater.refuse(plan, view, FOUND, overflow=overflow)
        assert outcome == Outcome.of(plan, view.signals, FOUND, stepped=False)
        assert bench.grads() == []
        assert bench.optimizer.steps == 0
        assert bench.said.calls == [("refuse", overflow), ("put_back",), ("close",)]

    def test_a_step_of_somebody_else_keeps_the_buffers(self) -> None:
        for stepped, calls in ((True, [("close",)]), (False, [("put_back",), ("close",)])):
            bench = Bench()
            view = bench.view()
            outcome = bench.updater.report(Plan(), view, FOUND, stepped=stepped)
            assert outcome == Outcome.of(Plan(), view.signals, FOUND, stepped=stepped)
            assert bench.said.calls == calls
            assert as_lists(bench) == GRADS

    @pytest.mark.parametrize("plan", [None, Plan(actions=("leave-out", "stop"), to=3)])
    def test_a_group_whose_gradients_cannot_be_had(self, plan: Plan | None) -> None:
        bench = Bench()
        bench.view()
        outcome = bench.updater.drop(9, FOUND, plan=plan)
        expected = Plan(actions=("skip-step",)) if plan is None else plan
        assert (outcome.step, outcome.stepped, outcome.diagnosis) == (9, False, FOUND)
        assert outcome.plan == replace(expected, reason="bad-batch")
        assert math.isnan(outcome.loss)
        assert bench.grads() == []
        assert bench.said.calls == [("refuse", False), ("put_back",), ("close",)]


class TestPrepare:
    def test_a_ceiling(self) -> None:
        bench = Bench()
        bench.updater.prepare(Plan(actions=("cut-lr",), lr=0.2, hold=0))
        assert bench.learning_rate.ceiling.lr == 0.2
        taken(bench)
        assert bench.learning_rate.ceiling.lr == pytest.approx(0.2 * 1.02)  # a hold of none is lifted at once
        free = Bench()
        free.updater.prepare(Plan())
        assert free.learning_rate.ceiling.lr is None

    @pytest.mark.parametrize(
        ("plan", "calls"),
        [
            (Plan(), [("restore_kept", ())]),
            (Plan(actions=("restore-moments",), to=40), [("restore_moments", 40), ("restore_kept", ())]),
            (Plan(actions=("restore-moments",)), [("restore_kept", ())]),
            (Plan(actions=("rollback",), to=40), [("restore_kept", ())]),
            (Plan(actions=("restore-kept",), kept=("kept.ema",)), [("restore_kept", ("kept.ema",))]),
        ],
    )
    def test_what_is_put_back(self, plan: Plan, calls: list[tuple[Any, ...]]) -> None:
        bench = Bench()
        bench.updater.prepare(plan)
        assert bench.said.calls == calls

    def test_weights_of_a_healthy_rank(self) -> None:
        """All states in memory may be of the odd weights, so they go."""
        copied: list[tuple[Any, ...]] = []
        bench = Bench(copy_from=lambda *what: copied.append(what))
        bench.updater.prepare(Plan())
        assert copied == bench.said.of("forget") == []
        for rank in (2, 0):
            bench.updater.prepare(Plan(actions=("copy-replica", "skip-step"), rank=rank))
        assert copied == [(2, bench.optimizer), (0, bench.optimizer)]
        assert bench.said.of("forget") == [("forget",), ("forget",)]

    def test_where_nobody_can_send_them_nothing_is_forgotten(self) -> None:
        bench = Bench()
        bench.updater.prepare(Plan(actions=("copy-replica", "skip-step"), rank=2))
        assert bench.said.of("forget") == []

    def test_a_coefficient_is_raised_where_there_are_any(self) -> None:
        bench = Bench()
        bench.updater.prepare(Plan(actions=("raise-coefficient",), raises="kl_coef"))  # nobody has registered one
        bench.updater.controls = Noted(bench.said)  # type: ignore[assignment]
        bench.updater.prepare(Plan())
        assert bench.said.of("raise_") == []
        bench.updater.prepare(Plan(actions=("raise-coefficient",), raises="kl_coef"))
        assert bench.said.of("raise_") == [("raise_", "kl_coef")]
