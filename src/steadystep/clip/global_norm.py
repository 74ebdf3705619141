"""Clipping by global L2 norm: g <- g * min(1, max_norm / (norm + 1e-6)), as torch.nn.utils.clip_grad_norm_.

Pascanu, Mikolov, Bengio: On the difficulty of training recurrent neural networks, 2013, arXiv:1211.5063.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Self, final

import numpy as np
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils._foreach_utils import _group_tensors_by_device_and_dtype

from steadystep._utils import tensors
from steadystep._utils.tensors import Layout, dense_values, layout_of, measure, total_norm, total_norm_in_half
from steadystep.clip import largest_over_ranks, norms_over_ranks
from steadystep.errors import ConfigError, MisuseError, UnsupportedError

Params = Iterable[Parameter] | Iterable[tuple[str, Parameter]] | Parameter
"""What every clip accepts: `model.parameters()`, `model.named_parameters()` or a single parameter."""

_WANTED = "expected parameters: pass model.parameters(), model.named_parameters() or one parameter"
_HALVES = (torch.bfloat16, torch.float16)


def gradients_of(params: Params) -> list[Tensor]:
    """The gradients there are, in order."""
    found = _listed(params)
    if found and isinstance(found[0], tuple):
        found = [parameter for _, parameter in found]
    try:
        return [grad for parameter in found if (grad := parameter.grad) is not None]
    except AttributeError:
        raise MisuseError(f"{_WANTED}, got {type(params).__name__} of something else") from None


def named(params: Params) -> dict[str, Parameter]:
    """The parameters by name, or by position if they came without; one that comes twice is counted once."""
    found = _listed(params)
    seen: set[int] = set()
    result: dict[str, Parameter] = {}
    for position, item in enumerate(found):
        name, parameter = item if isinstance(item, tuple) else (str(position), item)
        if id(parameter) not in seen:
            seen.add(id(parameter))
            result[name] = parameter
    return result


def _listed(params: Params) -> list[Any]:
    if isinstance(params, Tensor):
        return [params]
    if not isinstance(params, Iterable):
        raise MisuseError(f"{_WANTED}, got {type(params).__name__}")
    return list(params)


@final
@dataclass(frozen=True, slots=True)
class Measured:
    """Gradients as plain tensors this rank may write to, with their norms over all ranks still on the device."""

    grads: list[Tensor]
    parts: list[Tensor]
    layout: Layout
    norms: list[Tensor]

    def total(self) -> Tensor:
        """The global norm."""
        return total_norm(self.norms, self.layout)


def measured(grads: list[Tensor], *, rounded: bool = False) -> Measured:
    """One pass over the gradients. Half precision is measured in fp32, or `rounded` as torch's own clipping does."""
    if tensors.is_sharded(grads):
        parts = [tensors.local_part(grad) for grad in grads]
        upcast = [None if rounded or grad.dtype not in _HALVES else torch.float32 for grad in grads]
        return Measured(grads, parts, layout_of(parts), norms_over_ranks(grads, upcast))
    norms_of = _rounded_norms if rounded else measure
    layout = _layout_if_alike(grads)
    if layout is not None:
        try:
            return Measured(grads, grads, layout, norms_of(grads, layout))
        except NotImplementedError:  # one of them is sparse; asking each would cost everybody else
            pass
    layout = layout_of(grads)
    return Measured(grads, grads, layout, norms_of(grads, layout))


def _rounded_norms(grads: list[Tensor], layout: Layout) -> list[Tensor]:
    if not layout.half:
        return measure(grads, layout)
    values = dense_values(grads, layout, coalesce=True)
    if len(layout.groups) == 1:
        return list(torch._foreach_norm(values, 2.0))
    norms: dict[int, Tensor] = {}
    for positions in layout.groups:
        norms.update(zip(positions, torch._foreach_norm([values[i] for i in positions], 2.0), strict=True))
    return [norms[i].to(grads[0].device) for i in range(len(grads))]


