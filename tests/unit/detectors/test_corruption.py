"""Where exactly a change of weights is a jump, and a state is damaged."""

import math

import pytest

from steadystep.detectors import DamagedState, WeightJump
from steadystep.detectors.corruption import OddReplica
from steadystep.records import Signals
from tests.unit.detectors.feeding import fed, row, rows, said


def looks(*norms: tuple[float, ...], lrs: list[float] | float = 0.5, every: int = 20) -> list[Signals]:
    names = ("w", "b", "c")[: len(norms[0])]
    return rows(len(norms), every=every, weights=names, weight_norms=list(norms), lr=lrs)


def one(*norms: float, **more: object) -> list[Signals]:
    return looks(*[(norm,) for norm in norms], **more)  # type: ignore[arg-type]


class TestWeightJump:
    @pytest.mark.parametrize(("norm", "told"), [(15.0, False), (15.1, True), (5.0, False), (4.9, True), (0.0, True)])
    def test_half_of_the_norm(self, norm: float, told: bool) -> None:
        found = fed(WeightJump, one(10.0, 10.125, 10.0, 10.125, 10.0, norm))
        assert bool(found) == told
        for finding in found:
            assert (finding.step, finding.severity, finding.since) == (100, "warn", 80)
            assert (finding.value, finding.limit, finding.baseline) == (norm, 15.0, 10.0)
            assert finding.where == ("w",)

    @pytest.mark.parametrize(("norm", "told"), [(20.0, False), (20.1, True)])
    def test_ten_times_the_largest_change(self, norm: float, told: bool) -> None:
        assert bool(fed(WeightJump, one(10.0, 11.0, 10.5, 11.0, 10.0, norm))) == told

    @pytest.mark.parametrize(("norm", "told"), [(30.0, False), (30.1, True)])
    def test_changes_are_in_proportion_to_the_learning_rate(self, norm: float, told: bool) -> None:
        stream = one(10.0, 11.0, 10.0, 11.0, 10.0, norm, lrs=[0.5] * 5 + [1.0])
        assert bool(fed(WeightJump, stream)) == told

    def test_the_largest_rate_since_the_last_look_counts(self) -> None:
        stream = one(10.0, 11.0, 10.0, 11.0, 10.0, 25.0)
        for rate, told in ((1.0, False), (0.1, True), (math.inf, True), (math.nan, True)):
            assert bool(fed(WeightJump, [*stream[:5], row(90, lr=rate), stream[5]])) == told
        # what was in use before the last look is over
        assert fed(WeightJump, [*stream[:4], row(75, lr=2.0), *stream[4:]]) != []

    def test_without_a_rate_the_change_itself_counts(self) -> None:
        assert fed(WeightJump, one(10.0, 11.0, 10.0, 11.0, 10.0, 40.0, lrs=0.0)) != []
        assert fed(WeightJump, one(10.0, 11.0, 10.0, 11.0, 10.0, 40.0, lrs=[0.0] * 5 + [0.5])) != []

    @pytest.mark.parametrize(("looks_before", "told"), [(3, False), (4, True)])
    def test_four_looks_come_first(self, looks_before: int, told: bool) -> None:
        norms = [10.0 + 0.1 * (i % 2) for i in range(looks_before)]
        assert bool(fed(WeightJump, one(*norms, 99.0))) == told

    @pytest.mark.parametrize(("norm", "told"), [(8.5, False), (8.6, True)])
    def test_a_small_tensor_is_measured_by_the_largest_of_all(self, norm: float, told: bool) -> None:
        stream = looks(*[(100.0, 1.0 + 0.125 * (i % 2)) for i in range(5)], (100.0, norm))
        found = fed(WeightJump, stream)
        assert [finding.where for finding in found] == ([("b",)] if told else [])

    @pytest.mark.parametrize(("size", "told"), [(1.0, False), (1.01, True)])
    def test_zero_is_a_jump_unless_it_was_a_trifle(self, size: float, told: bool) -> None:
        stream = looks(*[(1000.0, size)] * 5, (1000.0, 0.0))
        assert bool(fed(WeightJump, stream)) == told

    def test_a_tensor_that_never_moved_begins_to_learn(self) -> None:
        assert fed(WeightJump, one(*[10.0] * 6, 99.0)) == []

    def test_a_tensor_is_unknown_until_its_second_look(self) -> None:
        known = looks(*[(10.0 + 0.1 * (i % 2),) for i in range(5)])
        new = [
            row(100, weights=("w", "b"), weight_norms=(10.0, 5.0)),
            row(120, weights=("w", "b"), weight_norms=(10.0, 0.0)),
        ]
        assert fed(WeightJump, [*known, *new]) == []

    @pytest.mark.parametrize(("after", "told"), [(8, False), (9, True)])
    def test_changes_of_the_last_eight_looks_count(self, after: int, told: bool) -> None:
        norms = [10.0, 30.0] + [30.0 + 0.1 * (i % 2) for i in range(1, after)]
        assert bool(fed(WeightJump, one(*norms, 90.0))) == told

    @pytest.mark.parametrize(("every", "told"), [(9, False), (10, True)])
    def test_looks_that_follow_each_other_closely_are_not_learned(self, every: int, told: bool) -> None:
        """Then the first stays the measure, and only looks ten steps apart arm it."""
        stream = one(*[10.0 + 0.1 * (i % 2) for i in range(5)], every=every)
        assert bool(fed(WeightJump, [*stream, row(5 * every, weights=("w",), weight_norms=(40.0,))])) == told

    def test_what_was_seen_at_a_step_that_is_not_finite_is_not_learned(self) -> None:
        calm = one(*[10.0 + 0.1 * (i % 2) for i in range(5)])
        bad = row(100, loss=math.nan, weights=("w",), weight_norms=(12.0,))
        found = fed(WeightJump, [*calm, bad, row(120, weights=("w",), weight_norms=(40.0,))])
        assert [(finding.since, finding.baseline) for finding in found] == [(80, 10.0)]

    @pytest.mark.parametrize("norm", [math.nan, math.inf, 1e31])
    def test_no_weights_come_to_that(self, norm: float) -> None:
        (found,) = fed(WeightJump, looks((10.0, 1.0), (norm, 1.0)))
        assert (found.step, found.severity, found.since, found.limit) == (20, "act", 0, 15.0)
        assert found.where == ("w",)
        both = fed(WeightJump, looks((10.0, 1.0, 2.0), (1.0, norm, norm)))
        assert [finding.where for finding in both] == [("b", "c")]

    def test_at_the_first_look_only_what_is_not_finite_is_broken(self) -> None:
        (found,) = fed(WeightJump, one(math.inf))
        assert (found.since, found.limit, found.baseline) == (0, math.inf, None)
        assert fed(WeightJump, one(1e31)) == []
        assert fed(WeightJump, one(1e31, 1e31, 1e31)) == []  # it always was
        assert said(fed(WeightJump, one(1e31, math.nan, 10.0, 1e31))) == [(20, "act"), (60, "act")]

    def test_broken_weights_are_not_learned(self) -> None:
        found = fed(WeightJump, one(10.0, math.inf, math.inf, 10.0, math.inf))
        assert [(finding.step, finding.baseline, finding.since) for finding in found] == [
            (20, 10.0, 0),
            (40, 10.0, 0),
            (80, 10.0, 60),
        ]


