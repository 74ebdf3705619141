"""Clipping by norms that were measured before: torch's bits, with no launch more than they need."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from steadystep._utils.tensors import layout_of, measure
from steadystep.clip.global_norm import scale_by_norm_


class Launches(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def gradients(scale: float) -> list[torch.Tensor]:
    rng = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=rng) * scale for shape in ((3, 4), (7,), (2, 2, 2))]


def clipped(grads: list[torch.Tensor], max_norm: float, *, is_above: bool) -> list[torch.Tensor]:
    ours = [grad.clone() for grad in grads]
    layout = layout_of(ours)
    scale_by_norm_(ours, layout, measure(ours, layout), max_norm=max_norm, is_above=is_above)
    return ours


def torchs(grads: list[torch.Tensor], max_norm: float) -> list[torch.Tensor]:
    parameters = [torch.nn.Parameter(torch.zeros_like(grad)) for grad in grads]
    for parameter, grad in zip(parameters, grads, strict=True):
        parameter.grad = grad.clone()
    torch.nn.utils.clip_grad_norm_(parameters, max_norm)
    return [parameter.grad for parameter in parameters]


@given(st.floats(1e-3, 1e4), st.sampled_from([1.0, 0.5, 3.0, 0.1]))
def test_the_bits_are_torchs(scale: float, max_norm: float) -> None:
    grads = gradients(scale)
    is_above = math.hypot(*(float(grad.norm()) for grad in grads)) > 1.0001 * max_norm
    for ours, theirs in zip(clipped(grads, max_norm, is_above=is_above), torchs(grads, max_norm), strict=True):
        assert torch.equal(ours, theirs)


def test_a_norm_below_the_limit_is_bounded() -> None:
    grads = gradients(1e-3)
    for ours, theirs in zip(clipped(grads, 1.0, is_above=False), grads, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    ("max_norm", "is_above", "count"), [(1.0, True, 4), (1.0, False, 5), (2.0, True, 5), (2.0, False, 6)]
)
def test_launches(max_norm: float, is_above: bool, count: int) -> None:
    grads = gradients(10.0)
    layout = layout_of(grads)
    norms = measure(grads, layout)
    stacked = torch.stack(norms)
    with Launches() as launches:
        scale_by_norm_(grads, layout, norms, max_norm=max_norm, stacked=stacked, is_above=is_above)
    assert len(launches.seen) == count, launches.seen
