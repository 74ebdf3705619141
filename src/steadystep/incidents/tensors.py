"""How bad the tensors are that modules take and return."""

import math
from collections.abc import Iterable
from enum import IntEnum

import torch
from torch import Tensor

from steadystep.clip.sharded import local_part


class Badness(IntEnum):
    """How far a tensor is from finite."""

    FINITE = 0
    MASK = 1
    """-inf and nothing worse: an overflow, or how masks are written."""
    BAD = 2
    """NaN or +inf."""


@torch.no_grad()
def badness(tensor: Tensor) -> Badness:
    """NaN and +inf are bad. -inf alone is not sure to be. What torch cannot look into counts as finite."""
    if not (tensor.is_floating_point() or tensor.is_complex()) or not tensor.numel() or tensor.is_meta:
        return Badness.FINITE
    try:
        values = _values(tensor.detach())
        if bool(values.isfinite().all()):  # sync: only in trouble
            return Badness.FINITE
        worse = values.is_complex() or bool((values.isnan() | (values == math.inf)).any())  # sync: only in trouble
        return Badness.BAD if worse else Badness.MASK
    except (NotImplementedError, RuntimeError):
        return Badness.FINITE


def count_bad(tensor: Tensor) -> int:
    """How many elements are NaN or infinite."""
    return int((~_values(tensor.detach()).isfinite()).sum())  # sync: only in trouble


@torch.no_grad()
def kind_of(tensors: Iterable[Tensor]) -> str:
    """The worst there is in them, as a word."""
    words = set()
    for tensor in tensors:
        if badness(tensor):
            values = _values(tensor.detach())
            if bool(values.isnan().any()):  # sync: only in trouble
                return "NaN"
            words.add("inf" if values.is_complex() or bool((values == math.inf).any()) else "-inf")  # sync: as above
    return min(words, key=len) if words else "nothing"


def _values(tensor: Tensor) -> Tensor:
    tensor = local_part(tensor)
    if tensor.layout is torch.sparse_coo:
        return tensor.coalesce().values()
    # fp8 has no comparisons of its own
    return tensor.float() if tensor.element_size() == 1 else tensor
