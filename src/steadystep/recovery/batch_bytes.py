"""How much memory a batch holds, as far as it can be told in a microsecond or two."""

import functools
import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from steadystep.accumulation import Work

_HANDLE = 1 << 20  # bytes: a tensor in shared memory keeps a file open, and a process may have 1,024 of them
_MOST_PARTS = 256  # a batch of more than these is not looked through at every step
_PLAIN = (str, int, float, bool, complex, type(None))


def bytes_of(work: Work) -> float:
    """Of the batch, and of tensors that its closure holds; infinite where that cannot be told."""
    recipe = work.recipe
    return size_of(recipe.batch) + sum(_known(part) for part in _held_by(recipe.closure))


def size_of(batch: Any) -> float:
    """Bytes of all tensors and arrays in a batch; one from a worker process counts for a megabyte at least.

    Infinite for what holds something unknown, or too many parts to look at.
    """
    try:
        return _size_of(batch)
    except Exception:  # why all: a batch is opened by its own code, and what that raises must not cost the step
        return math.inf


def _size_of(batch: Any) -> float:
    waiting, seen, total = [batch], 0, 0.0
    while waiting:
        part = waiting.pop()
        seen += 1
        if seen > _MOST_PARTS:
            return math.inf
        inner = _parts_of(part)
        if inner is None:
            return math.inf
        if isinstance(inner, float):
            total += inner
        else:
            waiting.extend(inner)
            if len(waiting) > _MOST_PARTS:
                return math.inf
    return total


def _parts_of(part: Any) -> float | Iterable[Any] | None:
    if type(part) in (tuple, list):  # why these first: nearly everything is one, and to ask for a Mapping is slow
        sequence: Iterable[Any] = part
        return sequence
    if isinstance(part, Tensor):
        return _tensor(part)
    if type(part) is dict:
        values: Iterable[Any] = part.values()
        return values
    if isinstance(part, _PLAIN):
        return 0.0
    if isinstance(part, np.ndarray):
        return float(part.nbytes)
    if isinstance(part, bytes | bytearray):
        return float(len(part))
    if isinstance(part, Mapping):
        return part.values()
    if isinstance(part, list | tuple):
        return part
    held = getattr(part, "__dict__", None)
    return held.values() if isinstance(held, dict) else None


def _tensor(tensor: Tensor) -> float:
    if tensor.layout is not torch.strided:
        return math.inf
    shared = tensor.is_cpu and tensor.untyped_storage().is_shared()
    return float(max(tensor.nbytes, _HANDLE) if shared else tensor.nbytes)


def _known(part: Any) -> float:
    """What a closure holds beside its data (the model, a config) is not held because of us."""
    return size_of(part) if isinstance(part, Tensor | np.ndarray | list | tuple | dict) else 0.0


def _held_by(closure: Any) -> list[Any]:
    if isinstance(closure, functools.partial):
        return [*closure.args, *closure.keywords.values()]
    cells = [cell.cell_contents for cell in getattr(closure, "__closure__", None) or () if _is_filled(cell)]
    return [*cells, *(getattr(closure, "__defaults__", None) or ())]


def _is_filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True
