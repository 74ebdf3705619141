"""Gradient norms that add up, from the first step on or later: where exactly."""

import math
from itertools import pairwise

import pytest

from steadystep.detectors import GrowingGradient
from steadystep.records import Finding
from tests.unit.detectors.feeding import fed, rows, said

SIZES = (1, 1, 2, 4, 8, 16)


def ramp(*factors: float) -> list[float]:
    """32 rising norms; the means of steps 1, 2, 3-4, 5-8, 9-16 and 17-32 grow by these factors."""
    mean, norms = 1.0, [1.0]
    for size, factor in zip(SIZES[1:], factors, strict=True):
        mean *= factor
        norms += [mean * (1.0 + 0.001 * (i - (size - 1) / 2)) for i in range(size)]
    return norms


def begun(norms: list[float]) -> list[Finding]:
    return fed(GrowingGradient, rows(grad_norm=norms))


class TestTheFirstNorms:
    def test_sums_of_equal_gradients(self) -> None:
        (found,) = begun([float(t) for t in range(1, 40)])
        assert (found.step, found.severity, found.value, found.limit) == (31, "warn", 24.5, 8.0)

    @pytest.mark.parametrize(
        ("factor", "told"), [(1.51, False), (1.52, True), (1.94, True), (1.95, False), (1.0, False)]
    )
    def test_eight_to_28_times_in_all(self, factor: float, told: bool) -> None:
        assert bool(begun(ramp(*[factor] * 5))) == told

    @pytest.mark.parametrize("position", range(5))
    @pytest.mark.parametrize(
        ("factor", "others", "told"), [(1.19, 1.9, False), (1.21, 1.9, True), (2.39, 1.7, True), (2.41, 1.7, False)]
    )
    def test_each_doubling_of_the_time_counts(self, position: int, factor: float, others: float, told: bool) -> None:
        factors = [others] * 5
        factors[position] = factor
        assert bool(begun(ramp(*factors))) == told

    @pytest.mark.parametrize(("falls", "told"), [(4, True), (5, False)])
    def test_nearly_all_steps_rise(self, falls: int, told: bool) -> None:
        norms = ramp(*[1.7] * 5)
        for i in range(falls):
            at = 17 + 3 * i
            norms[at], norms[at + 1] = norms[at + 1], norms[at]
        assert bool(begun(norms)) == told

    def test_once_and_only_from_the_start(self) -> None:
        norms = [float(t) for t in range(1, 33)]
        assert len(begun([*norms, *norms])) == 1
        assert begun([1.0] * 32 + norms) == []
        assert said(begun([math.nan, *norms[:9], math.inf, *norms[9:]])) == [(33, "warn")]


# --- later in a run ---

QUIET = 240
WAVE = (-0.2, 0.0, 0.2)
LOSSES = (1.0, 1.1, 1.2)


def logs(count: int = QUIET, *, amplitude: float = 1.0) -> list[float]:
    return [amplitude * WAVE[i % 3] for i in range(count)]


def jitter(values: list[float]) -> float:
    """What the detector holds for the usual change from step to step."""
    found = 0.0
    for before, after in pairwise(values):
        found += (abs(after - before) - found) / 64.0
    return found


def later(values: list[float], *, losses: list[float] | None = None) -> list[Finding]:
    """From logarithms of norms, around 4."""
    level = losses or [LOSSES[i % 3] for i in range(len(values))]
    return fed(GrowingGradient, rows(grad_norm=[4.0 * math.exp(value) for value in values], loss=level))


