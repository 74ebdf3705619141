"""Clipping by global L2 norm: g <- g * min(1, max_norm / (norm + 1e-6)), as torch.nn.utils.clip_grad_norm_.

Pascanu, Mikolov, Bengio: On the difficulty of training recurrent neural networks, 2013, arXiv:1211.5063.
"""

import math

import torch
from torch import Tensor

from steadystep.clip.checks import limit
from steadystep.clip.gradients import Params, gradients_of, measured
from steadystep.clip.report import ClipReport
from steadystep.norms import Layout, dense_values, total_norm, total_norm_in_half

EPSILON = 1e-6  # torch's

_MARGIN = 1.01  # torch adds up in the gradients' dtype, bf16 to two digits; nearer to the limit its arithmetic decides


def clip_global_norm_(params: Params, max_norm: float) -> ClipReport:
    """Scale gradients in place so that their global L2 norm is at most `max_norm`.

    Bit-identical to torch's function on finite gradients, the norm included: in half precision it has torch's two or
    three digits. On a non-finite norm the gradients are left as they are and `report.scale == 0.0` says: do not step.
    Costs one host read, which is the report. With `max_norm=math.inf` it only measures.

    >>> weight = torch.nn.Parameter(torch.zeros(2))
    >>> weight.grad = torch.tensor([3.0, 4.0])
    >>> report = clip_global_norm_([weight], max_norm=1.0)
    >>> report.norm_before, report.clipped
    (5.0, True)
    >>> weight.grad
    tensor([0.6000, 0.8000])
    """
    limit("max_norm", max_norm)
    seen = measured(gradients_of(params), rounded=True)
    total = seen.total()
    norm = total.item()  # sync: the report
    if seen.layout.half and not math.isfinite(norm):  # fp16 holds no norm above 65504, and torch would step with zeros
        seen = measured(seen.grads)
        total = seen.total()
        norm = total.item()  # sync: only then
    if not math.isfinite(norm):
        return ClipReport.refused(norm)
    if seen.grads and norm * _MARGIN + EPSILON >= max_norm:
        multiply_(seen.parts, seen.layout, _factor(total, max_norm))
    return ClipReport.scaled(norm, min(1.0, max_norm / (norm + EPSILON)))


@torch.no_grad()
def scale_by_norm_(grads: list[Tensor], layout: Layout, norms: list[Tensor], *, max_norm: float) -> None:
    """Scale by norms already measured, in torch's arithmetic: on the device, in the dtype torch would hold them."""
    if not grads:
        return
    factor = _factor(total_norm(norms, layout), max_norm)
    if layout.half:
        rounded = total_norm_in_half(grads, layout)
        # why: a half-precision norm that overflows would make torch zero every gradient
        factor = torch.where(torch.isfinite(rounded), _factor(rounded, max_norm).to(factor.dtype), factor)
    multiply_(grads, layout, factor)


def _factor(total: Tensor, max_norm: float) -> Tensor:
    return torch.clamp(max_norm / (total + EPSILON), max=1.0)


@torch.no_grad()
def multiply_(grads: list[Tensor], layout: Layout, factor: Tensor | float) -> None:
    """Multiply every gradient by `factor`, a number or a tensor without dimensions."""
    values = dense_values(grads, layout)
    for positions in layout.groups:
        group = values if len(positions) == len(values) else [values[i] for i in positions]
        torch._foreach_mul_(group, _cheapest(factor, group[0]))


def _cheapest(factor: Tensor | float, like: Tensor) -> Tensor | float:
    if isinstance(factor, Tensor):
        return factor.to(like.device)
    # why: on a CPU a number costs four times as much as a tensor, and is rounded first if the gradients are bf16
    return torch.tensor(factor, dtype=torch.float64) if like.is_cpu else factor


@torch.no_grad()
def multiply_each_(grads: list[Tensor], layout: Layout, factors: list[float]) -> None:
    """Multiply every gradient by a factor of its own; those with a factor of 1 are not touched."""
    values = dense_values(grads, layout)
    for positions in layout.groups:
        scaled = [i for i in positions if factors[i] != 1.0]
        if scaled:
            group, numbers = [values[i] for i in scaled], [factors[i] for i in scaled]
            on_cpu = group[0].is_cpu
            torch._foreach_mul_(group, torch.tensor(numbers, dtype=torch.float64).unbind() if on_cpu else numbers)
