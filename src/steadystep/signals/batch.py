"""Is the batch itself finite? Looked at only after something went wrong."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def is_finite(batch: Any) -> bool | None:
    """False if any tensor inside holds NaN or infinity, True if none does, None if no number was found."""
    verdicts = [verdict for verdict in _verdicts(batch, depth=0) if verdict is not None]
    return all(verdicts) if verdicts else None


def _verdicts(item: Any, *, depth: int) -> list[bool | None]:
    if isinstance(item, Tensor):
        if not (item.is_floating_point() or item.is_complex()):
            return [None]
        values = item.detach().coalesce().values() if item.layout is torch.sparse_coo else item.detach()
        try:
            return [bool(values.isfinite().all())]  # sync: only after trouble
        except (NotImplementedError, RuntimeError):  # a layout or dtype that torch cannot look into
            return [None]
    if depth > 8:  # why: a container that holds itself
        return []
    if isinstance(item, Mapping):
        item = list(item.values())
    if isinstance(item, list | tuple):
        return [v for part in item for v in _verdicts(part, depth=depth + 1)]
    return []
