"""Gradients that stand out from their own history, and those that only seem to."""

import math
import random
from collections.abc import Iterable, Sequence
from itertools import pairwise, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steadystep.detectors import GradientSpike
from steadystep.records import Finding, Signals

NAMES = ("a.weight", "b.weight", "c.weight", "d.weight", "e.weight")


def view(
    step: int, norm: float, *, loss: float = 2.0, tensors: Sequence[float] | None = None, lr: float = 0.1
) -> Signals:
    """Without `tensors` all five have the same share of the norm."""
    each = tuple(tensors) if tensors is not None else (norm / math.sqrt(5.0),) * 5
    return Signals(step=step, loss=loss, losses=(loss,), grad_norm=norm, norms=each, names=NAMES[: len(each)], lr=lr)


def fed(detector: GradientSpike, norms: Iterable[float], *, start: int = 0) -> list[Finding]:
    return [f for i, norm in enumerate(norms, start) for f in detector.update(view(i, norm))]


def after(steps: int, norm: float = 2.0, **options: float) -> GradientSpike:
    """One that has seen a perfectly steady run; its limits are then plain arithmetic."""
    detector = GradientSpike(**options)
    assert fed(detector, [norm] * steps) == []
    return detector


def lone(norm: float, baseline: float = 2.0) -> list[float]:
    """All of the rise in one tensor."""
    rest = baseline / math.sqrt(5.0)
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
    """For a rise of all tensors alike with the loss as usual: no batch does that."""
    limit = 2.0 * 6.0 * (1.0 + 128.0 / steps if steps < 128 else 1.0)
    assert after(steps).update(view(steps, 0.9 * limit)) == ()
    (found,) = after(steps).update(view(steps, 1.1 * limit))
    assert found.severity == "act"
    assert found.step == steps
    assert found.value == 1.1 * limit
    assert found.baseline == pytest.approx(2.0)
    assert found.limit == pytest.approx(limit)
    assert found.where == ()  # all of them is nowhere in particular


def test_a_rise_of_single_tensors_gets_more_room() -> None:
    """So does one of which nothing is known."""
    alone = 2.0 * 10.0 * 1.2
    for tensors in (lone(1.5 * alone), ()):
        assert after(640).update(view(640, 1.5 * alone, tensors=tensors)) == ()
    (found,) = after(640).update(view(640, 20.0 * alone, tensors=lone(20.0 * alone)))
    assert found.where == ("a.weight",)
    assert 1.5 * alone < found.limit < 20.0 * alone


def test_it_is_armed_after_24_steps() -> None:
    assert after(23).update(view(23, 1e9)) == ()
    assert [f.severity for f in after(24).update(view(24, 1e9))] == ["act"]


def test_a_wide_run_is_judged_by_its_own_spread() -> None:
    """Eight sigma of the logarithm, when that is more than the factor."""
    detector, rng = GradientSpike(), random.Random(0)
    norms = [math.exp(rng.gauss(0.0, 0.6)) for _ in range(512)]
    assert fed(detector, norms) == []
    level = detector._level
    limit = math.exp(level.median + 8.0 * level.spread) * 1.25
    assert limit > 40.0
    assert detector.update(view(512, 0.9 * limit)) == ()


def heavy(count: int, *, seed: int = 0) -> list[float]:
    """Norms with a Pareto tail: one in five hundred is beyond a hundred times the median."""
    rng = random.Random(seed)
    return [math.exp(rng.gauss(0.0, 0.2)) * rng.paretovariate(1.35) for _ in range(count)]


def test_the_limit_follows_the_tail_of_this_very_run() -> None:
    """Its blips of a hundred times the median are its own; the same blip in a run without such a tail is none."""
    asked = largest = 0
    for seed in range(5):
        norms = heavy(3000, seed=seed)
        largest = max(largest, max(norms) / sorted(norms)[1500])
        asked += sum(f.severity == "act" for f in fed(GradientSpike(), norms))
    assert largest > 100.0
    assert asked <= 5
    assert [f.severity for f in after(640).update(view(640, 200.0))] == ["act"]


def test_a_heavy_tail_is_no_licence() -> None:
    detector = GradientSpike()
    fed(detector, heavy(3000))
    assert [f.severity for f in detector.update(view(3000, 1e12))] == ["act"]


def test_a_burst_does_not_stand_out_from_its_neighbours() -> None:
    """Norms that rise within a few steps, each less than three times the one before."""
    assert fed(after(640), [2.0 * 2.5**i for i in range(12)], start=640) == []


