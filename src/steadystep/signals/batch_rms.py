"""How large the numbers of a batch are: enough to see one of another scale, or the same one again.

The first tensor of real numbers counts; a batch without one is known by its whole numbers (tokens). Of large batches a
sample is looked at, and of containers the first parts, so that the cost does not grow with them.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from steadystep.clip.sharded import is_sharded

_MOST = 1 << 14  # elements that are looked at
_MOST_PARTS = 64  # of containers
_WHOLE = (torch.int64, torch.int32, torch.int16, torch.uint8, torch.int8)


def batch_rms(batch: Any) -> Tensor | None:
    """Root mean square of the batch, on its device; None where there is nothing to measure."""
    tensor = _find(batch)
    if tensor is None:
        return None
    try:
        return _rms(tensor.detach())
    except (RuntimeError, NotImplementedError):  # why: a dtype that torch cannot look into
        return None


def _rms(tensor: Tensor) -> Tensor:
    if tensor.numel() > _MOST:  # every n-th of each dimension: a view, whatever the strides
        every = int((tensor.numel() / _MOST) ** (1.0 / tensor.dim())) + 1
        tensor = tensor[tuple(slice(None, None, every) for _ in range(tensor.dim()))]
    if not tensor.is_floating_point():
        tensor = tensor.float()
    dtype = torch.float32 if tensor.dtype in (torch.float16, torch.bfloat16) else None
    norm: Tensor = torch.linalg.vector_norm(tensor, dtype=dtype)
    return norm.mul(tensor.numel() ** -0.5)


def _find(batch: Any) -> Tensor | None:
    """The first tensor of real numbers, else the first of whole ones."""
    waiting, whole = [batch], None
    for _ in range(_MOST_PARTS):
        if not waiting:
            break
        part = waiting.pop()
        if isinstance(part, Tensor):
            if part.layout is not torch.strided or not part.numel() or part.device.type == "meta" or is_sharded(part):
                continue
            if part.is_floating_point():
                return part
            whole = part if whole is None and part.dtype in _WHOLE else whole
        elif isinstance(part, Mapping):
            waiting.extend(reversed(list(part.values())[:_MOST_PARTS]))
        elif isinstance(part, list | tuple):
            waiting.extend(reversed(part[:_MOST_PARTS]))
    return whole
