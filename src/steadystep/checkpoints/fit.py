"""Whether a saved state fits this model and this optimizer. All of it is checked before anything is changed."""

import inspect
import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from steadystep._utils.tensors import local_part, type_name
from steadystep._utils.text import plain_name
from steadystep.checkpoints.atomic_io import Spread
from steadystep.errors import CheckpointError

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


def check_parts(state: Mapping[str, Any]) -> None:
    """Refuse a state that lacks a part, or has something else in its place."""
    missing = [part for part in STATE_PARTS if part not in state]
    if missing:
        raise CheckpointError(f"not a checkpoint of a guarded loop: it lacks {', '.join(missing)}")
    for part, kind in STATE_PARTS.items():
        if not isinstance(state[part], kind):
            raise CheckpointError(f"the checkpoint does not match: {part} is a {type(state[part]).__name__}")
    checked_count(state.get("ranks", 1), "ranks", least=1)


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
            if remade and local_part(present).shape != held.shape:
                yield name
            else:
                check_tensor(name, held, local_part(present))


def check_tensor(name: str, saved: Tensor | Spread, present: Tensor) -> None:
    """Refuse another shape, or numbers of another kind; another precision is fine."""
    if nn.parameter.is_lazy(present):
        raise CheckpointError(f"the checkpoint does not match: {name} is not initialized yet: run one batch first")
    if saved.shape != present.shape:
        shapes = f"{list(saved.shape)} in the checkpoint and {list(present.shape)} in this model"
        raise CheckpointError(f"the checkpoint does not match: {name} has the shape {shapes}")
    if type_name(saved.dtype) != type_name(present.dtype):
        types = f"{saved.dtype} in the checkpoint and {present.dtype} in this model"
        raise CheckpointError(f"the checkpoint does not match: {name} is {types}")


def owners(model: nn.Module) -> Iterator[tuple[dict[str, Tensor | None], str, str, nn.Module]]:
    """Every dense buffer, also those that are not part of the model's own state_dict: a forward pass may write them."""
    for path, module in model.named_modules():
        for key, buffer in module._buffers.items():
            if buffer is None or buffer.layout is torch.strided:
                yield module._buffers, key, plain_name(f"{path}.{key}" if path else key), module


def checked_count(value: Any, where: str, *, least: int = 0) -> int:
    """A whole number of things."""
    if type(value) is not int or not least <= value < _MOST:
        raise CheckpointError(f"the checkpoint does not match: {where} is {value!r:.60}")
    return value


FIT_ADVICE = ("capturable", "differentiable", "foreach", "fused")
"""Options that say how an update is computed and not which: this program's own stay."""


_ADAM = ("step", "exp_avg", "exp_avg_sq")


_SLOTS: dict[str, tuple[str, ...]] = {
    "ASGD": ("step", "eta", "mu", "ax"),
    "Adadelta": ("step", "square_avg", "acc_delta"),
    "Adagrad": ("step", "sum"),
    "Adam": _ADAM,
    "AdamW": _ADAM,
    "Adamax": ("step", "exp_avg", "exp_inf"),
    "NAdam": (*_ADAM, "mu_product"),
    "RAdam": _ADAM,
    "RMSprop": ("step", "square_avg"),
    "Rprop": ("step", "prev", "step_size"),
    "SGD": (),
    "SparseAdam": _ADAM,
}
"""What torch's own optimizers keep for a parameter that was updated."""


_ASKED = (("amsgrad", "max_exp_avg_sq"), ("centered", "grad_avg"))


_SCALARS = ("step", "eta", "mu", "mu_product")


_SQUARES = ("acc_delta", "exp_avg_sq", "exp_inf", "max_exp_avg_sq", "square_avg", "step", "sum")


_GIVEN = ("params", "initial_lr")


_LIKE, _NUMBER = "shaped like the parameter", "a scalar"


_ONE = (_LIKE, _NUMBER)  # of a parameter with one element: there is no telling which


_MISSING = ...