def test_a_hard_batch_with_a_high_loss_gets_more_room() -> None:
    plain = 2.0 * 10.0 * 1.2
    assert after(640).update(view(640, 5.0 * plain, loss=9.0)) == ()
    assert after(640).update(view(640, 5.0 * plain)) != ()
    (found,) = after(640).update(view(640, 50.0 * plain, loss=9.0))
    assert 5.0 * plain < found.limit < 50.0 * plain


def test_an_update_no_larger_than_others_that_were_survived_gets_more_room() -> None:
    """The learning rate was higher once: norm times rate is what moves weights."""
    norm, known = 5.0 * 2.0 * 10.0 * 1.2, GradientSpike()
    for i in range(640):
        assert known.update(view(i, 2.0, lr=10.0 if i < 100 else 0.1)) == ()
    assert known.update(view(640, norm, tensors=lone(norm))) == ()
    assert after(640).update(view(640, norm, tensors=lone(norm))) != ()


def test_a_loss_that_is_nan_explains_nothing() -> None:
    """The gate refuses that step anyway; it gets no more room than single tensors do."""
    assert after(640).update(view(640, 2.0 * 10.0 * 1.2 * 6.0, loss=math.nan)) != ()
    assert after(640).update(view(640, 2.0 * 10.0 * 1.2 * 6.0, loss=9.0)) == ()


def test_what_clipping_holds_back_is_a_note() -> None:
    for clipped_to, severity in ((math.inf, "act"), (1.0, "info"), (0.0, "info"), (1e3, "act")):
        (found,) = after(640, clipped_to=clipped_to).update(view(640, 1e4))
        assert found.severity == severity
        assert ("limited by your clipping" in found.what) == (severity == "info")


@given(st.sampled_from([6.0, 10.0, 30.0]))
def test_the_factor_is_a_setting(factor: float) -> None:
    limit = 2.0 * max(0.6 * factor, 3.0)
    assert after(640, factor=factor).update(view(640, 0.9 * limit)) == ()
    assert after(640, factor=factor).update(view(640, 1.1 * limit)) != ()


class TestOutliersThatLast:
    """Nobody counts them and calls them usual: they are held down, and let in for as long as that does no harm."""

    def raised(
        self, detector: GradientSpike, *, norm: float = 200.0, loss: float = 2.0, steps: int = 200
    ) -> list[Finding]:
        views = [view(640 + i, norm + i % 12, loss=loss) for i in range(steps)]
        return [f for each in views for f in detector.update(each)]

    def test_they_are_held_at_the_usual_norm_and_let_in_step_by_step(self) -> None:
        found = self.raised(after(640))
        held = [f for f in found if f.severity == "act"]
        assert [f.step for f in held] == list(range(640, 640 + len(held)))
        norms = [f.baseline for f in held]
        assert norms[:12] == pytest.approx([2.0] * 12, rel=0.2)
        assert norms == sorted(norms)
        assert all(b < 1.2 * a for a, b in pairwise(norms))
        assert norms[-1] > 100.0

    def test_none_of_them_is_refused_for_good(self) -> None:
        """Their direction is used: none of those that agree is far above the limit it comes with."""
        held = [f for f in self.raised(after(640)) if f.severity == "act"][12:]
        assert all(f.value <= f.limit for f in held)

    def test_in_the_end_they_are_the_level(self) -> None:
        detector = after(640)
        assert "new level" in self.raised(detector)[-1].what
        assert fed(detector, [210.0] * 50, start=840) == []
        (again,) = detector.update(view(900, 1e6))
        assert again.baseline == pytest.approx(210.0, rel=0.1)

    def test_not_while_the_loss_rises(self) -> None:
        found = self.raised(after(640), norm=2000.0, loss=9.0)
        assert {f.severity for f in found} == {"act"}
        assert len(found) == 200
        assert all(f.baseline == pytest.approx(2.0, rel=0.2) for f in found)

    def test_where_harm_showed_less_is_let_in_from_then_on(self) -> None:
        """Also past norms that happen to be usual, and although a high loss explains high norms elsewhere."""
        detector = after(640)
        self.raised(detector, steps=60)
        borne = max(f.baseline for f in self.raised(detector, loss=9.0, steps=8))
        assert fed(detector, [2.0] * 8, start=708) == []
        found = self.raised(detector, loss=2.0, steps=200)
        assert {f.severity for f in found} == {"act"}
        assert max(f.baseline for f in found) <= borne / 2.0

    def test_one_that_is_over_begins_anew(self) -> None:
        detector = after(640)
        self.raised(detector, steps=30)
        assert fed(detector, [2.0] * 20, start=670) == []
        (found,) = detector.update(view(690, 200.0))
        assert found.baseline == pytest.approx(2.0, rel=0.2)

    def test_what_clipping_holds_back_is_a_note(self) -> None:
        found = self.raised(after(640, clipped_to=1.0))
        assert {f.severity for f in found} == {"info"}


