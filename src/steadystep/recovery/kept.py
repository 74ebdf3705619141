"""Objects that are kept with a run, given the state they had; one that refuses it is as it was."""

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor

from steadystep.errors import CheckpointError
from steadystep.recovery.snapshots import Kept


def load_kept(name: str, thing: Kept, saved: Any) -> Callable[[], object]:
    """Load its state; what is returned takes that back.

    Raises:
        CheckpointError: the object refused it, or took a tensor of another shape than it holds; it is as it was.
    """
    before = copy.deepcopy(thing.state_dict())
    try:
        thing.load_state_dict(saved)
        wrong = _other_shape(saved, thing.state_dict())
    except Exception as error:
        wrong = f"{type(error).__name__}: {error}"
    if wrong:
        thing.load_state_dict(before)
        raise CheckpointError(f"the checkpoint does not fit: its state of {name!r} was refused ({wrong})")
    return lambda: thing.load_state_dict(before)


def _other_shape(saved: Any, loaded: Any) -> str:
    """Where a tensor was stretched over one of another shape, as `copy_` does without a word."""
    held = dict(_tensors(loaded, ""))
    for place, tensor in _tensors(saved, ""):
        if place in held and held[place].shape != tensor.shape:
            return f"{place} has the shape {list(tensor.shape)} there and {list(held[place].shape)} here"
    return ""


def _tensors(value: Any, place: str) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield place, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _tensors(item, f"{place}.{key}" if place else str(key))
    elif isinstance(value, list | tuple):
        for i, item in enumerate(value):
            yield from _tensors(item, f"{place}[{i}]")