def check_optimizer(saved: Mapping[str, Any], optimizer: Optimizer) -> None:
    """Refuse the state of another optimizer, or one whose numbers no optimizer could have."""
    groups, state = saved.get("param_groups"), saved.get("state")
    if not isinstance(groups, list) or not isinstance(state, Mapping) or not all(isinstance(g, dict) for g in groups):
        raise _refusal("not the state of an optimizer")
    _check_groups(groups, optimizer)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    options = [group for group in groups for _ in group["params"]]
    known = _SLOTS.get(type(optimizer).__name__) if type(optimizer).__module__.startswith("torch.optim") else None
    for number, slots in state.items():
        if not isinstance(slots, Mapping):
            raise _refusal(f"the state of parameter {number!r:.40} is a {type(slots).__name__}")
        if type(number) is int and not 0 <= number < len(parameters):
            raise _refusal(f"it has moments for parameter {number}, but there are only {len(parameters)}")
        if known is None:
            continue
        if type(number) is not int:
            raise _refusal(f"it has moments for an unknown parameter {number!r:.40}")
        _check_slots(number, slots, parameters[number], known, options[number])
    if known is None:
        _check_alike(state, optimizer)


def _check_groups(groups: list[dict[str, Any]], optimizer: Optimizer) -> None:
    present = optimizer.param_groups
    counts = [len(group["params"]) if isinstance(group.get("params"), list) else -1 for group in groups]
    if counts != [len(group["params"]) for group in present]:
        raise CheckpointError(
            f"the checkpoint does not match: its optimizer has parameter groups of {counts}, this one has others; "
            "build it the same way"
        )
    numbers = [number for group in groups for number in group["params"]]
    if not all(type(number) is int for number in numbers) or len(set(numbers)) != len(numbers):
        raise _refusal("its parameters are not numbered consecutively")
    for place, (theirs, mine) in enumerate(zip(groups, present, strict=True)):
        odd = (set(theirs) - set(_GIVEN)) ^ (set(mine) - set(_GIVEN))
        if odd:
            names = ", ".join(sorted(map(str, odd)))
            raise CheckpointError(f"the checkpoint is of a different optimizer: they differ in {names}")
        for key in theirs.keys() & mine.keys() - {"params"}:
            _check_option(f"group {place}: {key}", theirs[key], mine[key])
        if type(theirs.get("initial_lr", 0.0)) not in (int, float, Tensor):
            raise _refusal(f"group {place}: initial_lr is {theirs['initial_lr']!r:.40}")
        _check_together(place, theirs, optimizer)


def _check_option(where: str, saved: Any, present: Any) -> None:
    """Of the same kind as here: a number stays a number, a pair a pair."""
    if isinstance(present, bool) or present is None or isinstance(saved, bool) or saved is None:
        fits = all(value is None or isinstance(value, bool) for value in (saved, present))
        fits = fits or saved is None or (present is None and not isinstance(saved, bool))  # unset there, or here
    elif isinstance(present, tuple | list):
        fits = isinstance(saved, tuple | list) and len(saved) == len(present)
        for here, there in zip(present, saved if fits else (), strict=False):
            _check_option(where, there, here)
    elif isinstance(present, int | float | Tensor):
        fits = isinstance(saved, int | float) or (isinstance(saved, Tensor) and saved.numel() == 1)
        fits = fits and math.isfinite(float(saved))  # sync: on loading, in host memory
    else:
        fits = type(saved) is type(present)
    if not fits:
        raise _refusal(f"{where} is {saved!r:.60}")


def _check_together(place: int, group: Mapping[str, Any], optimizer: Optimizer) -> None:
    """Have torch's own constructor look at the values; others' may do anything."""
    kind = type(optimizer)
    if not kind.__module__.startswith("torch.optim") or kind.__name__ not in _SLOTS:
        return
    accepted = inspect.signature(kind).parameters
    options = {k: v for k, v in group.items() if k in accepted and k not in FIT_ADVICE and k != "params"}
    try:
        kind([torch.nn.Parameter(torch.zeros(1))], **options)
    except (ValueError, TypeError, RuntimeError) as error:
        raise _refusal(f"group {place}: {error}") from None


