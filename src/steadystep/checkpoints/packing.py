"""Splits a state into strict JSON and flat tensors, and back: the same values and types, never through pickle.

JSON has no tuple, NaN or number as a key: those become `{"$": kind, "v": ...}`. Tensors are named after their place in
the state. On the way back nothing looks up a name that the file chooses.
"""

import math
from base64 import b64decode, b64encode
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, final

import numpy as np
import torch
from torch import Tensor
from torch.nn import Parameter

from steadystep._utils.tensors import is_sharded, local_part
from steadystep._utils.tree import DEEPEST
from steadystep.checkpoints.atomic_io import RESERVED, STORED, Spread, offsets
from steadystep.errors import CheckpointError

MARK = "$"
"""The key of `{"$": kind, "v": ...}`, which stands for what JSON has no form for."""

STAGE = "stage"  # the part of a state that says which stages it is of: optimizers number parameters from 0 on each

DTYPES = {str(value).removeprefix("torch."): value for value in vars(torch).values() if isinstance(value, torch.dtype)}

FACTORIES: dict[str, Callable[[], Any]] = {
    kind.__name__: kind for kind in (bool, int, float, str, list, dict, set, tuple, Counter, OrderedDict, deque)
}
"""What a `defaultdict` may fill in."""

ARRAY_KINDS = "biufcSUmM"  # of numpy: numbers, text and times. No objects (they would need pickle), no records

Node = dict[str, Any]
Rebuild = Callable[[Node, Callable[[Any], Any], Mapping[str, Tensor]], Any]


