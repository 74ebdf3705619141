"""Bounded samples of many tensors, laid side by side so that a few kernels serve them all."""

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import final

import torch
from torch import Tensor

WHOLE = 4096
"""Tensors of up to this many elements are taken whole."""
_SPREAD = 1024  # elements of a larger one: an RMS is then off by 2 %
_WIDTH = 64
_HALVES = (torch.bfloat16, torch.float16)


@final
class Strips:
    """Where each tensor's sample lies in one flat tensor: in rows of 64 that belong to one tensor each.

    The last row of a small tensor is filled up with zeros. A NaN stays with its tensor.
    """

    def __init__(self, sizes: Sequence[int], device: torch.device) -> None:
        small = [i for i, size in enumerate(sizes) if size <= WHOLE]
        self._large = [i for i, size in enumerate(sizes) if size > WHOLE]
        self._small = [(i, torch.zeros(-sizes[i] % _WIDTH, device=device)) for i in small]
        lengths = [min(size, _SPREAD) if size > WHOLE else size for size in sizes]
        owners = [i for i in (*small, *self._large) for _ in range(-(-lengths[i] // _WIDTH))]
        self.lengths = torch.tensor(lengths, dtype=torch.float32).to(device, non_blocking=True)
        self._owners = torch.tensor(owners).to(device, non_blocking=True)

    def lay(self, tensors: Sequence[Tensor]) -> Tensor:
        """The samples as [rows, 64], at least in single precision."""
        parts = []
        for i, fill in self._small:
            tensor = tensors[i]
            parts.append(tensor if tensor.dim() == 1 else tensor.reshape(-1))
            if len(fill):
                parts.append(fill)
        if self._large:
            # why: one strided part would send the whole cat down its slow path
            parts.append(torch.cat([_spread(tensors[i]) for i in self._large]))
        rows = torch.cat(parts).view(-1, _WIDTH)
        return rows.float() if rows.dtype in _HALVES else rows

    def sums(self, quantities: Sequence[Tensor]) -> Tensor:
        """[quantities, tensors]: each [rows, 64] added up per tensor."""
        rows = torch.stack([quantity.sum(1) for quantity in quantities])
        return rows.new_zeros(len(quantities), len(self.lengths)).index_add_(1, self._owners, rows)

    def per_row(self, each: Tensor) -> Tensor:
        """One number per tensor, as a column that broadcasts over its rows."""
        return each[self._owners].unsqueeze(1)


def sample(tensor: Tensor) -> Tensor:
    """A small tensor whole, evenly spread elements of a large one; flat."""
    return tensor.reshape(-1) if tensor.numel() <= WHOLE else _spread(tensor)


def is_plain(tensor: Tensor) -> bool:
    """Dense and real."""
    return tensor.layout is torch.strided and tensor.is_floating_point()


def _spread(tensor: Tensor) -> Tensor:
    size = tensor.numel()
    stride = _stride(size)
    if tensor.is_contiguous():
        return tensor.as_strided((_SPREAD,), (stride,))
    where = torch.arange(0, _SPREAD * stride, stride, device=tensor.device)
    return tensor[torch.unravel_index(where, tensor.shape)]


@lru_cache(maxsize=4096)
def _stride(size: int) -> int:
    """Shares no factor with the size, so the sample visits all rows and columns and not the same few."""
    stride = size // _SPREAD
    while math.gcd(stride, size) > 1:
        stride -= 1
    return stride
