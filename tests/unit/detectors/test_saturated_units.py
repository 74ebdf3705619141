"""Units that are saturated: where exactly, and only where nothing is learned any more."""

import itertools
import math

import pytest

from steadystep.detectors import SaturatedUnits
from steadystep.records import Finding, Probe, Signals
from tests.unit.detectors.feeding import fed, row, said


def saturated(*shares: float, start: int = 5, losses: list[float] | None = None, first: float = 2.0) -> list[Finding]:
    level = losses or [2.0] * len(shares)
    stream = [
        row(start + i, loss=level[i], probe=Probe(step=start + i, modules=("a", "b"), saturated=(share, 0.1)))
        for i, share in enumerate(shares)
    ]
    return fed(SaturatedUnits, [row(0, loss=math.nan), row(1, loss=first), *stream])


class TestSaturatedUnits:
    def test_three_probes_in_a_row_once(self) -> None:
        found = saturated(*[0.9] * 8)
        assert [(f.step, f.severity, f.value, f.limit, f.where) for f in found] == [(7, "warn", 0.9, 0.7, ("a",))]
        assert saturated(0.9, 0.9, 0.7, 0.9, 0.9) == []
        assert [f.step for f in saturated(*[0.9] * 3, start=4)] == []

    @pytest.mark.parametrize(
        ("first", "loss", "told"),
        [
            (2.0, 1.1, True),
            (2.0, 1.0, False),
            (-1.0, -1.0, True),
            (-1.0, -1.1, False),
            (0.0, 0.0, True),
            (0.0, 1.0, True),
        ],
    )
    def test_only_while_the_loss_is_high(self, first: float, loss: float, told: bool) -> None:
        assert bool(saturated(*[0.9] * 3, losses=[loss] * 3, first=first)) == told

    def test_nothing_is_known_before_the_first_loss(self) -> None:
        assert saturated(*[0.9] * 3, losses=[math.nan] * 3, first=math.nan) == []
        assert said(saturated(*[0.9] * 3, first=math.nan)) == [(7, "warn")]

    @pytest.mark.parametrize(
        ("fall", "noise", "told"),
        [
            (0.04, 0.1, []),  # of the level, from probe to probe
            (0.015, 0.1, [384]),
            (0.04, 0.5, [384]),  # 128 losses do not show it
            (0.0, 0.0, [384]),
            (-0.04, 0.1, [384]),
        ],
    )
    def test_not_while_the_loss_falls(self, fall: float, noise: float, told: list[int]) -> None:
        assert [f.step for f in fed(SaturatedUnits, learning(fall, noise))] == told

    def test_again_judged_where_the_fall_ends(self) -> None:
        """Three probes after the last fall."""
        stops = [row(i, loss=1.7, probe=layer(i)) for i in range(641, 1300)]
        assert [f.step for f in fed(SaturatedUnits, [*learning(0.04, 0.1), *stops])] == [1024]

    def test_an_old_state(self) -> None:
        detector = SaturatedUnits()
        detector.load_state_dict({"runs": {"counts": {"a": 2}, "said": []}, "first": 2.0})
        assert [f.step for f in detector.update(row(9, loss=2.0, probe=layer(128)))] == [9]


def layer(step: int) -> Probe | None:
    """One layer with saturated units, at steps with a probe."""
    return None if step % 128 else Probe(step=step, modules=("a",), saturated=(0.9,))


def learning(fall: float, noise: float) -> list[Signals]:
    """640 steps whose mean loss falls by `fall` from one probe to the next."""
    signs = itertools.cycle((1.0, -1.0))
    levels = [(2.0 * (1.0 - fall) ** ((i - 1) // 128), next(signs)) for i in range(1, 641)]
    return [row(i, loss=level + sign * noise, probe=layer(i)) for i, (level, sign) in enumerate(levels, 1)]
