"""Clipping: bit-equal to torch where it does the same job, and never through a non-finite norm."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import Parameter

import steadystep
from steadystep import clip


def parameters(
    shapes: list[tuple[int, ...]], scale: float, seed: int, dtype: torch.dtype = torch.float32
) -> list[Parameter]:
    rng = torch.Generator().manual_seed(seed)
    made = [Parameter(torch.zeros(shape, dtype=dtype)) for shape in shapes]
    for p in made:
        p.grad = (torch.randn(p.shape, generator=rng) * scale).to(dtype)
    return made


shapes = st.lists(st.sampled_from([(), (1,), (7,), (3, 5), (2, 3, 4), (0,)]), min_size=1, max_size=8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@given(shapes=shapes, scale=st.floats(1e-6, 1e3), max_norm=st.floats(1e-3, 1e3), seed=st.integers(0, 99))
def test_global_norm_is_torchs_bit_for_bit(dtype, shapes, scale, max_norm, seed) -> None:
    ours, theirs = (parameters(shapes, scale, seed, dtype) for _ in range(2))
    norm = torch.nn.utils.clip_grad_norm_(theirs, max_norm)
    report = clip.clip_global_norm_(ours, max_norm=max_norm)
    if not torch.isfinite(norm) and report.finite:  # fp16 overflow in torch's norm, not in ours
        assert all(p.grad.isfinite().all() for p in ours)
        return
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a.grad, b.grad)
    half = dtype in (torch.bfloat16, torch.float16)
    assert report.norm_before == pytest.approx(norm.item(), rel=1e-2 if half else 1e-6, abs=1e-6 if half else 0)


@given(shapes=shapes, scale=st.floats(1e-3, 1e3), max_norm=st.floats(1e-3, 1e3), seed=st.integers(0, 99))
def test_the_norm_after_is_within_the_limit_and_clipping_twice_changes_nothing(shapes, scale, max_norm, seed) -> None:
    params = parameters(shapes, scale, seed)
    clip.clip_global_norm_(params, max_norm=max_norm)
    once = [p.grad.clone() for p in params]
    report = clip.clip_global_norm_(params, max_norm=max_norm)
    assert report.norm_before <= max_norm * (1 + 1e-5)
    for before, p in zip(once, params, strict=True):
        # torch's formula divides by norm + 1e-6, so a second pass shrinks by up to that share once more
        torch.testing.assert_close(before, p.grad, rtol=1e-5 + 2e-6 / max_norm, atol=0)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    "function",
    [
        lambda p: clip.clip_global_norm_(p, max_norm=1.0),
        lambda p: clip.clip_value_(p, max_value=1.0),
    ],
)
def test_a_non_finite_gradient_means_do_not_step(function, bad: float) -> None:
    params = parameters([(3,), (4,)], 10.0, 0)
    params[0].grad[1] = bad
    before = [p.grad.clone() for p in params]
    report = function(params)
    assert report.scale == 0.0
    assert not report.finite
    assert not report.clipped
    assert not math.isfinite(report.norm_before)
    for old, p in zip(before, params, strict=True):
        torch.testing.assert_close(old, p.grad, equal_nan=True, rtol=0, atol=0)


def test_a_norm_that_overflows_fp16_still_clips() -> None:
    p = Parameter(torch.zeros(100, dtype=torch.float16))
    p.grad = torch.full((100,), 6e4, dtype=torch.float16)
    report = clip.clip_global_norm_([p], max_norm=100.0)
    assert report.norm_before == pytest.approx(6e5, rel=1e-3)
    assert p.grad[0].item() == pytest.approx(10.0, rel=1e-2)


@given(shapes=shapes, scale=st.floats(1e-3, 1e3), limit=st.floats(1e-3, 1e3), seed=st.integers(0, 99))
def test_value_is_torchs_bit_for_bit(shapes, scale, limit, seed) -> None:
    ours, theirs = (parameters(shapes, scale, seed) for _ in range(2))
    largest = max((p.grad.abs().max().item() for p in ours if p.numel()), default=0.0)
    torch.nn.utils.clip_grad_value_(theirs, limit)
    report = clip.clip_value_(ours, max_value=limit)
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a.grad, b.grad)
    assert report.clipped == (largest > torch.tensor(limit).item() or largest > limit)


def test_no_gradients_at_all() -> None:
    assert clip.clip_global_norm_([Parameter(torch.zeros(2))], max_norm=1.0).norm_before == 0.0
    assert clip.clip_value_([Parameter(torch.zeros(2))], max_value=1.0).norm_before == 0.0


@pytest.mark.parametrize("limit", [0.0, -1.0, math.nan])
def test_limits_that_mean_nothing(limit: float) -> None:
    with pytest.raises(steadystep.ConfigError):
        clip.clip_global_norm_([], max_norm=limit)
    with pytest.raises(steadystep.ConfigError):
        clip.clip_value_([], max_value=limit)


def test_limits_are_given_by_position_too_as_to_torch():
    ours, theirs = Parameter(torch.zeros(2)), Parameter(torch.zeros(2))
    ours.grad, theirs.grad = torch.tensor([3.0, 4.0]), torch.tensor([3.0, 4.0])
    assert clip.clip_global_norm_([ours], 1.0).norm_before == float(torch.nn.utils.clip_grad_norm_([theirs], 1.0))
    assert torch.equal(ours.grad, theirs.grad)
    clip.clip_value_([ours], 0.7)
    torch.nn.utils.clip_grad_value_([theirs], 0.7)
    assert torch.equal(ours.grad, theirs.grad)