def unpacked(tree: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The state that `tree` and `tensors` stand for, or a CheckpointError."""

    def value(node: Any) -> Any:
        if isinstance(node, list):
            return [value(item) for item in node]
        if not isinstance(node, dict):
            return node
        if MARK not in node:
            return {key: value(item) for key, item in node.items()}
        return _REBUILD[node[MARK]](node, value, tensors)

    try:
        return value(tree)
    except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError, RuntimeError) as error:
        # RecursionError is a RuntimeError; torch raises RuntimeError too.
        what = f"{type(error).__name__}: {error}"
        raise CheckpointError(f"the state cannot be restored ({what}): it was not written by steadystep") from error


def _scalar(node: Node, value: Callable[[Any], Any], tensors: Mapping[str, Tensor]) -> Any:
    dtype = _array_dtype(node["dtype"])
    held = value(node["v"])
    return dtype.type(held) if dtype.kind in "SU" else np.frombuffer(held, dtype)[0]


def _array(node: Node, value: Callable[[Any], Any], tensors: Mapping[str, Tensor]) -> Any:
    raw = tensors[node["v"]].numpy().tobytes()  # sync: on loading, in host memory
    return np.frombuffer(bytearray(raw), _array_dtype(node["dtype"])).reshape(node["shape"])


def _array_dtype(name: str) -> "np.dtype[Any]":
    dtype = np.dtype(name)
    if dtype.kind not in ARRAY_KINDS:
        raise ValueError(f"numpy's {name!r}")
    return dtype


def _ordered(node: Node, value: Callable[[Any], Any], tensors: Mapping[str, Tensor]) -> Any:
    result = OrderedDict(value(node["v"]))
    if "metadata" in node:  # what modules know about their version; load_state_dict asks for it
        result._metadata = value(node["metadata"])  # type: ignore[attr-defined]
    return result


_REBUILD: dict[str, Rebuild] = {
    "int": lambda node, value, tensors: int(node["v"], 16),
    "float": lambda node, value, tensors: float(node["v"]),
    "complex": lambda node, value, tensors: complex(*value(node["v"])),
    "str": lambda node, value, tensors: b64decode(node["v"], validate=True).decode("utf-8", "surrogatepass"),
    "bytes": lambda node, value, tensors: b64decode(node["v"], validate=True),
    "tuple": lambda node, value, tensors: tuple(value(node["v"])),
    "set": lambda node, value, tensors: set(value(node["v"])),
    "frozenset": lambda node, value, tensors: frozenset(value(node["v"])),
    "deque": lambda node, value, tensors: deque(value(node["v"]), node["maxlen"]),
    "dict": lambda node, value, tensors: {value(key): value(item) for key, item in node["v"]},
    "OrderedDict": _ordered,
    "Counter": lambda node, value, tensors: Counter(value(node["v"])),
    "defaultdict": lambda node, value, tensors: defaultdict(
        None if node["factory"] is None else FACTORIES[node["factory"]], value(node["v"])
    ),
    "Size": lambda node, value, tensors: torch.Size(node["v"]),
    "dtype": lambda node, value, tensors: DTYPES[node["v"]],
    "device": lambda node, value, tensors: torch.device(node["v"]),
    "tensor": lambda node, value, tensors: tensors[node["v"]],
    "complex-tensor": lambda node, value, tensors: torch.view_as_complex(tensors[node["v"]]),
    "shard": lambda node, value, tensors: Spread(str(node["v"]), torch.Size(node["shape"]), DTYPES[node["dtype"]]),
    "scalar": _scalar,
    "array": _array,
}


_EXACT = 2**53  # other readers of JSON keep integers as doubles
_TRY = "save its state_dict(), or numbers, strings, lists, dicts, arrays or tensors instead"


@final
@dataclass(frozen=True, slots=True)
class Packed:
    """A state split into JSON and tensors. The tensors are those of the state: not copied, on their device."""

    tree: Any
    """Strict JSON: numbers are finite, keys are strings."""
    tensors: dict[str, Tensor]
    """Tensors by name."""
    shards: dict[str, Tensor] = field(default_factory=dict)
    """This rank's parts of tensors that are sharded over ranks."""
    places: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Offset of each part."""


def pack(state: Any) -> Packed:
    """Split `state` into JSON and tensors; raise CheckpointError, with the place, for what cannot be stored.

    Types come back as they were, except: a Parameter comes back as a tensor, every tensor on the CPU and contiguous, an
    array in C order. Two names for the same memory come back as one tensor under two names.
    """
    packer = _Packer(str(state.get(STAGE, "")) if isinstance(state, dict) else "")
    return Packed(packer.node(state, "", 0), packer.tensors, packer.shards, packer.places)


def unpack(packed: Packed) -> Any:
    """Return the state from `packed`. Raises CheckpointError for what `pack` did not make."""
    return unpacked(packed.tree, packed.tensors)


@final
class _Packer:
    def __init__(self, stage: str = "") -> None:
        self._stage = f"{stage}:" if stage else ""
        self.tensors: dict[str, Tensor] = {}
        self.shards: dict[str, Tensor] = {}
        self.places: dict[str, tuple[int, ...]] = {}
        self._names: dict[tuple[object, ...], str] = {}

    def node(self, value: Any, path: str, depth: int, *, plain: bool = False) -> Any:
        """`plain` is for keys and members of sets: nothing in them may be a tensor or an array."""
        if depth > DEEPEST:
            raise CheckpointError(f"{path[:80]}... is nested more than {DEEPEST} levels deep: does it contain itself?")
        kind = type(value)
        if value is None or kind is bool:
            return value
        if kind in _SIMPLE:
            return _SIMPLE[kind](value)
        if isinstance(value, np.generic) and value.dtype.kind in ARRAY_KINDS:
            return self._scalar(value, path, depth)
        if kind in (tuple, frozenset):
            return _mark(kind.__name__, self._items(value, path, depth, plain=plain or kind is frozenset))
        if plain:
            raise _refusal(path, value, "keys and sets may hold only numbers, strings, None and tuples of them")
        if kind in (Tensor, Parameter):
            return self._tensor(value, path)
        if kind is np.ndarray and value.dtype.kind in ARRAY_KINDS:
            return self._array(value, path)
        if kind is list:
            return self._items(value, path, depth)
        if kind is dict:
            return self._dict(value, path, depth)
        if isinstance(value, Tensor) and is_sharded([value]):
            return self._shard(value, path)
        return self._collection(value, path, depth)

    def _shard(self, value: Tensor, path: str) -> Any:
        begins, path = offsets(value), self._stage + path
        if begins is not None:
            self.shards[path], self.places[path] = local_part(value).detach(), begins
        return _mark("shard", path, shape=list(value.shape), dtype=_DTYPE_NAMES[value.dtype])

    def _collection(self, value: Any, path: str, depth: int) -> Any:
        kind = type(value)
        if kind is set:
            return _mark("set", self._items(value, path, depth, plain=True))
        if kind is deque:
            return _mark("deque", self._items(value, path, depth), maxlen=value.maxlen)
        if kind is Counter:
            return _mark("Counter", self._dict(value, path, depth))
        if kind is OrderedDict:
            known = getattr(value, "_metadata", None)
            more = {} if known is None else {"metadata": self.node(known, f"{path}._metadata", depth + 1)}
            return _mark("OrderedDict", self._dict(value, path, depth), **more)
        if kind is defaultdict:
            factory = value.default_factory
            name = None if factory is None else next((n for n, f in FACTORIES.items() if f is factory), "")
            if name == "":
                raise _refusal(path, value, f"its default factory {factory!r} is code; save dict(...) of it")
            return _mark("defaultdict", self._dict(value, path, depth), factory=name)
        if kind is torch.Generator:
            raise _refusal(path, value, "save its get_state()")
        raise _refusal(path, value, _TRY)

    def _items(self, values: Iterable[Any], path: str, depth: int, *, plain: bool = False) -> list[Any]:
        return [self.node(value, f"{path}[{i}]", depth + 1, plain=plain) for i, value in enumerate(values)]

    def _dict(self, value: dict[Any, Any], path: str, depth: int) -> Any:
        plain = MARK not in value and all(type(key) is str and _text(key) is key for key in value)
        items: list[tuple[Any, Any]] = []
        for key, item in value.items():
            place = _place(path, key)
            name = key if plain else self.node(key, f"the key of {place}", depth + 1, plain=True)
            items.append((name, self.node(item, place, depth + 1)))
        return dict(items) if plain else _mark("dict", [list(item) for item in items])

    def _scalar(self, value: Any, path: str, depth: int) -> Any:
        # why: numpy cuts trailing zeros off text, in str() and in what it reads from bytes
        held = value[:] if value.dtype.kind in "SU" else value.tobytes()
        return _mark("scalar", self.node(held, path, depth + 1), dtype=value.dtype.str)

    def _array(self, value: "np.ndarray[Any, Any]", path: str) -> Any:
        raw = bytearray(value.tobytes())
        # why bytes: every kind of array in one way, text, times and other byte orders too
        tensor = torch.frombuffer(raw, dtype=torch.uint8) if raw else torch.empty(0, dtype=torch.uint8, device="cpu")
        return _mark("array", self._add(tensor, path), dtype=value.dtype.str, shape=list(value.shape))

    def _tensor(self, value: Tensor, path: str) -> Any:
        if value.layout is not torch.strided or value.device.type == "meta":
            raise _refusal(path, value, f"{value.layout} on {value.device}; only dense tensors with data can be saved")
        tensor = value.detach()
        if tensor.is_complex():
            kind, stored = "complex-tensor", torch.view_as_real(tensor.resolve_conj())
        else:
            kind, stored = "tensor", tensor
        if stored.dtype not in STORED:
            raise _refusal(path, value, f"safetensors cannot store {value.dtype}; convert it")
        memory = (tensor.device, tensor.dtype, tensor.data_ptr(), tensor.shape, tensor.stride())
        same = (*memory, tensor.is_conj(), tensor.is_neg())
        if tensor.numel() and same in self._names:
            return _mark(kind, self._names[same])
        self._names[same] = self._add(stored, path)
        return _mark(kind, self._names[same])

    def _add(self, tensor: Tensor, path: str) -> str:
        wanted = path or "state"
        name, number = wanted, 1
        while name in self.tensors or name == RESERVED:
            number += 1
            name = f"{wanted}~{number}"
        self.tensors[name] = tensor
        return name


def _place(path: str, key: Any) -> str:
    if type(key) is not str or _text(key) is not key:
        return f"{path}[{key!r}]"
    return f"{path}.{key}" if path else key


def _text(value: str) -> Any:
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:  # halves of surrogate pairs: two in a row would come back as one character
        return _mark("str", b64encode(value.encode("utf-8", "surrogatepass")).decode("ascii"))
    return value


def _number(value: float) -> Any:
    return value if math.isfinite(value) else _mark("float", str(value))


def _mark(kind: str, value: Any, **more: Any) -> dict[str, Any]:
    return {MARK: kind, "v": value, **more}


def _refusal(path: str, value: Any, hint: str) -> CheckpointError:
    kind = type(value)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    return CheckpointError(f"{path or 'the state'} is a {name}: {hint}")


_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_SIMPLE: dict[type, Callable[[Any], Any]] = {
    int: lambda value: value if -_EXACT < value < _EXACT else _mark("int", hex(value)),
    float: _number,
    complex: lambda value: _mark("complex", [_number(value.real), _number(value.imag)]),
    str: _text,
    bytes: lambda value: _mark("bytes", b64encode(value).decode("ascii")),
    torch.Size: lambda value: _mark("Size", list(value)),
    torch.dtype: lambda value: _mark("dtype", _DTYPE_NAMES[value]),
    torch.device: lambda value: _mark("device", str(value)),
}
