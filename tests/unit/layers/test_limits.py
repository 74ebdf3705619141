"""Soft cap, z-loss and gradient shrink."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import steadystep
from steadystep.layers import shrink_gradient, softcap, z_loss

numbers = st.floats(-1e6, 1e6, width=32)


@given(x=st.lists(numbers, min_size=1, max_size=9), cap=st.floats(0.1, 1e4))
def test_softcap_is_bounded_monotone_odd_and_nearly_the_identity_near_zero(x: list[float], cap: float) -> None:
    values = torch.tensor(x, dtype=torch.float64).sort().values
    capped = softcap(values, cap)
    assert (capped.abs() <= cap).all()
    assert (capped.diff() >= 0).all()
    assert torch.equal(softcap(-values, cap), -capped)
    for value, got in zip(values.tolist(), capped.tolist(), strict=True):
        assert got == pytest.approx(cap * math.tanh(value / cap), rel=1e-9, abs=1e-12)
        if abs(value) < 0.01 * cap:
            assert got == pytest.approx(value, rel=1e-4)


def test_softcap_of_infinity_is_the_cap() -> None:
    x = torch.tensor([math.inf, -math.inf, 3.0], requires_grad=True)
    out = softcap(x, 50.0)
    assert out[:2].tolist() == [50.0, -50.0]
    out.sum().backward()
    assert x.grad[:2].tolist() == [0.0, 0.0]


@given(rows=st.integers(1, 4), columns=st.integers(1, 6), seed=st.integers(0, 99), coefficient=st.floats(0, 10))
def test_z_loss_is_the_formula(rows: int, columns: int, seed: int, coefficient: float) -> None:
    logits = 5 * torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    expected = sum(math.log(sum(math.exp(v) for v in row)) ** 2 for row in logits.tolist()) / rows
    assert z_loss(logits, coefficient).item() == pytest.approx(coefficient * expected, rel=1e-4, abs=1e-5)


def test_z_loss_in_half_precision_is_computed_in_fp32() -> None:
    logits = torch.full((2, 4), 300.0, dtype=torch.float16)
    assert z_loss(logits, 1.0).item() == pytest.approx((300 + math.log(4)) ** 2, rel=1e-5)  # beyond 65504


def test_z_loss_pulls_log_z_towards_zero() -> None:
    logits = torch.tensor([[8.0, 9.0, 7.0]], requires_grad=True)
    for _ in range(300):
        (gradient,) = torch.autograd.grad(z_loss(logits, 1.0), logits)
        logits = (logits - 0.2 * gradient).detach().requires_grad_()
    assert abs(logits.logsumexp(-1).item()) < 0.05


def test_z_loss_leaves_masked_positions_out_even_infinite_ones() -> None:
    logits = torch.randn(2, 3, 5)
    mask = torch.tensor([[True, True, False], [True, False, False]])
    expected = z_loss(logits[mask])
    logits[~mask] = math.inf
    logits.requires_grad_()
    out = z_loss(logits, mask=mask)
    assert out.item() == pytest.approx(expected.item(), rel=1e-5)
    assert z_loss(logits, mask=torch.zeros_like(mask)).item() == 0.0


@given(x=st.lists(numbers, min_size=1, max_size=9), alpha=st.floats(0, 1))
def test_shrink_gradient_is_the_identity_with_a_smaller_gradient(x: list[float], alpha: float) -> None:
    values = torch.tensor([*x, -0.0, math.inf], requires_grad=True)
    upstream = torch.arange(1.0, values.numel() + 1)
    out = shrink_gradient(values, alpha)
    assert torch.equal(out, values)
    assert torch.equal(out.signbit(), values.signbit())
    out.backward(upstream)
    assert torch.equal(values.grad, upstream * alpha)


def test_shrink_gradient_keeps_its_input_apart_and_works_under_transforms() -> None:
    x = torch.ones(3)
    assert shrink_gradient(x, 0.5).dtype == x.dtype
    gradient = torch.func.grad(lambda v: (shrink_gradient(v, 0.5) ** 2).sum())
    assert torch.equal(gradient(x), torch.ones(3))
    assert torch.equal(torch.vmap(gradient)(torch.ones(2, 3)), torch.ones(2, 3))
    weight = torch.ones(2, requires_grad=True)
    (first,) = torch.autograd.grad(shrink_gradient(weight, 0.5).pow(3).sum(), weight, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), weight)
    assert second.tolist() == [1.5, 1.5]  # alpha^2 * 6 w: the second derivative goes through the shrink twice


@pytest.mark.parametrize(
    "call",
    [
        lambda: softcap(torch.ones(1), 0.0),
        lambda: softcap(torch.ones(1), math.inf),
        lambda: z_loss(torch.ones(1, 2), -1.0),
        lambda: shrink_gradient(torch.ones(1), 1.5),
        lambda: shrink_gradient(torch.ones(1), math.nan),
    ],
)
def test_numbers_that_mean_nothing(call) -> None:
    with pytest.raises(steadystep.ConfigError):
        call()
