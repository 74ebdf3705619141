"""Tensors inside a batch of any kind: containers, records, graph objects, and things nobody has thought of.

A batch is the user's, and so is the code that runs when it is opened (a lazy mapping, a property that raises). What
cannot be opened is passed over: looking at a batch never costs a step. Values of an optimizer are plainer: they are
compared, and put back into the tensors that hold them.
"""

import copy
import dataclasses
import functools
import math
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from steadystep._utils.tensors import is_sharded
from steadystep.errors import MisuseError

_MANY = 1_000_000  # parts; beyond that it is no batch
_PLAIN = (str, int, float, bool, complex, type(None))
_USUAL = (tuple, list, dict)
_CLOSED = (
    *(str, bytes, bytearray, int, float, complex, type(None), np.ndarray, np.generic, torch.device, torch.dtype),
    *(type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.MethodType, functools.partial),
    *(nn.Module, Optimizer),
)
"""Nothing in them belongs to the batch. Not everything that can be called: a graph object often can."""


DEEPEST = 100  # containers inside containers; one that contains itself ends here too


def tensors_in(thing: Any, name: str = "", *, most_parts: int = _MANY) -> Iterator[tuple[str, Tensor]]:
    """Every tensor in nested containers, dataclasses and plain objects, in order, with a name such as `x[0].mask`.

    At most `most_parts` parts of any one container, and of them all, are opened.
    """
    return _found(thing, Tensor, name, most_parts, objects=True)


def held_in(thing: Any, kinds: type | tuple[type, ...] = Tensor) -> Iterator[Any]:
    """Every tensor, or thing of other `kinds`, in nested containers and dataclasses, in order; objects stay closed."""
    return (part for _, part in _found(thing, kinds, "", _MANY, objects=False))


def _found(
    thing: Any, kinds: type | tuple[type, ...], name: str, most_parts: int, *, objects: bool
) -> Iterator[tuple[str, Any]]:
    waiting: list[tuple[str, Any]] = [(name, thing)]
    opened: dict[int, Any] = {}  # why the things too: an id is free again once its thing is gone
    for _ in range(most_parts):
        if not waiting:
            return
        name, part = waiting.pop()
        if issubclass(type(part), kinds):  # why not isinstance: it may ask the thing, and that may raise
            yield name, part
        elif id(part) not in opened:
            inner = _parts(part, most_parts, objects=objects)
            if inner:
                opened[id(part)] = part
                waiting.extend((name + key, held) for key, held in reversed(inner))


def _parts(thing: Any, most: int, *, objects: bool) -> list[tuple[str, Any]]:
    try:
        if type(thing) not in _USUAL and isinstance(thing, _CLOSED):
            return []
        inner = children(thing, most)
        if inner is None and objects:
            return [(f".{key}", part) for key, part in islice(getattr(thing, "__dict__", {}).items(), most)]
        return inner or []
    except Exception:  # why all: it is the user's code that raised, and the step does not depend on it
        return []


def children(thing: Any, most: int = _MANY) -> list[tuple[str, Any]] | None:
    """The parts of a mapping, list, tuple or dataclass with what to add to its name; None for anything else."""
    if type(thing) not in (list, tuple) and isinstance(thing, Mapping):  # why: to ask for a Mapping is slow
        return [(f"[{key!r}]", part) for key, part in islice(thing.items(), most)]
    if isinstance(thing, list | tuple):
        return [(f"[{i}]", part) for i, part in enumerate(islice(thing, most))]
    if dataclasses.is_dataclass(thing) and not isinstance(thing, type):
        return [(f".{field.name}", getattr(thing, field.name, None)) for field in dataclasses.fields(thing)]
    return None


