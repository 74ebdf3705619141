"""Gradients that stand out from their own history, and those that only seem to."""

import math
import random
from collections.abc import Iterable, Sequence
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steadystep.detectors import GradientSpike
from steadystep.records import Finding, Signals

NAMES = ("a.weight", "b.weight", "c.weight", "d.weight", "e.weight")


def look(step: int, norm: float, *, loss: float = 2.0, tensors: Sequence[float] | None = None) -> Signals:
    """Without `tensors` all five have the same share of the norm."""
    each = tuple(tensors) if tensors is not None else (norm / math.sqrt(5.0),) * 5
    return Signals(step=step, loss=loss, losses=(loss,), grad_norm=norm, norms=each, names=NAMES[: len(each)])


def fed(detector: GradientSpike, norms: Iterable[float], *, start: int = 0) -> list[Finding]:
    return [f for i, norm in enumerate(norms, start) for f in detector.update(look(i, norm))]


def after(steps: int, norm: float = 2.0, **options: float) -> GradientSpike:
    """One that has seen a perfectly steady run; its limits are then plain arithmetic."""
    detector = GradientSpike(**options)
    assert fed(detector, [norm] * steps) == []
    return detector


def lone(norm: float, usual: float = 2.0) -> list[float]:
    """All of the rise in one tensor."""
    rest = usual / math.sqrt(5.0)
    return [math.sqrt(norm**2 - 4 * rest**2), rest, rest, rest, rest]


HEALTHY = {
    "log-normal": lambda i, rng: math.exp(rng.gauss(0.0, 0.3)),
    "1e4 for a sum": lambda i, rng: 1e4 * math.exp(rng.gauss(0.0, 0.3)),
    "1e-7": lambda i, rng: 1e-7 * math.exp(rng.gauss(0.0, 0.3)),
    "twenty times over the run": lambda i, rng: 20.0 ** (i / 1500) * math.exp(rng.gauss(0.0, 0.3)),
    "twenty times down": lambda i, rng: 20.0 ** (-i / 1500) * math.exp(rng.gauss(0.0, 0.3)),
    "early transient": lambda i, rng: (1.0 + 30.0 * math.exp(-i / 10)) * math.exp(rng.gauss(0.0, 0.2)),
    "growing out of a flat start": lambda i, rng: (0.2 + min(i, 60) / 60) * math.exp(rng.gauss(0.0, 0.2)),
    "zero now and then": lambda i, rng: 0.0 if i % 7 == 3 else math.exp(rng.gauss(0.0, 0.2)),
    "constant": lambda i, rng: 3.0,
}


def test_quiet_on_healthy_norms() -> None:
    for seed, (kind, curve) in product(range(3), HEALTHY.items()):
        rng = random.Random(seed)
        assert fed(GradientSpike(), [curve(i, rng) for i in range(1500)]) == [], kind


@given(st.integers(0, 100), st.floats(-20.0, 20.0))
def test_no_scale_matters(seed: int, log_scale: float) -> None:
    rng = random.Random(seed)
    norms = [math.exp(rng.gauss(0.0, 0.3)) * (400.0 if i % 60 == 59 else 1.0) for i in range(180)]
    plain = fed(GradientSpike(), norms)
    scaled = fed(GradientSpike(), [norm * math.exp(log_scale) for norm in norms])
    assert [f.step for f in plain] == [59, 119, 179]
    assert [f.step for f in scaled] == [f.step for f in plain]


@given(st.sampled_from([24, 128, 640]))
def test_the_limit_is_the_factor_and_a_young_run_gets_more_room(steps: int) -> None:
    young = 1.0 + 128.0 / steps
    limit = 2.0 * 10.0 * young
    below = after(steps)
    assert below.update(look(steps, 0.999 * limit, tensors=lone(0.999 * limit))) == ()
    (found,) = after(steps).update(look(steps, 1.001 * limit, tensors=lone(1.001 * limit)))
    assert found.severity == "act"
    assert found.step == steps
    assert found.value == 1.001 * limit
    assert found.usual == pytest.approx(2.0)
    assert found.limit == pytest.approx(limit)
    assert found.where == ("a.weight",)


def test_it_is_armed_after_24_steps() -> None:
    assert after(23).update(look(23, 1e9)) == ()
    assert [f.severity for f in after(24).update(look(24, 1e9))] == ["act"]


def test_a_wide_run_is_judged_by_its_own_spread() -> None:
    """Eight sigma of the logarithm, when that is more than the factor."""
    detector, rng = GradientSpike(), random.Random(0)
    norms = [math.exp(rng.gauss(0.0, 0.6)) for _ in range(512)]
    assert fed(detector, norms) == []
    level = detector._level
    limit = math.exp(level.median + 8.0 * level.spread) * 1.25
    assert limit > 40.0
    assert detector.update(look(512, 0.99 * limit, tensors=lone(0.99 * limit, 1.0))) == ()
    (found,) = detector.update(look(513, 1.1 * limit, tensors=lone(1.1 * limit, 1.0)))
    assert found.limit == pytest.approx(limit, rel=0.01)


