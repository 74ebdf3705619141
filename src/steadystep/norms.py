"""Gradient norms in one pass: per tensor and global, bit-equal to what `torch.nn.utils.clip_grad_norm_` computes.

Nothing here asks for `no_grad`: gradients do not require gradients, and entering the context costs as much as a norm.
"""

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor
from torch.utils._foreach_utils import _group_tensors_by_device_and_dtype

_HALVES = (torch.bfloat16, torch.float16)


@final
@dataclass(frozen=True, slots=True)
class Layout:
    """How a list of gradients is grouped; made once, reused while the list keeps its shape."""

    num_tensors: int
    first: tuple[torch.device, torch.dtype] | None
    groups: tuple[tuple[int, ...], ...]
    """Positions by device and dtype, in the order torch's own clipping visits them."""
    half: bool
    sparse: bool

    def fits(self, grads: list[Tensor]) -> bool:
        """Cheap test that `grads` still looks like what this layout was made from."""
        return len(grads) == self.num_tensors and (not grads or (grads[0].device, grads[0].dtype) == self.first)


def layout_of(grads: list[Tensor]) -> Layout:
    """Group `grads` by device and dtype."""
    grouped = _group_tensors_by_device_and_dtype([[*grads]], with_indices=True) if grads else {}
    return Layout(
        num_tensors=len(grads),
        first=(grads[0].device, grads[0].dtype) if grads else None,
        groups=tuple(tuple(positions) for _, positions in grouped.values()),
        half=any(dtype in _HALVES for _, dtype in grouped),
        sparse=any(g.is_sparse for g in grads),
    )


def dense_values(grads: list[Tensor], layout: Layout, *, coalesce: bool = False) -> list[Tensor]:
    """Sparse gradients as their value tensors (aliases unless `coalesce`), everything else as it is."""
    if not layout.sparse:
        return grads
    return [(g.coalesce() if coalesce else g)._values() if g.is_sparse else g for g in grads]


def measure(grads: list[Tensor], layout: Layout) -> list[Tensor]:
    """The L2 norm of each gradient, in their order, on the first one's device, without a host read.

    Half-precision gradients are measured in fp32: a norm held in fp16 overflows at 65504.
    """
    if not grads:
        return []
    values = dense_values(grads, layout, coalesce=True)
    if len(layout.groups) == 1:
        return list(
            torch._foreach_norm(values, 2.0, torch.float32) if layout.half else torch._foreach_norm(values, 2.0)
        )
    norms: list[Tensor | None] = [None] * len(grads)
    for positions in layout.groups:
        group = [values[i] for i in positions]
        dtype = torch.float32 if group[0].dtype in _HALVES else None
        for position, norm in zip(positions, torch._foreach_norm(group, 2.0, dtype), strict=True):
            norms[position] = norm.to(grads[0].device)
    return [norm for norm in norms if norm is not None]


def peaks(tensors: list[Tensor]) -> list[Tensor]:
    """The largest absolute value of each, NaN where it holds one; on their device. An L2 norm may overflow."""
    if not all(tensor.is_cpu for tensor in tensors):
        return list(torch._foreach_norm(tensors, torch.inf))
    # why: on the host torch's infinity norm goes element by element, and takes fourteen times as long
    ends = [torch.aminmax(tensor) for tensor in tensors]
    lowest, highest = torch.stack([end.min for end in ends]), torch.stack([end.max for end in ends])
    return list(torch.maximum(lowest.neg(), highest).unbind())


def total_norm(norms: list[Tensor], layout: Layout) -> Tensor:
    """The global norm from the norms of the parts, added up in the order torch's clipping uses."""
    if not norms:
        return torch.zeros(())
    ordered = norms if len(layout.groups) == 1 else [norms[i] for positions in layout.groups for i in positions]
    total: Tensor = torch.linalg.vector_norm(torch.stack(ordered), 2.0)
    return total


def total_norm_in_half(grads: list[Tensor], layout: Layout) -> Tensor:
    """The global norm as torch's clipping has it for half-precision gradients: rounded. Costs a second pass."""
    values = dense_values(grads, layout, coalesce=True)
    norms = [norm for positions in layout.groups for norm in torch._foreach_norm([values[i] for i in positions], 2.0)]
    total: Tensor = torch.linalg.vector_norm(torch.stack([norm.to(grads[0].device) for norm in norms]), 2.0)
    return total
