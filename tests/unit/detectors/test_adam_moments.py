"""Where exactly Adam's second moments count as lost, poisoned or surprised."""

import math
from typing import Any

import pytest

from steadystep.detectors import LostMoments, PoisonedMoments, RmsSurprise
from steadystep.records import Probe, Signals
from tests.unit.detectors.feeding import fed, row, said


def peaks(step: int, *values: float, names: str = "abcdefgh") -> Signals:
    state = tuple(f"exp_avg_sq of {name}" for name in names[: len(values)])
    return row(step, state=state, state_peaks=values)


def lost() -> LostMoments:
    return LostMoments(beta2=0.5)


class TestLostMoments:
    @pytest.mark.parametrize(("now", "told"), [(0.125, False), (0.124, True), (0.0, True)])
    def test_half_of_what_beta2_leaves_since_the_older_look_is_the_limit(self, now: float, told: bool) -> None:
        found = fed(lost, [peaks(0, 1.0), peaks(1, 1.0), peaks(2, now)])
        assert bool(found) == told
        for finding in found:
            assert (finding.step, finding.severity, finding.since) == (2, "warn", 1)
            assert (finding.value, finding.limit, finding.where) == (0.0, 0.25, ("exp_avg_sq of a",))

    def test_the_lower_of_both_looks_counts(self) -> None:
        assert fed(lost, [peaks(0, 1.0), peaks(1, 0.5), peaks(2, 0.124)]) != []
        assert fed(lost, [peaks(0, 0.5), peaks(1, 1.0), peaks(2, 0.07)]) == []
        assert fed(lost, [peaks(0, 1.0), peaks(1, 0.1), peaks(2, 0.03)]) == []

    def test_it_takes_two_looks(self) -> None:
        assert fed(lost, [peaks(0, 1.0), peaks(1, 0.0)]) == []
        assert fed(lost, [peaks(0, 1.0), row(1), peaks(1, 0.0)]) == []

    @pytest.mark.parametrize(("gone", "told"), [(2, False), (3, True), (4, True)])
    def test_three_quarters_of_the_tensors(self, gone: int, told: bool) -> None:
        after = [0.0] * gone + [1.0] * (4 - gone)
        found = fed(lost, [peaks(0, *[1.0] * 4), peaks(1, *[1.0] * 4), peaks(2, *after)])
        assert [len(finding.where) for finding in found] == ([gone] if told else [])

    def test_a_tensor_that_is_no_longer_there_is_lost(self) -> None:
        found = fed(lost, [peaks(0, 1.0), peaks(1, 1.0), peaks(2, 1.0, names="z")])
        assert [finding.where for finding in found] == [("exp_avg_sq of a",)]

    def test_only_tensors_of_both_looks_are_judged(self) -> None:
        assert fed(lost, [peaks(0, 1.0, names="a"), peaks(1, 1.0, names="b"), peaks(2, 0.0, 0.0)]) == []

    def test_what_was_zero_or_infinite_or_another_moment_is_no_measure(self) -> None:
        assert fed(lost, [peaks(0, 0.0), peaks(1, 0.0), peaks(2, 0.0)]) == []
        assert fed(lost, [peaks(0, math.inf), peaks(1, math.inf), peaks(2, 0.0)]) == []
        first = {"state": ("exp_avg of a",)}
        stream = [row(i, state_peaks=(peak,), **first) for i, peak in enumerate((1.0, 1.0, 0.0))]
        assert fed(lost, stream) == []

    def test_after_a_warning_it_learns_anew(self) -> None:
        levels = [1.0, 1.0, 0.0, 1e-3, 1e-3, 1e-3, 0.0]
        assert said(fed(lost, [peaks(i, level) for i, level in enumerate(levels)])) == [(2, "warn"), (6, "warn")]
        levels = [1.0, 1.0, 0.01, 0.0, 0.0]
        assert said(fed(lost, [peaks(i, level) for i, level in enumerate(levels)])) == [(2, "warn")]


def probed(step: int, moments: list[float], norms: list[float] | float = 1.0, *, grad_norm: float = 1.0) -> Signals:
    names = tuple("abcdefgh"[: len(moments)])
    sizes = tuple(norms) if isinstance(norms, list) else (norms,) * len(moments)
    probe = Probe(step=step, names=names, second_moments=tuple(moments))
    return row(step, grad_norm=grad_norm, names=names, norms=sizes, probe=probe)


def usual(count: int = 4, *, start: int = 10, tensors: int = 1, **more: Any) -> list[Signals]:
    return [probed(start + 10 * i, [1.0] * tensors, **more) for i in range(count)]


