"""A loss curve in a few numbers, and the size of updates over a run: each number by its definition."""

import json
import math
from collections.abc import Sequence
from itertools import pairwise
from random import Random
from statistics import median
from typing import Any

import pytest

from steadystep.diagnosis.facts import LossCurve, guessing
from steadystep.diagnosis.learning import changed_loss
from steadystep.diagnosis.measured import Layers, is_bias, update_ratios
from steadystep.diagnosis.ranking import rank
from steadystep.records import Probe
from tests.unit.diagnosis.made import curve, facts, tallies


def blocks(levels: Sequence[float], *, size: int = 4, spread: float = 0.0) -> list[float]:
    """Eighths with these medians; neighbors differ by twice the spread."""
    return [level + (spread if i % 2 else -spread) for level in levels for i in range(size)]


def read(losses: Sequence[float], first: Sequence[float] | None = None) -> LossCurve:
    found = LossCurve.read(losses[:8] if first is None else first, losses)
    assert found is not None
    return found


class TestRead:
    def test_32_points_are_needed(self) -> None:
        assert LossCurve.read([1.0] * 8, [1.0] * 31) is None
        assert LossCurve.read([1.0] * 8, [1.0] * 32) is not None

    def test_levels_are_medians_of_eighths(self) -> None:
        losses = blocks([8.0, 7.0, 6.0, 3.0, 5.0, 5.5, 4.5, 4.0])
        losses[0], losses[13], losses[30] = 90.0, 0.5, 70.0  # single points do not move a median
        found = read(losses)
        assert (found.best, found.late) == (3.0, 4.0)
        assert (found.lowest, found.highest) == (0.5, 90.0)
        rng = Random(0)
        for count in (33, 37, 50, 71):
            losses = [rng.uniform(-100.0, 100.0) for _ in range(count)]
            size = count / 8
            eighths = [losses[round(i * size) : round((i + 1) * size)] for i in range(8)]
            assert sum(map(len, eighths)) == count
            assert read(losses).best == min(median(eighth) for eighth in eighths)
            assert read(losses).late == median(eighths[-1])

    def test_the_start_is_the_first_loss_or_the_median_of_the_first_few(self) -> None:
        assert read([1.0] * 32, [3.0, 9.0, 9.0, 9.0]).start == 3.0, "it exploded at once"
        assert read([1.0] * 32, [9.0, 3.0, 4.0, 5.0]).start == 4.5, "an odd first batch"

    def test_noise_is_that_of_the_second_half(self) -> None:
        """20 points there: ten differences of 1 and nine of 2, so the median is 1; the first half is wild."""
        losses = [1000.0 * (i % 2) for i in range(20)]
        signs = [(1.0 if i < 10 else 2.0) * (1 if i % 2 else -1) for i in range(19)]
        losses += [sum(signs[:i]) for i in range(20)]
        assert median(abs(b - a) for a, b in pairwise(losses[20:])) == 1.0
        assert read(losses).noise == pytest.approx(1.0 / 0.954)
        assert read([100.0 - i for i in range(80)]).noise == pytest.approx(1.0 / 0.954), "a trend does not widen it"

    def test_settled_is_the_last_quarter_as_the_one_before(self) -> None:
        for quarters, settled in (
            ([201, 201, 200, 200], True),  # half a percent
            ([201.1, 201.1, 200, 200], False),
            ([199.1, 199.1, 200, 200], True),  # of either sign
            ([198.9, 198.9, 200, 200], False),
            ([-200.9, -200.9, -200, -200], True),
            ([-201.1, -201.1, -200, -200], False),
            ([195, 207, 207, 195], True),  # their means are compared
            ([201, 201, 202, 198], True),
            ([207, 207, 195, 195], False),
        ):
            assert read(blocks([9, 9, 9, 900, *quarters])).settled is settled, quarters

    def test_the_noisier_the_more_it_may_move(self) -> None:
        """By three standard errors of an eighth, at a noise of 1."""
        for size, by, settled in ((4, 1.45, True), (4, 1.55, False), (16, 0.72, True), (16, 0.78, False)):
            found = read(blocks([0, 0, 0, 0, by, by, 0, 0], size=size, spread=0.477))
            assert found.noise == pytest.approx(1.0, rel=0.01)
            assert found.settled is settled, (size, by)


