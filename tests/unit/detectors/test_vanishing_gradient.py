"""Gradients that fade or are zero: where exactly."""

import math
from typing import Any

import pytest

from steadystep.detectors import VanishingGradient, ZeroGradient
from steadystep.detectors.vanishing_gradient import SuddenZero
from steadystep.records import Finding, Signals
from tests.unit.detectors.feeding import fed, row, rows

NAMES = tuple(name for i in range(8) for name in (f"{i}.weight", f"{i}.bias"))


def faded(step: int, first: tuple[float, float], last: tuple[float, float] = (1.0, 1.0), **more: Any) -> Signals:
    """Eight layers: the weights of the first two and of the last two get these norms."""
    weights = [*first, 1.0, 1.0, 1.0, 1.0, *last]
    return row(step, names=NAMES, norms=tuple(n for norm in weights for n in (norm, 5.0)), **more)


class TestVanishingGradient:
    def test_four_evaluations_in_a_row_once(self) -> None:
        found = fed(VanishingGradient, [faded(step, (5e-5, 1e-3)) for step in range(0, 200)])
        assert [(f.step, f.severity, f.value, f.limit, f.since) for f in found] == [(48, "warn", 5e-5, 1e-4, 0)]
        assert found[0].where == ("0.weight", "1.weight")
        late = fed(VanishingGradient, [faded(step, (5e-5, 1e-3)) for step in range(160, 240, 16)])
        assert [(f.step, f.since) for f in late] == [(208, 160)]

    @pytest.mark.parametrize(("norm", "told"), [(1e-4, False), (0.99e-4, True), (0.0, True)])
    def test_a_ten_thousandth(self, norm: float, told: bool) -> None:
        assert bool(fed(VanishingGradient, [faded(16 * i, (norm, norm)) for i in range(4)])) == told

    def test_the_lower_of_two_is_the_median(self) -> None:
        small, large = (1e-9, 1e-9), (1.0, 1e-9)
        assert fed(VanishingGradient, [faded(16 * i, small, large) for i in range(5)]) == []
        assert fed(VanishingGradient, [faded(16 * i, (1e-9, 9.0)) for i in range(5)]) != []

    def test_again_after_it_came_back(self) -> None:
        bad, good = (1e-6, 1e-6), (1.0, 1.0)
        order = [bad] * 3 + [good] + [bad] * 6 + [good] + [bad] * 4
        steps = [f.step for f in fed(VanishingGradient, [faded(16 * i, norms) for i, norms in enumerate(order)])]
        assert steps == [16 * 7, 16 * 14]

    def test_what_cannot_be_judged_changes_nothing(self) -> None:
        bad = (1e-6, 1e-6)
        stream = [faded(16 * i, bad) for i in range(3)]
        passed_over = [
            faded(48, bad, grad_norm=math.inf),
            faded(64, (math.nan, 1.0)),
            faded(80, bad, (0.0, 0.0)),
            faded(97, bad),
            row(112, names=("a.weight", "b.weight", "c.weight"), norms=(1e-9, 1.0, 1.0)),
        ]
        assert [f.step for f in fed(VanishingGradient, [*stream, *passed_over, faded(128, bad)])] == [128]

    @pytest.mark.parametrize(("layers", "told"), [(3, False), (4, True)])
    def test_four_weights_have_a_depth(self, layers: int, told: bool) -> None:
        names = tuple(f"{i}.weight" for i in range(layers))
        norms = (1e-9, *[1.0] * (layers - 1))
        found = fed(VanishingGradient, [row(16 * i, names=names, norms=norms) for i in range(5)])
        assert [f.where for f in found] == ([("0.weight",)] if told else [])


def zeros(*norms: float, loss: float = 1.0) -> list[Finding]:
    return fed(ZeroGradient, rows(grad_norm=list(norms), loss=loss, norms=()))