class TestPoisonedMoments:
    @pytest.mark.parametrize(("moment", "told"), [(100.0, False), (101.0, True), (math.nan, False)])
    def test_a_hundred_times_the_median(self, moment: float, told: bool) -> None:
        found = fed(PoisonedMoments, [*usual(), probed(50, [moment])])
        assert bool(found) == told
        for finding in found:
            assert (finding.step, finding.severity, finding.since) == (50, "act", 40)
            assert (finding.value, finding.limit, finding.baseline) == (101.0, 100.0, 1.0)
            assert finding.where == ("a",)

    @pytest.mark.parametrize(("count", "told"), [(3, False), (4, True)])
    def test_four_probes_are_known_first(self, count: int, told: bool) -> None:
        assert bool(fed(PoisonedMoments, [*usual(count), probed(90, [1e6])])) == told

    @pytest.mark.parametrize(("start", "told"), [(2, False), (3, True)])
    def test_the_probes_of_the_first_two_steps_are_not_learned(self, start: int, told: bool) -> None:
        stream = [probed(start + i, [1.0]) for i in range(4)]
        assert bool(fed(PoisonedMoments, [*stream, probed(90, [1e6])])) == told
        assert fed(PoisonedMoments, [probed(1, [1.0]), probed(2, [1e6])]) == []

    @pytest.mark.parametrize(("moment", "told"), [(120.0, False), (121.0, True)])
    def test_thirty_times_the_last_probe(self, moment: float, told: bool) -> None:
        assert bool(fed(PoisonedMoments, [*usual(), probed(50, [4.0]), probed(60, [moment])])) == told

    @pytest.mark.parametrize(("norm", "told"), [(3.9, True), (4.0, False), (5.0, False), (math.inf, False)])
    def test_gradients_that_grew_explain_it(self, norm: float, told: bool) -> None:
        """sqrt(144) is three times as much as a gradient that grew fourfold."""
        assert bool(fed(PoisonedMoments, [*usual(), probed(50, [144.0], norm)])) == told

    @pytest.mark.parametrize(("tensors", "told"), [(4, True), (5, False)])
    def test_a_quarter_of_the_tensors(self, tensors: int, told: bool) -> None:
        found = fed(PoisonedMoments, [*usual(tensors=tensors), probed(50, [1e3] + [1.0] * (tensors - 1))])
        assert bool(found) == told
        assert all(finding.baseline == tensors for finding in found)

    def test_tensors_that_cannot_be_judged_do_not_count(self) -> None:
        """Of six, one has no gradient, one has no moment yet and one no number."""
        moments = [1.0, 1.0, 1.0, 1.0, 0.0, math.nan]
        norms = [1.0, 1.0, 1.0, 0.0, 1.0, 1.0]
        stream = [probed(10 + 10 * i, moments, norms) for i in range(4)]
        found = fed(PoisonedMoments, [*stream, probed(50, [1e3, 1.0, 1.0, 1e3, 1e3, 1e3], norms)])
        assert [(finding.where, finding.baseline) for finding in found] == [(("a",), 4.0)]

    def test_after_four_in_a_row_it_is_the_level(self) -> None:
        jumped = [probed(50 + 10 * i, [1e3]) for i in range(9)]
        found = fed(PoisonedMoments, [*usual(), *jumped])
        assert [(finding.step, finding.since) for finding in found] == [(50, 40), (60, 40), (70, 40), (80, 40)]
        stays = [*usual(), *jumped[:3], probed(85, [1.0]), *[probed(100 + i, [1e3]) for i in range(4)]]
        assert [finding.step for finding in fed(PoisonedMoments, stays)] == [50, 60, 70, 100, 101, 102, 103]
        again = [*usual(), *jumped, *[probed(200 + i, [1e6]) for i in range(5)]]
        assert [finding.step for finding in fed(PoisonedMoments, again)][4:] == [200, 201, 202, 203]

    def test_the_largest_of_several_is_told(self) -> None:
        (found,) = fed(PoisonedMoments, [*usual(tensors=3), probed(50, [200.0, 300.0, math.nan])])
        assert (found.value, found.where) == (300.0, ("a", "b"))

    def test_tensors_whose_gradient_is_unknown_or_infinite_are_not_judged(self) -> None:
        bad = probed(50, [1e6, 1e6, 1e6, 1e6, 1e3], [math.nan, math.inf, math.inf, math.inf, 1.0])
        (found,) = fed(PoisonedMoments, [*usual(tensors=5), bad])
        assert found.where == ("e",)

    def test_probes_without_moments_are_passed_over(self) -> None:
        bare = row(45, probe=Probe(step=45, names=("a",)))
        assert len(fed(PoisonedMoments, [*usual(), bare, bare, probed(50, [1e3])])) == 1

    @pytest.mark.parametrize(
        ("before", "at", "told"),
        [
            ([], 0.2, True),  # nobody has seen such a gradient before
            ([0.2], 0.2, True),  # once is no habit
            ([0.2, 0.2], 0.2, False),
            ([0.2, 0.2], 0.1, True),  # ten times the usual one is none that could have done it
            ([0.2, 0.2], 0.11, False),
            ([0.2, 0.2], 0.39, False),
            ([0.2, 0.2], 0.4, True),  # those before were half as large
            ([0.2, 0.2], 0.5, True),
            ([0.2, 0.2, *[0.01] * 6], 0.2, False),
            ([0.2, 0.2, *[0.01] * 7], 0.2, True),  # too long ago
            ([math.inf, math.nan], 0.2, True),
            ([0.2, 0.2], math.inf, True),
        ],
    )
    @pytest.mark.parametrize("where", ["between", "at the probe"])
    def test_a_run_with_such_gradients_all_the_time_is_left_alone(
        self, before: list[float], at: float, told: bool, where: str
    ) -> None:
        spikes = [0.01] * 5 + [*before, at]
        stream, step = [], 10
        for size in spikes:
            if where == "between":
                stream += [row(step, grad_norm=0.01), row(step + 1, grad_norm=size), row(step + 2, grad_norm=0.005)]
                stream += [probed(step + 4, [1.0], grad_norm=0.01)]
            else:
                stream += [probed(step + 4, [1.0], grad_norm=size)]
                stream += [row(step + i, grad_norm=0.005) for i in range(5, 9)]
            step += 10
        last = probed(step, [1e6], grad_norm=0.01)
        if where == "between":
            stream[-1] = last
        else:
            stream.append(last)
        assert bool(fed(PoisonedMoments, stream)) == told

    @pytest.mark.parametrize(
        ("large", "quiet", "told"),
        [
            (0, 0, True),
            (2, 0, True),  # two large gradients: an accident
            (3, 0, False),  # they are not over
            (3, 5, True),
            (3, 4, False),  # three of the last eight, the probe's own included
            (24, 20, True),
            (25, 20, False),  # no accident: the level of the gradients
        ],
    )
    def test_gradients_that_stay_large_have_the_moments_they_should_have(
        self, large: int, quiet: int, told: bool
    ) -> None:
        """The gradient at the probe itself is a normal one, as that of a noisy batch may be."""
        rows = [row(50 + i, grad_norm=3.4 if i < large else 1.0) for i in range(large + quiet)]
        assert bool(fed(PoisonedMoments, [*usual(), *rows, probed(200, [1e3])])) == told


