"""What is not finite, loss scales that fall, buffers that leap: where exactly."""

import math
from typing import Any

import pytest

from steadystep.detectors import BufferJump, NonFinite
from steadystep.detectors.non_finite import LossScale
from steadystep.records import Finding
from tests.unit.detectors.feeding import fed, row, rows, said

NAN, INF = math.nan, math.inf


class TestNonFinite:
    def test_each_of_the_four_by_itself(self) -> None:
        assert fed(NonFinite, [row(0)]) == []
        for fields, value in (
            ({"loss": INF}, INF),
            ({"grad_norm": INF}, INF),
            ({"bad_buffers": ("running_var",)}, INF),
            ({"lr": -INF}, -INF),
        ):
            (found,) = fed(NonFinite, [row(0, **fields)])
            assert (found.severity, found.value, found.step) == ("critical", value, 0)
            assert found.where == fields.get("bad_buffers", ())
            assert found.limit == pytest.approx(3.4028e38, rel=1e-4)

    def test_all_of_them_in_order(self) -> None:
        bad = row(3, loss=NAN, grad_norm=INF, bad_buffers=("b",), lr=NAN, names=("x", "y"), norms=(INF, 1.0))
        found = fed(NonFinite, [bad])
        assert [f.where for f in found] == [(), ("x",), ("b",), ()]
        assert [math.isnan(f.value) for f in found] == [True, False, False, True]

    @pytest.mark.parametrize(
        ("scaled", "loss", "severity"), [(True, 1.0, "info"), (False, 1.0, "critical"), (True, NAN, "critical")]
    )
    def test_an_overflow_is_the_scalers_routine(self, scaled: bool, loss: float, severity: str) -> None:
        found = fed(NonFinite, [row(0, grad_norm=INF, scaled=scaled, loss=loss)])
        assert found[-1].severity == severity

    def test_micro_batches_are_named_where_there_are_several(self) -> None:
        (found,) = fed(NonFinite, [row(0, loss=NAN, losses=(1.0, NAN, INF))])
        assert found.where == ("micro-batch 1", "micro-batch 2")
        (found,) = fed(NonFinite, [row(0, loss=NAN, losses=(NAN,))])
        assert found.where == ()

    def lone(self, *steps: int, **more: Any) -> list[tuple[int, str]]:
        return said(fed(NonFinite, [row(step, loss=NAN, **more) for step in steps]))

    def test_a_term_without_a_gradient_is_told_at_the_third_within_200_steps(self) -> None:
        assert self.lone(0, 5, 10, 20) == [(0, "critical"), (5, "critical"), (10, "warn"), (20, "info")]
        assert self.lone(0, 100, 199)[-1] == (199, "warn")
        assert self.lone(0, 100, 200)[-1] == (200, "critical")
        assert self.lone(0, 100, 200, 299)[-1] == (299, "warn")
        assert self.lone(0, 1, 2, 500, 501, 502)[3:] == [(500, "critical"), (501, "critical"), (502, "info")]

    @pytest.mark.parametrize("bad", [{"grad_norm": INF}, {"bad_buffers": ("b",)}, {"input_finite": False}])
    def test_not_where_something_else_is_bad_too(self, bad: dict[str, Any]) -> None:
        assert {severity for _, severity in self.lone(0, 1, 2, 3, **bad)} == {"critical"}

    @pytest.mark.parametrize("fine", [{"input_finite": True}, {"input_finite": None}])
    def test_a_batch_that_is_fine_or_unknown(self, fine: dict[str, Any]) -> None:
        assert self.lone(0, 1, 2, **fine)[-1] == (2, "warn")

    def test_an_old_state(self) -> None:
        detector = NonFinite()
        detector.load_state_dict({})
        assert detector.state_dict() == {"without_gradient": [], "told": False}

    @pytest.mark.parametrize(
        ("ranks", "shown"), [((2,), "rank 2"), ((1, 2), "ranks 1, 2"), ((1, 2, 3, 4), "ranks 1, 2, 3 and 1 more")]
    )
    def test_ranks_are_named(self, ranks: tuple[int, ...], shown: str) -> None:
        (found,) = fed(NonFinite, [row(0, loss=NAN, bad_ranks=ranks)])
        assert shown in found.what
        assert "more" not in found.what or len(ranks) > 3


def scales(*parts: tuple[float, int], quiet: int = 500) -> list[Finding]:
    values = [scale for scale, count in parts for _ in range(count)]
    return fed(lambda: LossScale(quiet_steps=quiet), rows(scale=values, scaled=True))