class TestAllZero:
    def test_eight_steps_in_a_row_once(self) -> None:
        found = zeros(1.0, *[0.0] * 20)
        assert [(f.step, f.severity, f.value, f.limit, f.since) for f in found] == [(8, "warn", 0.0, 0.0, 1)]
        assert [f.since for f in zeros(*[0.0] * 8)] == [0]
        assert zeros(*[0.0] * 7, 1.0, *[0.0] * 7) == []
        assert [f.step for f in zeros(*[0.0] * 7, math.nan, math.inf, 0.0)] == [9]

    @pytest.mark.parametrize("loss", [0.0, math.nan, math.inf])
    def test_a_loss_of_zero_has_nothing_left_to_learn(self, loss: float) -> None:
        assert zeros(*[0.0] * 20, loss=loss) == []

    @pytest.mark.parametrize(("well", "told"), [(999, 1), (1000, 2)])
    def test_again_after_a_thousand_steps_with_a_gradient(self, well: int, told: int) -> None:
        stream = rows(grad_norm=[*[0.0] * 8, *[1.0] * well, *[0.0] * 8], norms=())
        detector = ZeroGradient()
        assert len([f for signals in stream for f in detector.update(signals)]) == told

    def test_streaks_in_between_count_against_it(self) -> None:
        detector = ZeroGradient()
        steps = [*[0.0] * 8, *[1.0] * 500, *[0.0] * 4, *[1.0] * 503, *[0.0] * 8]
        found = [f.step for signals in rows(grad_norm=steps, norms=()) for f in detector.update(signals)]
        assert found == [7]
        detector = ZeroGradient()
        steps = [*[0.0] * 8, *[1.0] * 500, *[0.0] * 4, *[1.0] * 504, *[0.0] * 8]
        found = [f.step for signals in rows(grad_norm=steps, norms=()) for f in detector.update(signals)]
        assert found == [7, 1023]


def single(*parts: tuple[tuple[float, ...], int], start: int = 0) -> list[Finding]:
    """Evaluations of three tensors, every fourth step."""
    norms = [each for each, count in parts for _ in range(count)]
    return fed(ZeroGradient, rows(norms=norms, names=("a", "b", "c"), start=start, every=4))


ALIVE, A_STOPS, TWO_STOP = (1.0, 1.0, 1.0), (0.0, 1.0, 1.0), (0.0, 0.0, 1.0)


class TestSingleTensors:
    def test_had_a_gradient_for_eight_and_none_for_sixteen(self) -> None:
        found = single((ALIVE, 8), (A_STOPS, 40))
        assert [(f.step, f.severity, f.where, f.since) for f in found] == [(92, "warn", ("a",), 28)]
        assert single((ALIVE, 7), (A_STOPS, 40)) == []
        assert single((ALIVE, 8), (A_STOPS, 15), (ALIVE, 1), (A_STOPS, 15)) == []

    def test_alive_among_others_that_are_not_counts_too(self) -> None:
        found = single(((1.0, 0.0, 1.0), 8), (TWO_STOP, 16))
        assert [f.where for f in found] == [("a",)]
        assert single((ALIVE, 4), ((1.0, 0.0, 1.0), 4), (TWO_STOP, 16))[0].where == ("a",)

    def test_told_together_every_500_steps(self) -> None:
        found = single((ALIVE, 8), (A_STOPS, 20), (TWO_STOP, 160))
        assert [(f.step, f.where) for f in found] == [(92, ("a",)), (592, ("b",))]

    def test_never_alive_in_256_steps_is_a_note(self) -> None:
        found = single(((0.0, 1.0, 1.0), 80))
        assert [(f.step, f.severity, f.where) for f in found] == [(252, "info", ("a",))]

    def test_only_every_fourth_step_and_with_a_finite_norm(self) -> None:
        stream = rows(80, norms=(0.0, 1.0, 1.0), names=("a", "b", "c"), start=1, every=4)
        assert fed(ZeroGradient, stream) == []
        broken = rows(80, norms=(0.0, math.inf, 1.0), names=("a", "b", "c"), every=4, grad_norm=math.inf)
        assert fed(ZeroGradient, broken) == []

    def test_an_old_state(self) -> None:
        detector = ZeroGradient()
        detector.load_state_dict({"in_a_row": 3, "zeros": {"a": 2}})
        assert detector.state_dict() == {"in_a_row": 3, "zeros": {"a": 2}, "alive": [0, {}, []], "said": [1000, 0, 0]}


@pytest.mark.parametrize(("before", "sudden"), [(63, False), (64, True)])
def test_a_zero_after_64_steps_without_one(before: int, sudden: bool) -> None:
    watched, other = SuddenZero(), SuddenZero()
    assert not any(watched.update(row(i, norms=ALIVE)) for i in range(before))
    other.load_state_dict(watched.state_dict())
    assert other.state_dict() == {"without": before}
    assert other.update(row(before, norms=A_STOPS)) == sudden
    assert not other.update(row(before + 1, norms=A_STOPS))
    assert other.state_dict() == {"without": 0}