def rebuilt(thing: Any, parts: Sequence[Any]) -> Any:
    """A container of the same class with these in place of its `children`. The one given stays as it is."""
    if type(thing) in (list, tuple):
        return type(thing)(parts)
    if isinstance(thing, Mapping):
        if type(thing) is dict or not isinstance(thing, MutableMapping):
            return dict(zip(thing, parts, strict=True))
        twin = copy.copy(thing)  # why: keeps the class, and what a subclass needs to be built
        for key, part in zip(thing, parts, strict=True):
            twin[key] = part  # why not update(): some classes refuse it, or forget what their own setter does
        return twin
    if isinstance(thing, list | tuple):  # why: a named tuple takes its fields one by one
        return type(thing)(*parts) if hasattr(thing, "_fields") else type(thing)(parts)
    twin = copy.copy(thing)  # why not replace(): it runs __init__ and refuses fields that it does not set
    for field, part in zip(dataclasses.fields(thing), parts, strict=True):
        object.__setattr__(twin, field.name, part)
    return twin


def mapped(thing: Any, change: Callable[[Any], Any], kind: type = Tensor, depth: int = 0) -> Any:
    """The same tree with each tensor, or thing of another `kind`, replaced by what `change` makes of it.

    What is no container stays.

    Raises:
        MisuseError: more than `DEEPEST` containers inside each other.
    """
    if isinstance(thing, kind):
        return change(thing)
    parts: Any = thing.values() if type(thing) is dict else thing
    if type(thing) not in _USUAL:  # why apart, as plain parts are: what a loop calls is mapped at every step
        inner = children(thing)
        if inner is None:
            return thing
        parts = [part for _, part in inner]
    if depth > DEEPEST:
        raise MisuseError(f"nested more than {DEEPEST} levels deep: does it contain itself?")
    made = [part if type(part) in _PLAIN else mapped(part, change, kind, depth + 1) for part in parts]
    return rebuilt(thing, made)


def is_readable(tensor: Tensor) -> bool:
    """Whether its elements are all here, side by side: not sparse, nested, sharded, without data, or none at all."""
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.device.type == "meta":
        return False
    return tensor.numel() > 0 and not is_sharded([tensor])


_HANDLE = 1 << 20  # bytes: a tensor in shared memory keeps a file open, and a process may have 1,024 of them
_MOST_PARTS = 256  # a batch of more than these is not looked through at every step


def bytes_of(batch: Any, closure: Any) -> float:
    """Of the batch, and of tensors that its closure holds; infinite where that cannot be told."""
    return size_of(batch) + sum(_known(part) for part in _held_by(closure))


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


def copied(thing: Any) -> Any:
    """The same tree with copies of its tensors; what is neither container nor tensor is shared."""
    return mapped(thing, lambda tensor: tensor.detach().clone())


def put_into(present: Any, kept: Any) -> Any:
    """Return `kept` again, in the tensors of `present` where they fit: others may hold them too, or views of them."""
    if isinstance(kept, Tensor):
        if isinstance(present, Tensor) and present.shape == kept.shape and present.dtype == kept.dtype:
            return present.copy_(kept)
        return kept.clone()
    if type(kept) is dict:
        there = present if isinstance(present, dict) else {}
        return {key: put_into(there.get(key), each) for key, each in kept.items()}
    if type(kept) in (list, tuple):
        held = present if isinstance(present, list | tuple) and len(present) == len(kept) else [None] * len(kept)
        return type(kept)([put_into(now, each) for now, each in zip(held, kept, strict=True)])
    return copy.deepcopy(kept)


def same_values(left: Any, right: Any) -> bool:
    """Equal to the last bit, tensors in containers too. NaN is equal to itself; what cannot be compared is passed."""
    if isinstance(left, Tensor) or isinstance(right, Tensor):
        both = isinstance(left, Tensor) and isinstance(right, Tensor)
        return both and left.shape == right.shape and torch.equal(left.nan_to_num(), right.nan_to_num())
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(same_values(each, right[key]) for key, each in left.items())
    if isinstance(left, list | tuple) and isinstance(right, list | tuple):
        return len(left) == len(right) and all(map(same_values, left, right))
    if isinstance(left, bool | int | float | str) or isinstance(right, bool | int | float | str):
        return bool(left == right or (left != left and right != right))
    return True
