"""Gradient norms in one pass: per tensor and global, bit-equal to what `torch.nn.utils.clip_grad_norm_` computes."""

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


@final
@dataclass(frozen=True, slots=True)
class Norms:
    """Still on the device: reading them is up to the caller."""

    each: Tensor
    """One norm per gradient, in their order."""
    total: Tensor
    """The global norm, exact."""
    clip_total: Tensor
    """The same as torch's clipping holds it: `total` itself, or rounded for half-precision gradients."""


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


@torch.no_grad()
def measure(grads: list[Tensor], layout: Layout, *, for_clipping: bool) -> Norms:
    """Per-tensor norms and the global one, without a host read.

    Half-precision gradients are measured in fp32: a norm held in fp16 overflows at 65504. Torch's clipping does hold
    it in half, so `clip_total` then costs a second pass, and only `for_clipping`.
    """
    if not grads:
        zero = torch.zeros(())
        return Norms(zero.reshape(1)[:0], zero, zero)
    values = dense_values(grads, layout, coalesce=True)
    if len(layout.groups) == 1:
        each = torch.stack(torch._foreach_norm(values, 2.0, torch.float32 if layout.half else None))
        total = torch.linalg.vector_norm(each, 2.0)
        if not (layout.half and for_clipping):
            return Norms(each, total, total)
        rounded = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(values, 2.0)), 2.0)
        return Norms(each, total, rounded)
    exact = _in_order(_by_group(values, layout, wide=True), layout)
    total = torch.linalg.vector_norm(torch.stack([exact[i] for group in layout.groups for i in group]), 2.0)
    each = torch.stack(exact)
    if not (layout.half and for_clipping):
        return Norms(each, total, total)
    flat = [norm for group in _by_group(values, layout, wide=False) for norm in group]
    rounded = torch.linalg.vector_norm(torch.stack([n.to(total.device) for n in flat]), 2.0)
    return Norms(each, total, rounded)


def _by_group(values: list[Tensor], layout: Layout, *, wide: bool) -> list[list[Tensor]]:
    result = []
    for positions in layout.groups:
        tensors = [values[i] for i in positions]
        widen = wide and tensors[0].dtype in _HALVES
        result.append(list(torch._foreach_norm(tensors, 2.0, torch.float32 if widen else None)))
    return result


def _in_order(by_group: list[list[Tensor]], layout: Layout) -> list[Tensor]:
    assert layout.first is not None
    placed = {
        position: norm.to(layout.first[0])
        for positions, norms in zip(layout.groups, by_group, strict=True)
        for position, norm in zip(positions, norms, strict=True)
    }
    return [placed[i] for i in range(layout.num_tensors)]