class TestPiling:
    def test_eight_smooth_norms_are_told_once_with_where_they_began(self) -> None:
        found = later([*logs(), *[1.2] * 12, *logs(12), *[1.2] * 8])
        assert [(f.step, f.severity, f.since) for f in found] == [
            (QUIET + 7, "warn", QUIET - 1),
            (QUIET + 31, "warn", QUIET + 23),
        ]
        assert found[0].value == pytest.approx(4.0 * math.exp(1.2))
        assert found[0].baseline == pytest.approx(4.0)
        assert found[0].limit == pytest.approx(12.0)

    @pytest.mark.parametrize(("first", "told"), [(1.15, True), (1.25, False)])
    def test_of_a_policy_it_is_above_all_before(self, first: float, told: bool) -> None:
        """One that is nearly certain learns from its rare mistakes, with the gradients of an earlier time."""
        values = [*[first] * 40, *logs(), *[1.2] * 8]
        stream = rows(
            grad_norm=[4.0 * math.exp(value) for value in values],
            loss=[LOSSES[i % 3] for i in range(len(values))],
            metrics=[{"entropy": 0.01}] * len(values),
        )
        assert bool(fed(GrowingGradient, stream)) == told

    @pytest.mark.parametrize(
        ("stretch", "told"),
        [
            ([1.2] * 7, False),
            ([1.2] * 7 + [math.nan] + [1.2] * 7, False),
            ([1.09] * 8, False),  # less than three times the usual norm
            ([1.11] * 8, True),
            ([0.7] + [1.2] * 8, True),
            ([0.7] + [1.2] * 7, False),
            ([1.2] * 4 + [0.68] + [1.2] * 4, False),  # less than twice: the stretch is over
            ([1.38] + [1.2] * 7, True),
            ([1.40] + [1.38] * 7, False),  # it began with more than one gradient
            ([0.8] * 24 + [1.2] * 8, True),
            ([0.8] * 25 + [1.2] * 8, False),  # that is another level
            ([1.1 + 0.1 * i for i in range(8)], True),  # a steady climb is smooth
        ],
    )
    def test_what_is_a_sum(self, stretch: list[float], told: bool) -> None:
        norms = [*logs(), *stretch]
        finite = [0.0 if math.isnan(value) else value for value in norms]
        grads = [math.nan if math.isnan(v) else 4.0 * math.exp(f) for v, f in zip(norms, finite, strict=True)]
        found = fed(GrowingGradient, rows(grad_norm=grads, loss=[LOSSES[i % 3] for i in range(len(grads))]))
        assert bool(found) == told

    @pytest.mark.parametrize(("count", "told"), [(127, False), (128, True)])
    def test_128_usual_norms_come_first(self, count: int, told: bool) -> None:
        assert bool(later([*logs(count), *[1.2] * 8])) == told

    @pytest.mark.parametrize(("share", "told"), [(0.95, True), (1.05, False)])
    def test_half_as_noisy_as_single_gradients(self, share: float, told: bool) -> None:
        calm = logs()
        # alternating around a level, the mean distance from the climb is 96 / 49 of the amplitude
        size = share * 0.5 * jitter(calm) * 49 / 96
        assert bool(later([*calm, *[1.3 + size * (-1) ** (i + 1) for i in range(8)]])) == told

    @pytest.mark.parametrize("amplitude", [0.3, 0.5])
    def test_single_gradients_must_differ_to_begin_with(self, amplitude: float) -> None:
        calm = logs(amplitude=amplitude)
        noisy = jitter(calm) >= 0.1
        assert bool(later([*calm, *[1.2] * 8])) == noisy
        assert noisy == (amplitude == 0.5)

    @pytest.mark.parametrize(("raised", "told"), [(0.35, True), (0.45, False)])
    def test_it_begins_from_rest(self, raised: float, told: bool) -> None:
        """Of the sixteen norms before, nine are as high as that."""
        assert bool(later([*logs(QUIET - 9), *[raised + 0.03 * (-1) ** i for i in range(9)], *[1.2] * 8])) == told

    @pytest.mark.parametrize(("loss", "told"), [(1.24, True), (1.26, False), (0.5, True), (math.nan, False)])
    def test_the_loss_is_as_usual(self, loss: float, told: bool) -> None:
        losses = [LOSSES[i % 3] for i in range(QUIET)] + [loss] * 8
        assert bool(later([*logs(), *[1.2] * 8], losses=losses)) == told

    def test_after_32_steps_the_level_is_learned_again(self) -> None:
        """It is told for the old level, and not before 128 norms have been seen for the new one."""
        shifted = [value + 3.0 for value in logs(150)]
        assert [f.step for f in later([*logs(), *[3.0] * 33, *shifted[:127], *[4.2] * 8])] == []
        assert len(later([*logs(), *[3.0] * 33, *shifted, *[4.2] * 8])) == 1
