"""Clipping by global L2 norm: g <- g * min(1, max_norm / (norm + 1e-6)), as torch.nn.utils.clip_grad_norm_."""

import math
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn import Parameter

from steadystep.clip.report import ClipReport
from steadystep.errors import ConfigError
from steadystep.norms import Layout, dense_values, layout_of, measure, total_norm, total_norm_in_half

EPSILON = 1e-6  # torch's


def clip_global_norm_(params: Iterable[Parameter], *, max_norm: float) -> ClipReport:
    """Scale gradients in place so that their global L2 norm is at most `max_norm`.

    Bit-identical to torch's function on finite gradients. On a non-finite norm the gradients are left as they are and
    `report.scale == 0.0` says: do not step. Costs one host read, which is the report.

    >>> weight = Parameter(torch.zeros(2))
    >>> weight.grad = torch.tensor([3.0, 4.0])
    >>> report = clip_global_norm_([weight], max_norm=1.0)
    >>> report.norm_before, report.clipped
    (5.0, True)
    >>> weight.grad
    tensor([0.6000, 0.8000])
    """
    if not max_norm > 0:
        raise ConfigError(f"max_norm = {max_norm!r}: must be greater than 0")
    grads = [p.grad for p in params if p.grad is not None]
    layout = layout_of(grads)
    norms = measure(grads, layout)
    norm = total_norm(norms, layout).item()  # sync: the report
    if not math.isfinite(norm):
        return ClipReport(norm_before=norm, scale=0.0, clipped=False, finite=False)
    scale = min(1.0, max_norm / (norm + EPSILON))
    if scale < 1.0 or layout.half:
        scale_by_norm_(grads, layout, norms, max_norm=max_norm)
    return ClipReport(norm_before=norm, scale=scale, clipped=scale < 1.0, finite=True)


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
        torch._foreach_mul_(group, factor.to(group[0].device) if isinstance(factor, Tensor) else factor)