class TestShape:
    def test_learned(self) -> None:
        for changes, learned in (
            ({"start": 100.0, "best": 99.0}, False),  # one percent
            ({"start": 100.0, "best": 98.9}, True),
            ({"start": -100.0, "best": -101.0}, False),
            ({"start": -100.0, "best": -101.1}, True),
            ({"start": 1.0, "best": -1.0, "noise": 4.0}, False),  # half the noise
            ({"start": 1.0, "best": -1.1, "noise": 4.0}, True),
            ({"start": 1.0, "best": 2.0}, False),
            ({"start": 100.0, "best": 50.0, "late": 100.0}, True),  # lost again, but it has been there
        ):
            assert curve(**changes).learned is learned, changes

    def test_near_best(self) -> None:
        for changes, near in (
            ({"start": 100.0, "best": 100.0, "late": 105.0}, True),  # a twentieth of the best
            ({"start": 100.0, "best": 100.0, "late": 105.1}, False),
            ({"start": -100.0, "best": -100.0, "late": -95.0}, True),
            ({"start": -100.0, "best": -100.0, "late": -94.9}, False),
            ({"start": 100.0, "best": 0.0, "late": 5.0}, True),  # a twentieth of what was gained
            ({"start": 100.0, "best": 0.0, "late": 5.1}, False),
            ({"start": 60.0, "best": -60.0, "late": -54.1}, True),
            ({"start": 60.0, "best": -60.0, "late": -53.9}, False),
            ({"start": 0.0, "best": 0.0, "late": 6.0, "noise": 3.0}, True),  # twice the noise
            ({"start": 0.0, "best": 0.0, "late": 6.1, "noise": 3.0}, False),
        ):
            assert curve(**changes).near_best is near, changes

    def test_rose(self) -> None:
        for changes, rose in (
            ({"start": 100.0, "late": 110.0}, False),  # a tenth
            ({"start": 100.0, "late": 110.1}, True),
            ({"start": -100.0, "late": -90.0}, False),
            ({"start": -100.0, "late": -89.9}, True),
            ({"start": 0.0, "late": 6.0, "noise": 2.0}, False),  # three times the noise
            ({"start": 0.0, "late": 6.1, "noise": 2.0}, True),
            ({"start": 100.0, "late": 10.0}, False),
        ):
            assert curve(**changes).rose is rose, changes

    def test_what_guessing_costs(self) -> None:
        for level, precision, classes in (
            (math.log(2), 0.0, 2),
            (math.log(10), 0.0, 10),
            (math.log(11), 0.0, None),  # too close together from here on
            (math.log(100), 0.0, 100),
            (math.log(1000), 0.0, 1000),
            (math.log(400), 1.5, 1000),  # the nearest of the common ones, in nats
            (math.log(250), 1.5, 100),
            (0.5, 0.5, None),
            (0.501, 0.5, 2),
            (8.0, 2.0, None),
            (7.999, 2.0, 1000),
            (1.0, math.log(3) - 1.0, 3),  # as far below as it may be
            (1.0, math.log(3) - 1.001, None),
            (1.005 * math.log(5), 0.0, 5),  # 0.6 % above is close enough
            (1.007 * math.log(5), 0.0, None),
            (1.007 * math.log(5), 0.01, 5),
            (0.999 * math.log(5), 0.0, None),
        ):
            assert guessing(level, precision=precision) == classes, (level, precision)


def probe(step: int = 1, **tensors: tuple[float, float]) -> Probe:
    """Weight and update RMS by name; two underscores stand for a dot."""
    weights, updates = zip(*tensors.values(), strict=True) if tensors else ((), ())
    return Probe(
        step=step, names=tuple(name.replace("__", ".") for name in tensors), weight_rms=weights, update_rms=updates
    )


class TestUpdateRatios:
    def test_biases_count_only_where_there_is_nothing_else(self) -> None:
        assert update_ratios(probe(a__weight=(2.0, 1.0), a__bias=(1.0, 1.0))) == [0.5]
        assert update_ratios(probe(a__bias=(1.0, 1.0), b__bias=(4.0, 1.0))) == [1.0, 0.25]
        assert update_ratios(probe()) == []

    def test_a_weight_of_zero_has_no_ratio(self) -> None:
        odd = probe(a=(0.0, 1.0), b=(1e-300, 1e300), c=(1.0, math.nan), d=(math.nan, 1.0), e=(1e-9, 1e-9))
        assert update_ratios(odd) == [1.0]

    def test_a_bias_is_known_by_its_last_name(self) -> None:
        for name in ("bias", "a.bias", "attn.in_proj_bias", "attn.bias_k"):
            assert is_bias(name), name
        for name in ("weight", "a.weight", "bias.weight"):
            assert not is_bias(name), name


