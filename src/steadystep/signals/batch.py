"""Is the batch itself finite? Looked at only after something went wrong."""

from typing import Any

import torch
from torch import Tensor

from steadystep.batch_tensors import tensors_in


def is_finite(batch: Any) -> bool | None:
    """False if any tensor inside holds NaN or infinity, True if none does, None if no number was found."""
    verdicts = [verdict for _, tensor in tensors_in(batch) if (verdict := _verdict(tensor)) is not None]
    return all(verdicts) if verdicts else None


def _verdict(tensor: Tensor) -> bool | None:
    try:
        if not (tensor.is_floating_point() or tensor.is_complex()) or tensor.device.type == "meta":
            return None
        plain = tensor.detach()
        if plain.layout is torch.sparse_coo:
            plain = plain.coalesce().values()
        elif plain.layout is torch.jagged:
            plain = plain.values()
        return bool(plain.isfinite().all())  # sync: only after trouble
    except Exception:  # why all: a layout, dtype or subclass that cannot be looked into says nothing
        return None
