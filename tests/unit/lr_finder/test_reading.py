"""Reading a sweep: the arithmetic, and what no curve may lead to."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steadystep.lr_finder import LRCurve, SweepShape
from steadystep.lr_finder.curve import judge_sweep, smooth

any_loss = st.floats(width=32)
some_losses = st.lists(any_loss, min_size=1, max_size=80)
betas = st.sampled_from([0.0, 0.5, 0.8, 0.95])


def rates(count: int) -> list[float]:
    return [10 ** (-7 + 8 * i / max(1, count - 1)) for i in range(count)]


@given(values=st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=30), beta=betas)
def test_smoothing_is_the_weighted_mean_it_says_it_is(values: list[float], beta: float) -> None:
    for i, got in enumerate(smooth(values, beta)):
        weights = [beta ** abs(i - j) for j in range(len(values))]
        twin = sum(w * v for w, v in zip(weights, values, strict=True)) / sum(weights)
        assert got == pytest.approx(twin, rel=1e-9, abs=1e-6)


@given(losses=some_losses, beta=betas, diverged=st.booleans())
def test_whatever_came_the_answer_is_in_range_and_goes_to_json(losses, beta: float, diverged: bool) -> None:
    lrs = rates(len(losses))
    curve = judge_sweep(lrs, losses, smoothing=beta, diverged=diverged)
    known = curve.verdict in (SweepShape.FOUND, SweepShape.OPEN_ENDED, SweepShape.LIMIT_ONLY)
    assert (curve.suggested is not None) == (curve.largest_stable is not None) == known
    if known:
        assert lrs[0] / 10 <= curve.suggested < curve.largest_stable <= lrs[-1]
    assert len(curve.smoothed) == len(losses)
    assert repr(LRCurve.from_json(curve.to_json())) == repr(curve)
    assert str(curve)


@given(
    losses=st.lists(st.floats(0.5, 8.0), min_size=10, max_size=80),
    power=st.integers(-8, 8),
    diverged=st.booleans(),
)
def test_the_unit_of_the_loss_does_not_matter(losses: list[float], power: int, diverged: bool) -> None:
    lrs = rates(len(losses))
    one = judge_sweep(lrs, losses, smoothing=0.8, diverged=diverged)
    other = judge_sweep(lrs, [loss * 2.0**power for loss in losses], smoothing=0.8, diverged=diverged)
    assert (one.verdict, one.suggested) == (other.verdict, other.suggested)


def falling(level: float = 2.0, noise: float = 0.0) -> list[float]:
    """Falls between the rates 1e-4 and 1e-2, stays, and runs away at 1."""
    losses = []
    for i, lr in enumerate(rates(100)):
        fall = min(1.0, max(0.0, (math.log10(lr) + 4) / 2))
        wave = noise * math.sin(2.4 * i)
        losses.append(level - fall + wave if lr < 1 else 4 * level)
    return losses


def test_a_plain_curve() -> None:
    curve = judge_sweep(rates(100), falling(), smoothing=0.8, diverged=True)
    assert curve.verdict is SweepShape.FOUND
    at_four_fifths = 10 ** (-4 + 2 * 0.8)
    assert curve.suggested == pytest.approx(at_four_fifths / 1.5, rel=0.5)
    assert 5e-3 < curve.largest_stable < 1.0


def test_a_curve_in_noise_is_read_much_the_same() -> None:
    calm, noisy = (judge_sweep(rates(100), falling(noise=n), smoothing=0.8, diverged=True) for n in (0.0, 0.15))
    assert noisy.verdict is SweepShape.FOUND
    assert noisy.suggested == pytest.approx(calm.suggested, rel=0.7)


def test_a_fall_smaller_than_the_noise_is_no_fall() -> None:
    losses = [2.0 + 0.5 * math.sin(2.4 * i) for i in range(100)]
    assert judge_sweep(rates(100), losses, smoothing=0.8, diverged=False).verdict is SweepShape.FLAT


def test_no_fall_and_then_a_runaway_leaves_a_limit() -> None:
    losses = [2.0 + 0.5 * math.sin(2.4 * i) for i in range(80)] + [4.0, 6.0, 8.0]
    lrs = rates(100)[:83]
    curve = judge_sweep(lrs, losses, smoothing=0.8, diverged=True)
    assert curve.verdict is SweepShape.LIMIT_ONLY
    assert curve.suggested == pytest.approx(curve.largest_stable / 10)
    assert curve.largest_stable == pytest.approx(lrs[79], rel=0.9)


def test_rising_from_the_first_step_on() -> None:
    losses = [2.0 * 1.5**i for i in range(12)]
    assert judge_sweep(rates(12), losses, smoothing=0.8, diverged=True).verdict is SweepShape.DIVERGES_AT_ONCE


def test_a_negative_loss_can_fall_too() -> None:
    curve = judge_sweep(rates(100), [loss - 10 for loss in falling()], smoothing=0.8, diverged=True)
    assert curve.verdict is SweepShape.FOUND
    assert curve.suggested == judge_sweep(rates(100), falling(), smoothing=0.8, diverged=True).suggested