def _check_slots(
    number: int, slots: Mapping[str, Any], parameter: Tensor, known: tuple[str, ...], options: Mapping[str, Any]
) -> None:
    where = f"parameter {number}: "
    asked = {slot for option, slot in _ASKED if options.get(option)}
    missing = {*known, *asked} - slots.keys() if slots else ()
    if missing:
        raise _refusal(f"{where}{', '.join(sorted(missing))} is missing")
    for name, value in slots.items():
        if name in _SCALARS:
            _check_scalar(where + name, value, squared=name in _SQUARES)
        elif value is not None or name in known:
            if not isinstance(value, Tensor | Spread):
                raise _refusal(f"{where}{name!s:.40} is a {type(value).__name__}")
            if value.shape != parameter.shape:
                shapes = f"{list(value.shape)} in the checkpoint and {list(parameter.shape)} in this model"
                raise _refusal(f"{where}{name} has shape {shapes}")
            if type_name(value.dtype) != type_name(parameter.dtype) and name not in _SQUARES:
                raise _refusal(f"{where}{name} is {value.dtype}")
            if name in _SQUARES and isinstance(value, Tensor) and (not value.is_floating_point() or _any_below(value)):
                raise _refusal(f"{where}{name} is negative or not a real number")


def _check_scalar(where: str, value: Any, *, squared: bool) -> None:
    if isinstance(value, Tensor):
        fits = value.numel() == 1 and value.is_floating_point()
        value = float(value) if fits else math.nan  # sync: on loading, in host memory
    fits = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not fits or (squared and value < 0):
        raise _refusal(f"{where} is {value!r:.40}")


def _any_below(value: Tensor) -> bool:
    return bool((value < 0).any())  # sync: on loading, in host memory


def _check_alike(state: Mapping[Any, Mapping[str, Any]], optimizer: Optimizer) -> None:
    """What a slot of an unknown optimizer looks like is known from the other parameters of its group.

    One that differs from all others is refused. Where two differ, or few can be compared, there is a reason: low-rank
    moments of some matrices, quantised ones of the large.
    """
    places = [(place, p) for place, group in enumerate(optimizer.param_groups) for p in group["params"]]
    held = {number: slots for number, slots in state.items() if type(number) is int and slots}
    names: dict[tuple[int, int], set[str]] = defaultdict(set)
    for number, slots in held.items():
        names[places[number][0], places[number][1].dim()] |= slots.keys()
    seen: dict[tuple[str, int, int], dict[int, str]] = defaultdict(dict)
    for number, slots in held.items():
        place, parameter = places[number]
        for name in names[place, parameter.dim()]:
            value = slots.get(name, _MISSING)
            if value is not None and not (parameter.numel() == 1 and _look(value, parameter) in _ONE):
                seen[name, place, parameter.dim()][number] = _look(value, parameter)
    for place_of, looks in seen.items():
        slot = place_of[0]
        usual, times = Counter(looks.values()).most_common(1)[0]
        sure = usual == _LIKE or (usual == _NUMBER and slot == "step")
        if sure and times == len(looks) - 1 >= 2:
            odd = next(number for number, look in looks.items() if look != usual)
            raise _refusal(f"parameter {odd}: {slot} is {looks[odd]}, but {usual} for all others")


def _look(value: Any, parameter: Tensor) -> str:
    if value is _MISSING:
        return "missing"
    if isinstance(value, Tensor | Spread):
        if value.shape == parameter.shape:
            # bytes stand for quantised moments, wider integers for nothing that is known
            odd = type_name(value.dtype) == "whole" and value.dtype.itemsize > 1
            return f"{value.dtype}" if odd else _LIKE
        return _NUMBER if math.prod(value.shape) == 1 else f"a tensor of {list(value.shape)}"
    if isinstance(value, int | float) and not isinstance(value, bool):
        return _NUMBER
    return f"a {type(value).__name__}"


def _refusal(what: str) -> CheckpointError:
    return CheckpointError(f"the checkpoint's optimizer does not match: {what}")
