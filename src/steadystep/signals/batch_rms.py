"""One number for a batch: enough to see one of another scale, or the same one again.

The first tensor of real numbers counts, by its root mean square. A batch without one (token ids) is known by its whole
numbers; those have no scale, so it is the logarithm that counts. Of large batches a sample is looked at, and of
containers the first parts, so that the cost does not grow with them.
"""

from typing import Any

import torch
from torch import Tensor

from steadystep.batch_tensors import is_readable, tensors_in

_MOST = 1 << 14  # elements that are looked at
_MOST_PARTS = 64  # of containers
_PIXELS = (torch.uint8, torch.int8)
_IDS = (torch.int64, torch.int32, torch.int16)


def batch_rms(batch: Any) -> Tensor | None:
    """Root mean square of the batch, on its device; None where there is nothing to measure."""
    try:
        tensor = _find(batch)
        return None if tensor is None else _rms(tensor.detach())
    except Exception:  # why all: a dtype or a subclass that cannot be looked into must not cost the step
        return None


def _rms(tensor: Tensor) -> Tensor:
    if tensor.numel() > _MOST:  # every n-th of each dimension: a view, whatever the strides
        every = int((tensor.numel() / _MOST) ** (1.0 / tensor.dim())) + 1
        tensor = tensor[tuple(slice(None, None, every) for _ in range(tensor.dim()))]
    ids = tensor.dtype in _IDS
    if not tensor.is_floating_point():
        tensor = tensor.float()
    dtype = torch.float32 if tensor.dtype in (torch.float16, torch.bfloat16) else None
    norm: Tensor = torch.linalg.vector_norm(tensor, dtype=dtype)
    rms = norm.mul(tensor.numel() ** -0.5)
    return rms.log1p() if ids else rms


def _find(batch: Any) -> Tensor | None:
    """The first tensor of real numbers, else the first of whole ones. A tensor without dimensions is no batch."""
    whole = None
    for _, tensor in tensors_in(batch, most_parts=_MOST_PARTS):
        if not tensor.dim() or not is_readable(tensor):
            continue
        if tensor.is_floating_point():
            return tensor
        whole = tensor if whole is None and tensor.dtype in (*_PIXELS, *_IDS) else whole
    return whole