def test_a_rise_of_all_tensors_alike_is_noticed_sooner() -> None:
    """Six times with the loss as usual: no batch does that. From 640 steps on the limit is 6 * 1.2."""
    limit = 6.0 * 1.2 * 2.0
    (found,) = after(640).update(look(640, 1.01 * limit))
    assert found.limit == pytest.approx(limit)
    assert found.where == ()  # all of them is nowhere in particular
    assert after(640).update(look(640, 0.99 * limit)) == ()
    assert after(640).update(look(640, 1.01 * limit, tensors=lone(1.01 * limit))) == ()
    assert after(640).update(look(640, 1.01 * limit, tensors=())) == ()


def test_a_hard_batch_with_a_high_loss_gets_three_times_the_limit() -> None:
    limit = 3.0 * 10.0 * 1.2 * 2.0
    assert after(640).update(look(640, 0.99 * limit, loss=9.0)) == ()
    (found,) = after(640).update(look(640, 1.01 * limit, loss=9.0))
    assert found.limit == pytest.approx(limit)


def test_a_loss_that_is_nan_explains_nothing() -> None:
    """The gate refuses that step anyway; here the plain limit holds."""
    assert after(640).update(look(640, 2.0 * 11.9, loss=math.nan)) == ()
    assert after(640).update(look(640, 2.0 * 12.1, loss=math.nan)) != ()


def test_what_clipping_holds_back_is_a_note() -> None:
    for clipped_to, severity in ((math.inf, "act"), (1.0, "info"), (0.0, "info"), (1e3, "act")):
        (found,) = after(640, clipped_to=clipped_to).update(look(640, 1e4))
        assert found.severity == severity
        assert ("held by your clipping" in found.what) == (severity == "info")


@given(st.sampled_from([2.0, 5.0, 10.0, 30.0]))
def test_the_factor_is_a_setting(factor: float) -> None:
    limit = 2.0 * factor * 1.2
    assert after(640, factor=factor).update(look(640, 0.99 * limit, tensors=lone(0.99 * limit))) == ()
    assert after(640, factor=factor).update(look(640, 1.01 * limit, tensors=lone(1.01 * limit))) != ()


def test_twelve_outliers_in_agreement_are_a_new_level() -> None:
    detector = after(640)
    found = fed(detector, [200.0 + i for i in range(12)], start=640)
    assert [f.severity for f in found] == ["act"] * 11 + ["info"]
    assert "new level" in found[-1].what
    assert found[-1].usual == pytest.approx(2.0)
    assert fed(detector, [210.0] * 50, start=652) == []
    (again,) = detector.update(look(702, 1e6))
    assert again.usual == pytest.approx(210.0, rel=0.05)


def test_outliers_that_disagree_stay_outliers() -> None:
    found = fed(after(640), [200.0, 2000.0] * 20, start=640)
    assert {f.severity for f in found} == {"act"}
    assert len(found) == 40


def test_an_outlier_is_not_learned() -> None:
    detector = after(640)
    before = detector.state_dict()["level"]["values"]
    detector.update(look(640, 1e4))
    assert detector.state_dict()["level"]["values"] == before


def test_what_is_no_norm_is_neither_judged_nor_learned() -> None:
    detector = after(640)
    before = detector.state_dict()
    for norm in (0.0, math.nan, math.inf):
        assert detector.update(look(640, norm)) == ()
        assert detector.state_dict() == before


def test_a_shorter_history_follows_sooner() -> None:
    """After 20 steps at five times the level, a further four times is 20 times the old level or 4 times the new."""
    short, long = after(640, history=32), after(640, history=128)
    for detector in (short, long):
        assert fed(detector, [10.0] * 20, start=640) == []
    assert short.update(look(660, 40.0)) == ()
    assert len(long.update(look(660, 40.0))) == 1


def test_tensors_that_come_and_go_are_no_trouble() -> None:
    """Layers are thawed in the middle of a run."""
    detector = after(640)
    assert fed(detector, [2.0] * 40, start=640) == []
    for i in range(40):
        assert detector.update(look(680 + i, 2.0, tensors=(1.0, 1.0))) == ()
    (found,) = detector.update(look(720, 1e4, tensors=(1.0, 1e4)))
    assert found.where == ("b.weight",)


@given(st.lists(st.floats(1e-3, 1e3), min_size=24, max_size=60), st.floats(0.0, 6.0))
def test_six_times_its_median_is_never_too_much(norms: list[float], times: float) -> None:
    detector = GradientSpike()
    fed(detector, norms)
    assert detector.update(look(len(norms), times * 0.999 * math.exp(detector._level.median))) == ()
