"""Memory relief: activation checkpointing, splitting a batch, and retrying in smaller parts when memory runs out.

Activation checkpointing loads on first use: it imports torch's compiler, which takes seconds.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, final

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from steadystep._utils import lazy_names
from steadystep._utils.tree import DEEPEST, children, rebuilt
from steadystep.errors import ConfigError, MisuseError

if TYPE_CHECKING:
    from steadystep.memory.checkpointing import CheckpointedBlocks, checkpoint_blocks
    from steadystep.memory.recompute import SavedBytes
    from steadystep.memory.retry import Attempt, OutOfMemoryRetry, is_out_of_memory, weighted_mean

__all__ = [
    "Attempt",
    "BatchPart",
    "CheckpointedBlocks",
    "OutOfMemoryRetry",
    "SavedBytes",
    "checkpoint_blocks",
    "is_out_of_memory",
    "scale_lr",
    "split_batch",
    "weighted_mean",
]

__getattr__ = lazy_names(
    __name__,
    {
        "checkpointing": ("CheckpointedBlocks", "checkpoint_blocks"),
        "recompute": ("SavedBytes",),
        "retry": ("Attempt", "OutOfMemoryRetry", "is_out_of_memory", "weighted_mean"),
    },
)


_ALIKE = (str, bytes, int, float, complex, type(None), torch.device, torch.dtype)
"""Goes into every part as it is."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPart:
    """Some rows of a batch."""

    batch: Any
    """The rows, in the structure of the whole batch."""
    weight: float
    """Share of the whole; the weights of all parts add up to 1."""
    size: int
    """Number of rows."""


def split_batch(batch: Any, parts: int, *, count: Callable[[Any], float] | None = None) -> list[BatchPart]:
    """Split a batch by rows: tensors, arrays, lists of examples, and mappings, tuples, lists and dataclasses of them.

    Sizes differ by at most one row; tensors become views. Numbers, strings and 0-dimensional tensors go into every
    part.

    Args:
        batch: the batch.
        parts: number of parts.
        count: weight of a part where that is not its rows: for a mean over tokens, `lambda part: (part["labels"] !=
            -100).sum()`.

    >>> for part in split_batch({"x": torch.arange(5), "name": "a"}, 2):
    ...     print(part.batch, part.weight)
    {'x': tensor([0, 1, 2]), 'name': 'a'} 0.6
    {'x': tensor([3, 4]), 'name': 'a'} 0.4
    """
    rows = batch_size(batch)
    if not 1 <= parts <= rows:
        raise MisuseError(f"parts = {parts}: a batch of {rows} rows can be split into 1 to {rows} parts")
    if parts == 1:
        return [BatchPart(batch=batch, weight=1.0, size=rows)]
    sizes = [rows // parts + (i < rows % parts) for i in range(parts)]
    starts = [sum(sizes[:i]) for i in range(parts)]
    pieces = [_take(batch, start, start + size) for start, size in zip(starts, sizes, strict=True)]
    weights = _weights([float(count(piece)) for piece in pieces] if count else sizes, sizes)  # sync: by count
    return [
        BatchPart(batch=piece, weight=weight, size=size)
        for piece, weight, size in zip(pieces, weights, sizes, strict=True)
    ]


def _weights(counts: Sequence[float], sizes: Sequence[int]) -> list[float]:
    if not all(0 <= number < math.inf for number in counts):
        raise MisuseError(f"count returned {counts}: must return finite numbers of at least 0")
    if not any(counts):  # nothing to weigh: whatever the loss makes of that, let it
        counts = sizes
    return [number / sum(counts) for number in counts]


def batch_size(batch: Any) -> int:
    """The number of rows, which everything in the batch must agree on."""
    found = list(_rows(batch, "batch", depth=0))
    if not found:
        raise MisuseError(f"nothing in this batch has rows to split ({type(batch).__name__})")
    sizes = {size: path for path, size in reversed(found)}
    if len(sizes) > 1:
        shown = ", ".join(f"{path} has {size}" for size, path in reversed(sizes.items()))
        raise MisuseError(
            f"cannot split a batch whose parts have different numbers of rows: {shown}. Keep per-batch values out "
            "of the batch, or pass your own split function"
        )
    return next(iter(sizes))


def _rows(item: Any, path: str, *, depth: int) -> Iterator[tuple[str, int]]:
    if depth > DEEPEST:
        raise MisuseError(f"cannot split {path}: nested too deeply, or contains itself")
    if isinstance(item, Tensor | np.ndarray):
        if isinstance(item, Tensor) and (item.is_nested or item.layout is not torch.strided):
            raise MisuseError(f"cannot split {path}: a nested or sparse tensor; pass your own split function")
        if item.ndim:
            yield path, len(item)
        return
    inner = children(item)
    if isinstance(item, PackedSequence) or not (isinstance(item, _ALIKE) or inner is not None):
        raise MisuseError(f"cannot split {path}: no rule for a {type(item).__name__}; pass your own split function")
    if _is_examples(item):
        yield path, len(item)
    elif inner is not None:
        for key, value in inner:
            yield from _rows(value, f"{path}{key}", depth=depth + 1)


def _take(item: Any, start: int, stop: int) -> Any:
    if isinstance(item, Tensor | np.ndarray):
        return item[start:stop] if item.ndim else item
    if _is_examples(item):
        return item[start:stop]
    inner = children(item)
    return item if inner is None else rebuilt(item, [_take(part, start, stop) for _, part in inner])


def _is_examples(item: Any) -> bool:
    """One plain thing per row: a list of them, or a tuple of texts as torch collates them. (3, 4) is one thing."""
    if type(item) is tuple:
        return bool(item) and all(isinstance(value, str | bytes) for value in item)
    return isinstance(item, list) and bool(item) and all(isinstance(value, _ALIKE) for value in item)


ScalingRule = Literal["linear", "sqrt"]


def scale_lr(lr: float, *, batch_size: float, base_batch_size: float, rule: ScalingRule = "linear") -> float:
    """Return the learning rate for `batch_size` where `lr` was right for `base_batch_size`.

    Args:
        lr: the known learning rate.
        batch_size: examples or tokens per update.
        base_batch_size: the batch size that `lr` was right for.
        rule: "linear" for SGD, "sqrt" for Adam.

    >>> scale_lr(0.1, batch_size=1024, base_batch_size=256)
    0.4
    >>> scale_lr(0.1, batch_size=1024, base_batch_size=256, rule="sqrt")
    0.2
    """
    for name, value in (("lr", lr), ("batch_size", batch_size), ("base_batch_size", base_batch_size)):
        if not 0 < value < math.inf:
            raise ConfigError(f"{name} = {value!r}: must be greater than 0 and finite")
    if rule not in ("linear", "sqrt"):
        raise ConfigError(f"rule = {rule!r} is unknown: use 'linear' (SGD) or 'sqrt' (Adam and its variants)")
    times = batch_size / base_batch_size
    return lr * (times if rule == "linear" else math.sqrt(times))
