"""Whether a saved state fits this model and this loop. Everything is looked at before anything is changed."""

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from steadystep._utils.text import plain_name
from steadystep.checkpoints.atomic_io import Spread
from steadystep.errors import CheckpointError
from steadystep.state import KeptObject

STATE_PARTS = {
    "parameters": Mapping,
    "buffers": Mapping,
    "optimizer": Mapping,
    "guard": Mapping,
    "kept": Mapping,
    "random": Mapping | None,
    "data": Mapping,
}
_MOST = 2**53
_WORDS = 624  # of the Mersenne Twister, in Python and in NumPy


def check_parts(state: Mapping[str, Any]) -> None:
    """Refuse a state that lacks a part, or has something else in its place."""
    missing = [part for part in STATE_PARTS if part not in state]
    if missing:
        raise CheckpointError(f"not a checkpoint of a guarded loop: it lacks {', '.join(missing)}")
    for part, kind in STATE_PARTS.items():
        if not isinstance(state[part], kind):
            raise CheckpointError(f"the checkpoint does not match: {part} is a {type(state[part]).__name__}")
    count(state.get("ranks", 1), "ranks", least=1)


def check_parameters(saved: Mapping[str, Any], present: Mapping[str, Tensor]) -> None:
    """Refuse parameters of another model."""
    for name in [*saved, *present]:
        if name not in saved or name not in present:
            where = "this model has no" if name in saved else "the checkpoint has no"
            raise CheckpointError(f"the checkpoint does not match: {where} parameter {name}")
        if not isinstance(saved[name], Tensor | Spread):
            raise CheckpointError(f"the checkpoint does not match: {name} is a {type(saved[name]).__name__}")
        check_tensor(name, saved[name], present[name])


def check_buffers(saved: Mapping[str, Any], model: nn.Module) -> Iterator[str]:
    """Refuse buffers of another model; names those that are left as they are here.

    A buffer that is not part of the model's own state_dict (a mask, a cache that grows) can be made again by the model:
    where it has another shape here, this model's own stays. One that this model has not is made when it is needed.
    """
    for _, key, name, module in owners(model):
        held, present = saved.get(name), module._buffers[key]
        remade = key in module._non_persistent_buffers_set
        if held is None:
            if present is not None and not remade:
                raise CheckpointError(f"the checkpoint does not match: it has no buffer {name}")
        elif not isinstance(held, Tensor):
            raise CheckpointError(f"the checkpoint does not match: {name} is a {type(held).__name__}")
        elif present is not None and not nn.parameter.is_lazy(present):
            if remade and present.shape != held.shape:
                yield name
            else:
                check_tensor(name, held, present)


def check_tensor(name: str, saved: Tensor | Spread, present: Tensor) -> None:
    """Refuse another shape, or numbers of another kind; another precision is fine."""
    if nn.parameter.is_lazy(present):
        raise CheckpointError(f"the checkpoint does not match: {name} is not initialized yet: run one batch first")
    if saved.shape != present.shape:
        shapes = f"{list(saved.shape)} in the checkpoint and {list(present.shape)} in this model"
        raise CheckpointError(f"the checkpoint does not match: {name} has the shape {shapes}")
    if type_name(saved.dtype) != type_name(present.dtype):
        raise CheckpointError(
            f"the checkpoint does not match: {name} is {saved.dtype} in the checkpoint and "
            f"{present.dtype} in this model"
        )


def type_name(dtype: torch.dtype) -> str:
    """What its values are: bool, whole, real or complex."""
    if dtype is torch.bool:
        return "bool"
    return "complex" if dtype.is_complex else ("real" if dtype.is_floating_point else "whole")


def owners(model: nn.Module) -> Iterator[tuple[dict[str, Tensor | None], str, str, nn.Module]]:
    """Every dense buffer, also those that are not part of the model's own state_dict: a forward pass may write them."""
    for path, module in model.named_modules():
        for key, buffer in module._buffers.items():
            if buffer is None or buffer.layout is torch.strided:
                yield module._buffers, key, plain_name(f"{path}.{key}" if path else key), module