def surprise(step: int, values: list[float]) -> Signals:
    return row(step, probe=Probe(step=step, names=tuple("abcdefgh"[: len(values)]), surprises=tuple(values)))


class TestRmsSurprise:
    @pytest.mark.parametrize(("base", "value", "told"), [(1.0, 6.0, False), (1.0, 6.1, True), (0.1, 2.3, False)])
    def test_six_times_the_usual_and_above_the_floor(self, base: float, value: float, told: bool) -> None:
        found = fed(RmsSurprise, [*[surprise(40 + i, [base]) for i in range(4)], surprise(50, [value])])
        assert [(f.step, f.severity, f.value, f.limit, f.where, f.since) for f in found] == (
            [(50, "info", value / base, 6.0, ("a",), 50)] if told else []
        )

    def test_the_floor_is_one_of_its_own(self) -> None:
        calm = [surprise(40 + i, [0.1]) for i in range(4)]
        assert fed(RmsSurprise, [*calm, surprise(50, [2.31])]) != []

    @pytest.mark.parametrize(("tensors", "told"), [(4, True), (5, False)])
    def test_a_quarter_of_the_tensors(self, tensors: int, told: bool) -> None:
        calm = [surprise(40 + i, [1.0] * tensors) for i in range(4)]
        assert bool(fed(RmsSurprise, [*calm, surprise(50, [9.0] + [1.0] * (tensors - 1))])) == told

    def test_the_largest_of_several_is_told_and_what_is_unknown_does_not_count(self) -> None:
        calm = [surprise(40 + i, [1.0, 1.0, 1.0, 1.0, 0.0]) for i in range(4)]
        (found,) = fed(RmsSurprise, [*calm, surprise(50, [9.0, math.nan, 12.0, 7.0, 99.0])])
        assert (found.value, found.where) == (12.0, ("a", "c", "d"))

    @pytest.mark.parametrize(("start", "told"), [(32, False), (33, True)])
    def test_the_first_steps_are_not_learned(self, start: int, told: bool) -> None:
        stream = [surprise(start + i, [1.0]) for i in range(4)]
        assert bool(fed(RmsSurprise, [*stream, surprise(50, [9.0])])) == told

    def test_what_lasts_becomes_usual(self) -> None:
        stream = [surprise(40 + i, [1.0 if i < 8 else 9.0]) for i in range(20)]
        assert [finding.step for finding in fed(RmsSurprise, stream)] == [48, 49, 50, 51]