def held(
    step: int, *peaks: float, names: tuple[str, ...] = ("exp_avg of a", "kept.ema", "z"), **more: object
) -> Signals:
    return row(step, state=names[: len(peaks)], state_peaks=peaks, **more)


class TestDamagedState:
    @pytest.mark.parametrize("peak", [math.nan, math.inf, 1e31])
    def test_asked_for_twice_in_a_row_and_again_after_it_was_well(self, peak: float) -> None:
        peaks = [1.0, 1.0, peak, peak, peak, peak, 1.0, peak]
        found = fed(DamagedState, [held(10 * i, p) for i, p in enumerate(peaks)])
        assert [(f.step, f.severity, f.since) for f in found] == [(20, "act", 10), (30, "act", 10), (70, "act", 60)]
        assert found[0].limit == 1e10
        assert found[0].where == ("exp_avg of a",)
        assert repr(found[0].value) == repr(peak)

    def test_another_tensor_is_told_by_itself(self) -> None:
        bad = math.inf
        stream = [held(0, bad, 1.0), held(10, bad, 1.0), held(20, bad, bad), held(30, bad, bad)]
        assert [f.where for f in fed(DamagedState, stream)] == [
            ("exp_avg of a",),
            ("exp_avg of a",),
            ("kept.ema",),
            ("kept.ema",),
        ]

    def test_kept_objects_come_last(self) -> None:
        (found,) = fed(DamagedState, [held(0, 1.0, math.nan, 1e31)])
        assert found.where == ("z", "kept.ema")
        assert found.value == 1e31

    @pytest.mark.parametrize(("gradient", "told"), [(9.9e9, True), (1e10, False), (1e20, False), (math.inf, True)])
    def test_a_huge_moment_may_come_from_a_huge_gradient(self, gradient: float, told: bool) -> None:
        stream = [row(0, grad_norm=gradient), row(1, grad_norm=1.0), held(2, 1e31)]
        assert bool(fed(DamagedState, stream)) == told
        assert fed(DamagedState, [row(0, grad_norm=gradient), held(2, math.inf)]) != []

    def test_steps_without_a_look_change_nothing(self) -> None:
        stream = [held(0, 1.0), row(5), held(10, math.inf), row(11), held(20, math.inf), row(21), held(30, math.inf)]
        assert [(f.step, f.since) for f in fed(DamagedState, stream)] == [(10, 0), (20, 0)]


def test_weights_that_differ_between_ranks() -> None:
    assert fed(OddReplica, [row(3)]) == []
    for step, since in ((3, 0), (20, 0), (50, 30)):
        (found,) = fed(OddReplica, [row(step, odd_replicas=("a on rank 1", "b on rank 1"))])
        assert (found.step, found.severity, found.value, found.limit, found.since) == (step, "act", 2.0, 0.0, since)
        assert found.where == ("a on rank 1", "b on rank 1")