def _layout_if_alike(grads: list[Tensor]) -> Layout | None:
    # Nearly every model: one dtype on one device. Sorting the positions would cost a tenth of the norms themselves.
    if not grads or len(_group_tensors_by_device_and_dtype([[*grads]])) != 1:
        return None
    device, dtype = grads[0].device, grads[0].dtype
    return Layout(len(grads), (device, dtype), (tuple(range(len(grads))),), half=dtype in _HALVES, sparse=False)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ClipReport:
    """What a clip measured and did. `scale == 0.0` means: do not step, the gradients are not finite and were unchanged.

    >>> report = ClipReport(norm_before=5.0, scale=0.2, clipped=True, finite=True)
    >>> report.norm_before * report.scale
    1.0
    >>> ClipReport.refused(float("nan")).scale
    0.0
    """

    norm_before: float
    """Global L2 norm before clipping."""
    scale: float
    """Factor on the gradients; with a factor per tensor (`agc_`, `TensorEMAClip`) the global norm after ÷ before.
    `clip_value_` reports 1.0."""
    clipped: bool
    """Whether any gradient was changed."""
    finite: bool
    """Whether all gradients were finite."""

    @classmethod
    def refused(cls, norm: float) -> Self:
        """Return the report for a `norm` that is not finite."""
        return cls(norm_before=norm, scale=0.0, clipped=False, finite=False)

    @classmethod
    def scaled(cls, norm: float, scale: float) -> Self:
        """Return the report for finite gradients of this `norm`, multiplied by `scale`."""
        return cls(norm_before=norm, scale=scale, clipped=scale < 1.0, finite=True)


EPSILON = 1e-6  # torch's

_MARGIN = 1.01  # torch adds up in the gradients' dtype, bf16 to two digits; nearer to the limit its arithmetic decides


def clip_global_norm_(params: Params, max_norm: float) -> ClipReport:
    """Scale gradients in place so that their global L2 norm is at most `max_norm`.

    Bit-identical to torch's function on finite gradients. A non-finite norm leaves the gradients as they are. Costs one
    host read.

    Args:
        params: parameters, named parameters or a single parameter.
        max_norm: the largest norm; `math.inf` only measures.

    Returns:
        The norm before and the factor applied; `scale == 0.0` means: do not step.

    >>> weight = torch.nn.Parameter(torch.zeros(2))
    >>> weight.grad = torch.tensor([3.0, 4.0])
    >>> report = clip_global_norm_([weight], max_norm=1.0)
    >>> report.norm_before, report.clipped
    (5.0, True)
    >>> weight.grad
    tensor([0.6000, 0.8000])
    """
    _check_limit("max_norm", max_norm)
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
def scale_by_norm_(
    grads: list[Tensor],
    layout: Layout,
    norms: list[Tensor],
    *,
    max_norm: float,
    stacked: Tensor | None = None,
    is_above: bool = False,
) -> None:
    """Scale by norms already measured, with torch's bits; `is_above`: the norm is known to exceed `max_norm`."""
    if not grads:
        return
    factor = _factor(total_norm(norms, layout, stacked), max_norm, is_above=is_above and not layout.half)
    if layout.half:
        rounded = total_norm_in_half(grads, layout)
        # why: a half-precision norm that overflows would make torch zero every gradient
        factor = torch.where(torch.isfinite(rounded), _factor(rounded, max_norm).to(factor.dtype), factor)
    multiply_(grads, layout, factor)


def _factor(total: Tensor, max_norm: float, *, is_above: bool = False) -> Tensor:
    # why: torch divides a number by a tensor as reciprocal times number, and a product with 1 is a launch for nothing
    factor = (total + EPSILON).reciprocal() if max_norm == 1.0 else max_norm / (total + EPSILON)
    return factor if is_above else torch.clamp(factor, max=1.0)


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


def clip_value_(params: Params, max_value: float) -> ClipReport:
    """Clamp gradient elements in place.

    A non-finite gradient is left as it is: clamping would turn an infinity into a number that looks healthy.

    Args:
        params: parameters, named parameters or a single parameter.
        max_value: elements are clamped to [-max_value, max_value].

    Returns:
        `clipped` tells whether any element was beyond the limit; `scale == 0.0` means: do not step.

    >>> weight = torch.nn.Parameter(torch.zeros(2))
    >>> weight.grad = torch.tensor([3.0, -0.5])
    >>> clip_value_([weight], max_value=1.0).clipped
    True
    >>> weight.grad
    tensor([ 1.0000, -0.5000])
    """
    _check_limit("max_value", max_value)
    grads = gradients_of(params)
    tensors.refuse_unreduced(grads, "clipping by value")
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
        raise UnsupportedError("clipping by value is not supported for complex gradients: clip by norm instead")
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
    return largest_over_ranks(peak, seen.grads) if seen.parts is not seen.grads else peak


def _check_limit(key: str, value: object) -> None:
    """A number above 0; infinity only measures."""
    if not isinstance(value, float | int | Tensor | np.number) or not value > 0:
        raise ConfigError(f"{key} = {value!r}: must be a number greater than 0")
