"""A packed state as it was. Nothing here looks up a name that the file chooses: every kind is in a table."""

from base64 import b64decode
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from steadystep.checkpoints.tensor_file import Spread
from steadystep.errors import CheckpointError

MARK = "$"
"""The key of `{"$": kind, "v": ...}`, which stands for what JSON has no form for."""

DTYPES = {str(value).removeprefix("torch."): value for value in vars(torch).values() if isinstance(value, torch.dtype)}

FACTORIES: dict[str, Callable[[], Any]] = {
    kind.__name__: kind for kind in (bool, int, float, str, list, dict, set, tuple, Counter, OrderedDict, deque)
}
"""What a `defaultdict` may fill in."""

ARRAY_KINDS = "biufcSUmM"
"""Of numpy: numbers, text and times. No objects (they would need pickle), no records."""

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
        raise CheckpointError(f"the state cannot be rebuilt ({what}): it was not written by steadystep") from error


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