def check_random(saved: Mapping[str, Any], where: str = "random") -> None:
    """Refuse what the generators would take and fail on later, or read beyond their memory with."""
    try:
        version, words, gauss = saved["python"]
        _require(version == 3 and len(words) == _WORDS + 1, f"{where}.python")
        _require(all(type(word) is int and 0 <= word < 2**32 for word in words), f"{where}.python")
        _require(words[-1] <= _WORDS, f"{where}.python")
        _require(gauss is None or (type(gauss) is float and math.isfinite(gauss)), f"{where}.python")
        _check_numpy(saved["numpy"], f"{where}.numpy")
        _check_generator(saved["torch"], f"{where}.torch")
        _require(saved["device"] is None or _is_bytes(saved["device"]), f"{where}.device")
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"the checkpoint does not match: {where} is not a random state ({error})") from None


def _check_numpy(saved: Mapping[str, Any], where: str) -> None:
    _require(saved["bit_generator"] == np.random.get_state(legacy=False)["bit_generator"], where)
    _require(type(saved["has_gauss"]) is int and saved["has_gauss"] in (0, 1), where)
    _require(type(saved["gauss"]) is float and math.isfinite(saved["gauss"]), where)
    inner = saved["state"]
    if saved["bit_generator"] == "MT19937":
        key, pos = inner["key"], inner["pos"]
        _require(isinstance(key, np.ndarray) and key.dtype == np.uint32 and key.shape == (_WORDS,), where)
        _require(type(pos) is int and 0 <= pos <= _WORDS, where)


def _check_generator(saved: Any, where: str) -> None:
    _require(_is_bytes(saved), where)
    try:
        torch.Generator().set_state(saved.to("cpu"))
    except RuntimeError:
        _require(False, where)


def _is_bytes(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype == torch.uint8 and value.dim() == 1


def check_place(saved: Mapping[str, Any]) -> None:
    """Refuse a place in the data that no loop was at."""
    for key in ("epoch", "batch"):
        count(saved.get(key), f"data.{key}")
    _check_marks(saved, "data")
    began = saved.get("began")
    if not isinstance(began, Mapping):
        raise CheckpointError(f"the checkpoint does not match: data.began is a {type(began).__name__}")
    if began:
        _check_marks(began, "data.began")
        if not isinstance(began.get("random"), Mapping):
            raise CheckpointError("the checkpoint does not match: data.began.random is not a random state")
        check_random(began["random"], "data.began.random")
    elif saved["batch"] and saved.get("loader") is None:
        raise CheckpointError("the checkpoint does not match: it lacks the start of the current epoch")
    if "loader" not in saved:
        raise CheckpointError("the checkpoint does not match: data.loader is missing")


def _check_marks(saved: Mapping[str, Any], where: str) -> None:
    if type(saved.get("started")) is not bool:
        raise CheckpointError(f"the checkpoint does not match: {where}.started is {saved.get('started')!r:.60}")
    if "generator" not in saved or saved["generator"] is not None:
        _check_generator(saved.get("generator"), f"{where}.generator")
    if saved.get("batch_size") is not None:
        count(saved["batch_size"], f"{where}.batch_size", least=1)


def count(value: Any, where: str, *, least: int = 0) -> int:
    """A whole number of things."""
    if type(value) is not int or not least <= value < _MOST:
        raise CheckpointError(f"the checkpoint does not match: {where} is {value!r:.60}")
    return value


def _require(fits: bool, where: str) -> None:
    if not fits:
        raise CheckpointError(f"the checkpoint does not match: {where} is not a random state")


def load_kept(name: str, thing: KeptObject, saved: Any) -> Callable[[], object]:
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
        raise CheckpointError(f"the checkpoint does not match: its state of {name!r} was rejected ({wrong})")
    return lambda: thing.load_state_dict(before)


def _other_shape(saved: Any, loaded: Any) -> str:
    """Where a tensor was stretched over one of another shape, as `copy_` does without a word."""
    held = dict(_tensors(loaded, ""))
    for place, tensor in _tensors(saved, ""):
        if place in held and held[place].shape != tensor.shape:
            return (
                f"{place} has shape {list(tensor.shape)} in the checkpoint and {list(held[place].shape)} in this model"
            )
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
