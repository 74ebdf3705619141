"""Clipping by value: every gradient element into [-limit, limit], as torch.nn.utils.clip_grad_value_."""

import math

import torch
from torch import Tensor

from steadystep.clip import sharded
from steadystep.clip.checks import limit
from steadystep.clip.gradients import Measured, Params, gradients_of, measured
from steadystep.clip.report import ClipReport
from steadystep.errors import UnsupportedError
from steadystep.norms import Layout, dense_values


def clip_value_(params: Params, max_value: float) -> ClipReport:
    """Clamp gradient elements in place.

    A non-finite gradient is left as it is (`report.scale == 0.0`: do not step); clamping would turn an infinity into a
    number that looks healthy. `clipped` says whether any element was beyond the limit.

    >>> weight = torch.nn.Parameter(torch.zeros(2))
    >>> weight.grad = torch.tensor([3.0, -0.5])
    >>> clip_value_([weight], max_value=1.0).clipped
    True
    >>> weight.grad
    tensor([ 1.0000, -0.5000])
    """
    limit("max_value", max_value)
    grads = gradients_of(params)
    sharded.refuse_unreduced(grads, "clipping by value")
    seen = measured(grads)
    total = seen.total()
    norm, peak = torch.stack([total, _largest(seen).to(total)]).tolist()  # sync: the report
    if not math.isfinite(norm):
        return ClipReport.refused(norm)
    clamp_(seen.parts, seen.layout, max_value=max_value)
    return ClipReport(norm_before=norm, scale=1.0, clipped=peak > max_value, finite=True)


@torch.no_grad()
def clamp_(grads: list[Tensor], layout: Layout, *, max_value: float) -> None:
    """Clamp every element; complex gradients have no order to clamp by."""
    if any(g.is_complex() for g in grads):
        raise UnsupportedError("clipping by value is not defined for complex gradients: clip by norm instead")
    for grad in grads if layout.sparse else ():
        if grad.is_sparse and not grad.is_coalesced():  # why: the sum of two clamped parts may exceed the limit
            grad.copy_(grad.coalesce())
    values = dense_values(grads, layout)
    for positions in layout.groups:
        group = [values[i] for i in positions]
        torch._foreach_clamp_min_(group, -max_value)
        torch._foreach_clamp_max_(group, max_value)


@torch.no_grad()
def _largest(seen: Measured) -> Tensor:
    filled = [v for v in dense_values(seen.parts, seen.layout, coalesce=True) if v.numel()]
    peaks = [torch.linalg.vector_norm(v, torch.inf) for v in filled]
    # why: a rank whose shards are all empty takes part in the collective like every other
    peak = torch.stack([p.to(peaks[0].device) for p in peaks]).max() if peaks else torch.zeros(())
    return sharded.largest_over_ranks(peak, seen.grads) if seen.parts is not seen.grads else peak
