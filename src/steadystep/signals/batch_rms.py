"""How large the numbers of a batch are: enough to see one of another scale, or the same one again.

The first tensor of real numbers counts; a batch without one is known by its whole numbers (tokens). Large batches are
looked at in a sample, so that the cost does not grow with them: about 3 µs.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

_MOST = 1 << 16  # elements that are looked at
_WHOLE = (torch.int64, torch.int32, torch.int16, torch.uint8, torch.int8)
_DEEPEST = 8  # a container that holds itself


def batch_rms(batch: Any) -> Tensor | None:
    """Root mean square of the batch, on its device; None where there is nothing to measure."""
    tensor = _find(batch, 0, real=True)
    if tensor is None:
        tensor = _find(batch, 0, real=False)
    if tensor is None:
        return None
    try:
        return _rms(tensor.detach())
    except (RuntimeError, NotImplementedError):  # why: a layout or dtype that torch cannot look into
        return None


def _rms(tensor: Tensor) -> Tensor:
    count = tensor.numel()
    if count > _MOST:
        tensor = tensor.reshape(-1)[:: count // _MOST]
        count = tensor.numel()
    if not tensor.is_floating_point():
        tensor = tensor.float()
    dtype = torch.float32 if tensor.dtype in (torch.float16, torch.bfloat16) else None
    norm: Tensor = torch.linalg.vector_norm(tensor, dtype=dtype)
    return norm.mul(count**-0.5)


def _find(item: Any, depth: int, *, real: bool) -> Tensor | None:
    if isinstance(item, Tensor):
        fits = item.is_floating_point() if real else item.dtype in _WHOLE
        return item if fits and item.layout is torch.strided and item.numel() > 0 else None
    if depth > _DEEPEST:
        return None
    if isinstance(item, Mapping):
        item = list(item.values())
    if isinstance(item, list | tuple):
        for part in item:
            found = _find(part, depth + 1, real=real)
            if found is not None:
                return found
    return None
