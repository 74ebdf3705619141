"""Tensors inside a batch of any kind: containers, records, graph objects, and things nobody has thought of.

A batch is the user's, and so is the code that runs when it is opened (a lazy mapping, a property that raises). What
cannot be opened is passed over: looking at a batch never costs a step.
"""

import dataclasses
import functools
import types
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from steadystep.clip.sharded import is_sharded

_MANY = 1_000_000  # parts; beyond that it is no batch
_CLOSED = (
    *(str, bytes, bytearray, int, float, complex, type(None), np.ndarray, np.generic, torch.device, torch.dtype),
    *(type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.MethodType, functools.partial),
    *(nn.Module, Optimizer),
)
"""Nothing in them belongs to the batch. Not everything that can be called: a graph object often can."""


def tensors_in(thing: Any, name: str = "", *, most_parts: int = _MANY) -> Iterator[tuple[str, Tensor]]:
    """Every tensor in nested containers, dataclasses and plain objects, in order, with a name such as `x[0].mask`.

    At most `most_parts` parts of any one container, and of them all, are opened.
    """
    waiting: list[tuple[str, Any]] = [(name, thing)]
    opened: dict[int, Any] = {}  # why the things too: an id is free again once its thing is gone
    for _ in range(most_parts):
        if not waiting:
            return
        name, part = waiting.pop()
        if issubclass(type(part), Tensor):  # why not isinstance: it may ask the thing, and that may raise
            yield name, part
        elif id(part) not in opened:
            inner = _parts(part, most_parts)
            if inner:
                opened[id(part)] = part
                waiting.extend((name + key, held) for key, held in reversed(inner))


def is_readable(tensor: Tensor) -> bool:
    """Whether its elements are all here, side by side: not sparse, nested, sharded, without data, or none at all."""
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.device.type == "meta":
        return False
    return tensor.numel() > 0 and not is_sharded([tensor])


def _parts(thing: Any, most: int) -> list[tuple[str, Any]]:
    try:
        if isinstance(thing, _CLOSED):
            return []
        if isinstance(thing, Mapping):
            return [(f"[{key!r}]", part) for key, part in islice(thing.items(), most)]
        if isinstance(thing, list | tuple):
            return [(f"[{i}]", part) for i, part in enumerate(islice(thing, most))]
        if dataclasses.is_dataclass(thing):
            return [(f".{field.name}", getattr(thing, field.name, None)) for field in dataclasses.fields(thing)]
        return [(f".{key}", part) for key, part in islice(getattr(thing, "__dict__", {}).items(), most)]
    except Exception:  # why all: it is the user's code that raised, and the step does not depend on it
        return []
