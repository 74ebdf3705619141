"""Tensors inside whatever modules take and return, and how bad they are."""

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor, nn

from steadystep.clip.sharded import local_part

_DEEP = 6
_MANY = 100_000  # tensors; beyond that it is no batch


class Badness(IntEnum):
    """How far a tensor is from finite."""

    FINITE = 0
    MASK = 1
    """-inf and nothing worse: an overflow, or how masks are written."""
    BAD = 2
    """NaN or +inf."""


def tensors_in(thing: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Every tensor in nested containers, dataclasses and plain objects, with a name such as `x[0].mask`."""
    seen: set[int] = set()
    for count, found in enumerate(_walk(thing, name, seen, 0)):
        if count == _MANY:
            return
        yield found


def _walk(thing: Any, name: str, seen: set[int], depth: int) -> Iterator[tuple[str, Tensor]]:
    if isinstance(thing, Tensor):
        yield name, thing
        return
    if thing is None or isinstance(thing, str | bytes | int | float | type | nn.Module) or callable(thing):
        return
    if depth > _DEEP or id(thing) in seen:
        return
    seen.add(id(thing))
    for key, part in _parts(thing):
        yield from _walk(part, f"{name}{key}", seen, depth + 1)


def _parts(thing: Any) -> Iterable[tuple[str, Any]]:
    if isinstance(thing, Mapping):
        return [(f"[{key!r}]", part) for key, part in thing.items()]
    if isinstance(thing, list | tuple):
        return [(f"[{i}]", part) for i, part in enumerate(thing)]
    if dataclasses.is_dataclass(thing):
        return [(f".{f.name}", getattr(thing, f.name, None)) for f in dataclasses.fields(thing)]
    return [(f".{key}", part) for key, part in getattr(thing, "__dict__", {}).items()]


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