class TestLayers:
    def test_the_median_tensor_and_the_largest_ever(self) -> None:
        layers = Layers()
        layers.add(probe(1, a=(1.0, 0.1), b=(1.0, 0.2), c=(1.0, 0.9)))
        layers.add(probe(2, a=(1.0, 0.3), b=(1.0, 0.4), c=(1.0, 0.5)))
        assert layers.ratios == [0.2, 0.4]
        assert layers.highest == 0.9
        assert layers.first is not None
        assert layers.last is not None
        assert (layers.first.step, layers.last.step) == (1, 2)

    def test_a_probe_of_nothing_is_kept_and_has_no_ratio(self) -> None:
        layers = Layers()
        layers.add(probe(1))
        assert layers.ratios == []
        assert layers.highest == 0.0
        assert layers.first is layers.last is not None

    def test_every_second_is_dropped_at_128_and_left_out_from_then_on(self) -> None:
        layers = Layers()
        for step in range(127):
            layers.add(probe(step, a=(1.0, float(step))))
        assert len(layers.ratios) == 127
        layers.add(probe(127, a=(1.0, 127.0)))
        assert layers.ratios == [float(step) for step in range(0, 128, 2)]
        for step in range(128, 400):
            layers.add(probe(step, a=(1.0, float(step))))
            assert layers.last is not None
            assert layers.last.step == step
        assert layers.ratios == [float(step) for step in range(0, 400, 4)]
        assert layers.highest == layers.ratios[-1] == 396.0

    def test_resume_is_invisible(self) -> None:
        def ratios(layers: Layers, steps: Sequence[int]) -> dict[str, Any]:
            for step in steps:
                layers.add(probe(step, a=(1.0, float(step % 7)), b=(1.0, 2.0)))
            return layers.state_dict()

        for count, cut in ((0, 0), (5, 0), (5, 3), (140, 127), (140, 128), (140, 129), (300, 270)):
            after = Layers()
            after.load_state_dict(json.loads(json.dumps(ratios(Layers(), range(cut)))))
            assert ratios(after, range(cut, count)) == ratios(Layers(), range(count)), (count, cut)


class TestRescaledLoss:
    """A loss that the program multiplies at one step is no divergence."""

    SMOOTH = (1.0, 1.1, 0.9, 1.2, 0.8) * 20

    def changed(self, factor: float, of_norms: float, rate: float = 1.0) -> str:
        losses = [value * (1.0 if at < 50 else factor) for at, value in enumerate(self.SMOOTH)]
        norms = [2.0 * value * (1.0 if at < 50 else of_norms) for at, value in enumerate(self.SMOOTH)]
        lrs = [1e-3 * (1.0 if at < 50 else rate) for at in range(100)]
        return changed_loss(facts(losses, norms=norms, lrs=lrs))

    def test_loss_and_gradient_by_the_same_factor(self) -> None:
        assert self.changed(24.0, 24.0) == "at step 50 loss and gradient became 24 times as large"
        assert self.changed(0.1, 0.1) == "at step 50 loss and gradient became 0.1 times as large"
        assert self.changed(24.0, 17.0)
        assert self.changed(24.0, 35.0)

    @pytest.mark.parametrize(
        ("factor", "of_norms", "rate"), [(24, 15, 1), (24, 37, 1), (2, 2, 1), (24, 24, 2), (1, 1, 1)]
    )
    def test_anything_else(self, factor: float, of_norms: float, rate: float) -> None:
        assert not self.changed(factor, of_norms, rate)

    def test_a_divergence_takes_several_steps(self) -> None:
        grows = [1.0] * 50 + [1.5**k for k in range(1, 20)] + [2000.0] * 31
        assert not changed_loss(facts(grows, norms=grows))

    def test_it_is_said_instead_of_a_rate_that_is_too_high(self) -> None:
        losses = [2.0 - 0.01 * at if at < 100 else 30.0 - 0.01 * at for at in range(256)]
        found = rank(facts(losses, norms=losses, warned=tallies("worse-than-best", "early-divergence")))
        assert [each.cause for each in found] == ["healthy"]
        assert "at step 100 loss and gradient became" in found[0].evidence