def test_outliers_that_disagree_stay_outliers() -> None:
    found = fed(after(640), [200.0, 2000.0] * 20, start=640)
    assert {f.severity for f in found} == {"act"}
    assert len(found) == 40


def test_an_outlier_is_not_learned() -> None:
    detector = after(640)
    before = detector.state_dict()["level"]["values"]
    detector.update(view(640, 1e4))
    assert detector.state_dict()["level"]["values"] == before


def test_what_is_no_norm_is_neither_judged_nor_learned() -> None:
    detector = after(640)
    before = detector.state_dict()
    for norm in (0.0, math.nan, math.inf):
        assert detector.update(view(640, norm)) == ()
        assert detector.state_dict() == before


def test_a_shorter_history_follows_sooner() -> None:
    """After 20 steps at 2.5 times the level, a further 5.6 times is 14 times the old level."""
    short, long = after(640, history=32), after(640, history=128)
    for detector in (short, long):
        assert fed(detector, [5.0] * 20, start=640) == []
    assert short.update(view(660, 28.0)) == ()
    assert len(long.update(view(660, 28.0))) == 1


def test_tensors_that_come_and_go_are_no_trouble() -> None:
    """Layers are thawed in the middle of a run."""
    detector = after(640)
    assert fed(detector, [2.0] * 40, start=640) == []
    for i in range(40):
        assert detector.update(view(680 + i, 2.0, tensors=(1.0, 1.0))) == ()
    (found,) = detector.update(view(720, 1e4, tensors=(1.0, 1e4)))
    assert found.where == ("b.weight",)


@given(st.lists(st.floats(1e-3, 1e3), min_size=24, max_size=60), st.floats(0.0, 6.0))
def test_six_times_its_median_is_never_too_much(norms: list[float], times: float) -> None:
    detector = GradientSpike()
    fed(detector, norms)
    assert detector.update(view(len(norms), times * 0.999 * math.exp(detector._level.median))) == ()


def test_outliers_that_come_with_a_high_loss_do_not_hide_one_that_comes_without() -> None:
    """In one batch of forty norm and loss are high together; a tenfold norm with a usual loss is no such batch."""
    rng = random.Random(0)
    detector = GradientSpike()
    for i in range(600):
        rise = math.exp(rng.expovariate(1.0)) if i % 40 == 0 else 1.0
        noisy = 2.0 * rise * math.exp(rng.gauss(0.0, 0.1))
        assert detector.update(view(i, noisy, loss=2.0 * rise + rng.gauss(0.0, 0.1))) == ()
    (found,) = detector.update(view(600, 20.0, loss=2.0))
    assert found.severity == "act"
    assert detector.update(view(601, 20.0, loss=20.0)) == ()


def test_outliers_of_a_few_tensors_do_not_hide_one_that_reaches_all() -> None:
    """A text with a rare word makes the norm of its embedding; that says nothing of gradients ten times too large."""

    def trained(blip: Sequence[float]) -> GradientSpike:
        detector = after(200)
        norm = math.hypot(*blip)
        assert detector.update(view(200, norm, tensors=blip)) == ()
        assert fed(detector, [2.0] * 100, start=201) == []
        return detector

    (found,) = trained(lone(8.0)).update(view(301, 20.0))
    assert found.severity == "act"
    assert trained([8.0 / math.sqrt(5.0)] * 5).update(view(301, 20.0)) == ()  # one like it was harmless before


def test_one_norm_alone_is_judged_by_the_factor_itself() -> None:
    """A logged curve knows of no tensors: GPT-2 124M has a healthy blip of 7.5 times, BLOOM-104B a bad one of 20."""
    for loss, norm, said in ((2.0, 15.0, []), (2.0, 50.0, ["act"]), (2.06, 50.0, ["act"])):
        detector = GradientSpike()
        for i in range(640):
            detector.update(view(i, 2.0, loss=2.0 + 0.02 * math.sin(i), tensors=(2.0,)))
        assert [f.severity for f in detector.update(view(640, norm, loss=loss, tensors=(norm,)))] == said


def test_one_outlier_that_hardly_is_one_does_not_hide_a_spike() -> None:
    detector = after(200)
    assert detector.update(view(200, 6.4)) == ()  # 3.2 times, in all tensors
    assert fed(detector, [2.0] * 100, start=201) == []
    (found,) = detector.update(view(301, 20.0))
    assert found.severity == "act"