class TestLossScale:
    @pytest.mark.parametrize(("gap", "told"), [(24, True), (25, False)])
    def test_three_cuts_within_50_steps(self, gap: int, told: bool) -> None:
        found = scales((1024.0, 201), (512.0, gap), (256.0, gap), (128.0, 9))
        steps = [(f.step, f.severity, f.value, f.limit) for f in found]
        assert steps == ([(201 + 2 * gap, "warn", 3.0, 3.0)] if told else [])

    def test_growing_is_no_cut(self) -> None:
        assert scales((64.0, 201), (128.0, 5), (256.0, 5), (512.0, 5), (1024.0, 5)) == []
        assert scales((64.0, 201), (32.0, 5), (64.0, 5), (32.0, 5), (64.0, 5)) == []

    @pytest.mark.parametrize(("before", "told"), [(199, False), (200, True)])
    def test_the_first_200_steps_are_calibration(self, before: int, told: bool) -> None:
        parts = ((1024.0, before), (512.0, 1), (256.0, 1), (128.0, 1))
        assert bool(scales(*parts)) == told

    @pytest.mark.parametrize(("held", "gap", "told"), [(8, 4, True), (7, 4, False), (8, 5, False)])
    def test_five_cuts_within_20_steps_after_a_scale_that_held_for_8(self, held: int, gap: int, told: bool) -> None:
        cuts = [(2.0 ** (20 - i), 1) for i in range(1, 5)]
        spread = [(scale, gap) for scale, _ in cuts]
        found = scales((2.0**20, held), (2.0**19, gap), *spread[1:], (2.0**15, 1))
        assert [(f.value, f.limit) for f in found] == ([(5.0, 5.0)] if told else [])

    @pytest.mark.parametrize(("scale", "told"), [(1.0, False), (0.5, True)])
    def test_below_one(self, scale: float, told: bool) -> None:
        found = scales((2.0, 5), (scale, 5))
        assert [(f.step, f.value, f.limit) for f in found] == ([(5, 0.5, 1.0)] if told else [])

    def test_once_in_quiet_steps(self) -> None:
        parts = [(0.5, 10), (0.25, 9), (0.125, 1), (0.0625, 5)]
        assert [f.step for f in scales(*parts, quiet=20)] == [0, 20]
        assert [f.step for f in scales(*parts, quiet=19)] == [0, 19]
        assert [f.step for f in scales(*parts, quiet=500)] == [0]
        assert [f.step for f in scales((0.5, 500), (0.25, 2))] == [0, 500]
        assert [f.step for f in scales((0.5, 499), (0.25, 2))] == [0]

    def test_silent_without_a_scaler_and_for_what_is_not_finite(self) -> None:
        assert fed(LossScale, rows(20, scale=0.1)) == []
        assert scales((2.0, 3), (NAN, 3), (INF, 3)) == []

    def test_an_old_state(self) -> None:
        detector = LossScale()
        detector.load_state_dict({"steps": 5, "until": 0, "scale": None, "cuts": [3]})
        state = detector.state_dict()
        assert (state["early"], state["since"], state["found"], state["cuts"]) == ([], 0, False, [3])


def buffers(*peaks: tuple[float, ...]) -> list[Finding]:
    names = ("a", "b", "c")
    return fed(BufferJump, [row(i, buffers=names[: len(p)], buffer_peaks=p) for i, p in enumerate(peaks)])


class TestBufferJump:
    @pytest.mark.parametrize(("peak", "told"), [(2000.0, False), (2001.0, True), (INF, False), (NAN, False)])
    def test_a_thousand_times_the_largest(self, peak: float, told: bool) -> None:
        found = buffers(*[(1.0, 1.0)] * 20, (2.0, 1.0), *[(1.0, 1.0)] * 20, (peak, 1.0))
        assert [(f.step, f.severity, f.value, f.limit, f.baseline, f.where) for f in found] == (
            [(41, "act", peak, 2000.0, 2.0, ("a",))] if told else []
        )

    def test_the_worst_of_several(self) -> None:
        (found,) = buffers(*[(1.0, 1.0, 1.0)] * 32, (2e3, 9e3, 1.0))
        assert (found.value, found.where) == (9e3, ("a", "b"))

    @pytest.mark.parametrize(("before", "told"), [(31, False), (32, True)])
    def test_32_looks_come_first(self, before: int, told: bool) -> None:
        assert bool(buffers(*[(1.0,)] * before, (5e3,))) == told
        assert bool(buffers(*[(0.0,)] * 40, *[(1.0,)] * before, (5e3,))) == told

    def test_what_no_training_comes_to_needs_none(self) -> None:
        assert buffers((1.0,), (1e31,)) != []
        assert buffers((1e31,), (1e35,)) == []
        assert buffers((1e29,), (1e31,)) == []  # no leap

    def test_three_in_a_row_and_then_it_is_the_scale(self) -> None:
        assert [f.step for f in buffers(*[(1.0,)] * 32, *[(5e3,)] * 9)] == [32, 33, 34]
        found = buffers(*[(1.0,)] * 32, *[(5e3,)] * 9, (5e7,))
        assert [f.baseline for f in found] == [1.0, 1.0, 1.0, 5e3]
        assert len(buffers(*[(1.0,)] * 32, *[(5e3,), (5e3,), (1.0,)] * 3)) == 6
