"""What a call was given, looked at before anything is changed: a mistake costs one error that says what to do."""

import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NoReturn

from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from steadystep._utils.text import dotted
from steadystep.config import Config
from steadystep.errors import ConfigError, MisuseError
from steadystep.optimizers import as_one, each_of
from steadystep.records import Outcome

_INSIDE = "was called inside step(): the closure may only compute the loss"
_DETECTOR = ("update", "state_dict", "load_state_dict")
_SINK = ("start", "step", "validation", "layers", "histograms", "incident", "close")


def check_work(work: object) -> None:
    """A loss, or what computes one."""
    if not isinstance(work, Tensor) and not callable(work):
        raise MisuseError(
            f"step() was given {_a(work)}: pass a function that computes the loss, guard.step(lambda: "
            "loss_fn(model(x), y)), or the loss as a tensor"
        )


def refuse_inside(call: str, *, busy: bool) -> None:
    """What must wait until the step is over."""
    if busy:
        raise MisuseError(f"{call}() {_INSIDE}")


def check_model(model: object) -> None:
    """A module of torch's."""
    if not isinstance(model, nn.Module):
        raise MisuseError(f"model must be a torch.nn.Module, got {type(model).__name__}")


def check_storage(model: nn.Module) -> None:
    """Parameters that hold numbers."""
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            raise MisuseError(
                f"{name} is on the meta device and has no data: call model.to_empty(device=...), initialize or load "
                "the weights, then create the optimizer and the guard"
            )


def check_loss(call: str, loss: object) -> Tensor:
    """One real number in a tensor."""
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.is_floating_point():
        raise MisuseError(f"{call}() takes the loss as a tensor of one real number, got {_a(loss)}: take its mean")
    if loss.is_meta:
        raise MisuseError(f"{call}() got a loss on the meta device: move the model and the batch to a real device")
    return loss


def real_number(what: str, value: object) -> float:
    """One real number, given as one or as a tensor or array of one element."""
    try:
        if isinstance(value, str | bytes | bytearray) or (isinstance(value, Tensor) and value.is_meta):
            raise TypeError
        item = getattr(value, "item", None)  # why: numpy no longer takes an array of one element for a number
        return float(item() if callable(item) else value)  # type: ignore[arg-type]  # sync: when a tensor is given
    except (TypeError, ValueError, OverflowError, RuntimeError):
        raise MisuseError(f"{what} must be one real number, got {_a(value)}: use .item(), float() or a mean") from None


def check_kept(name: object, thing: object, update: object) -> None:
    """Something with a name and a state that can be put back, and perhaps what updates it."""
    if not isinstance(name, str) or not name:
        raise MisuseError(f"keep() takes a name first, as in guard.keep('ema', ema); got {_a(name)}")
    lacking = [
        part for part in ("state_dict", "load_state_dict") if isinstance(thing, type) or not has_method(thing, part)
    ]
    if lacking:
        raise MisuseError(
            f"keep({name!r}, ...) got {_a(thing)} without {' and '.join(lacking)}: pass an object that has both"
        )
    if update is not None and not callable(update):
        raise MisuseError(f"update = {update!r}: must be a function without arguments that updates {name!r}")


def saved_state(saved: object) -> Mapping[str, Any]:
    """What state_dict() gave."""
    if not isinstance(saved, Mapping):
        raise MisuseError(f"load_state_dict() takes what guard.state_dict() returned, got {_a(saved)}")
    return saved


def folder(key: str, path: object) -> Path:
    """A folder that can have this name."""
    if not isinstance(path, str | os.PathLike) or "\0" in (text := os.fspath(path)) or not isinstance(text, str):
        raise MisuseError(f"{key} = {path!r}: must be a path to a folder, as a str or pathlib.Path")
    return Path(text).expanduser()


def batch_numbers(skip: Any) -> frozenset[int]:
    """The numbers of batches that are to be left out."""
    numbers: list[Any] = list(skip) if isinstance(skip, Iterable) and not isinstance(skip, str | bytes) else [None]
    if any(type(number) is not int or number < 0 for number in numbers):
        raise MisuseError(
            "batches(..., skip=...) takes numbers of batches: [n for q in guard.quarantined for n in q.batches]"
        )
    return frozenset(numbers)


def staging_future(staging: Any) -> Future[Any]:
    """The future that is done when the weights have been copied."""
    found = getattr(staging, "staging_completion", staging)
    if not isinstance(found, Future):
        raise MisuseError(f"wait_for() takes a future, such as what dcp.async_save returned; got {_a(staging)}")
    return found


def check_loader(loader: object) -> None:
    """Something to take batches from."""
    if not isinstance(loader, Iterable) and not hasattr(loader, "__getitem__"):
        raise MisuseError(f"batches() takes a DataLoader or another iterable of batches, got {_a(loader)}")


def check_extras(detectors: object, sinks: object) -> None:
    """Detectors and sinks of the user's own."""
    _check_all("detectors", detectors, _DETECTOR, "see steadystep.detectors.Detector")
    _check_all("sinks", sinks, _SINK, "see steadystep.tracking.Sink; to choose one by name use monitoring.sinks")
    for detector in sequence("detectors", detectors):
        if not isinstance(getattr(detector, "name", None), str):
            raise MisuseError(f"detectors: {type(detector).__name__} needs a unique name (str)")


def sequence(key: str, given: object) -> Sequence[Any]:
    """A list of things; a text is one thing, and so is a mapping."""
    if isinstance(given, str | bytes | Mapping) or not isinstance(given, Iterable):
        raise MisuseError(f"{key} = {given!r}: must be a list")
    return given if isinstance(given, Sequence) else tuple(given)


def refuse_copy() -> NoReturn:
    """Of a guard."""
    raise MisuseError(
        "a guard cannot be pickled or copied: it belongs to one model, one optimizer and one process. Save "
        "guard.state_dict() and load it into a guard created there; exclude the guard from what you send or copy"
    )


def _check_all(key: str, given: object, methods: Sequence[str], see: str) -> None:
    for thing in sequence(key, given):
        lacking = [name for name in methods if isinstance(thing, type) or not has_method(thing, name)]
        if lacking:
            raise MisuseError(f"{key}: {_a(thing)} has no {', '.join(lacking)}: pass an object that has ({see})")


def has_method(thing: object, name: str) -> bool:
    """Whether it can be called on it."""
    return callable(getattr(thing, name, None))


def _a(value: object) -> str:
    """What it is, in a few words."""
    if isinstance(value, Tensor):
        return f"a {str(value.dtype).removeprefix('torch.')} tensor of shape {list(value.shape)} on {value.device}"
    if isinstance(value, type):
        return f"the class {value.__name__} itself"
    shown = repr(value) if isinstance(value, str | int | float | complex | bool | None) else ""
    return f"{type(value).__name__} {shown[:40]}".strip() if value is not None else "None"


def checked_scaler(scaler: GradScaler | None) -> GradScaler | None:
    """The loop's own, or none."""
    if scaler is not None and not (has_method(scaler, "is_enabled") and has_method(scaler, "get_scale")):
        raise MisuseError(f"scaler = {scaler!r}: must be the torch.amp.GradScaler that the loop uses")
    return scaler


def checked_listener(tell: Callable[[Outcome], None] | None) -> Callable[[Outcome], None] | None:
    """Whoever wants to be told what became of a step."""
    if tell is not None and not callable(tell):
        raise MisuseError(f"tell = {tell!r}: must be a function that takes an Outcome")
    return tell


def torch_optimizer(optimizer: Optimizer | Sequence[Optimizer]) -> Optimizer:
    """Torch's optimizer, or several of them as one, without what a framework has wrapped around them."""
    one: Optimizer
    if isinstance(optimizer, list | tuple):
        one = as_one([inner_optimizer(each) for each in optimizer])
    else:
        one = inner_optimizer(optimizer)
    return one


def inner_optimizer(optimizer: Any) -> Any:
    """Torch's optimizer inside what a framework has wrapped around it."""
    inner = getattr(optimizer, "optimizer", None)
    while isinstance(inner, Optimizer):
        optimizer, inner = inner, getattr(inner, "optimizer", None)
    return optimizer


def checked_schedulers(given: object) -> Sequence[Any]:
    """Anything that steps."""
    for scheduler in (found := sequence("schedulers", given)):
        steps = any(has_method(scheduler, name) for name in dir(scheduler) if name.startswith("step"))
        if isinstance(scheduler, type) or not steps:  # timm's have a step_update
            raise MisuseError(f"schedulers: {scheduler!r} has no step(): pass the schedulers that the loop steps")
    return found


def checked_settings(config: Config) -> Config:
    """Those that do not ask for what the loop does itself."""
    theirs = {
        "training.mixed_precision": config.training.mixed_precision != "fp32",
        "training.gradient_accumulation_steps": config.training.gradient_accumulation_steps != 1,
        "training.fp32_modules": bool(config.training.fp32_modules),
        "monitoring.save_checkpoints": bool(config.monitoring.save_checkpoints),
    }
    if config.monitoring.recompute_every:
        raise ConfigError("watch: monitoring.recompute_every needs a closure: remove it, or use guard.step(closure)")
    named = [key for key, is_set in theirs.items() if is_set]
    if named:
        raise ConfigError(
            f"watch: {', '.join(named)} has no effect here, because the loop does this itself. Remove it; to save "
            "the guard with your own checkpoints, save watcher.guard.state_dict()"
        )
    return config


def hparams(given: object) -> dict[str, Any]:
    """Check hyperparameters; return them flat and ready for JSON.

    >>> hparams({"batch_size": 32, "model": {"depth": 4}})
    {'batch_size': 32, 'model.depth': 4}
    """
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise MisuseError(f"hparams must be a mapping of names to values, such as vars(args); got {_a(given)}")
    return {str(key): as_plain(value) for key, value in dotted(given)}


def as_plain(value: Any) -> Any:
    """A value for JSON: lists of plain values stay, anything else is text."""
    if isinstance(value, list | tuple):
        return [as_plain(one) for one in value[:100]]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if isinstance(value, bool | int | float | str | None) else str(value)[:200]


_IMPLEMENTATION = ("foreach", "fused", "capturable", "differentiable")
"""Settings that change how an update is computed, not which."""


def hparams_of(optimizer: Optimizer) -> dict[str, Any]:
    """Return the name and the settings of an optimizer, ready for JSON; with its name before each if there are several.

    >>> import torch
    >>> hparams_of(torch.optim.SGD([torch.zeros(1)], lr=0.1, momentum=0.9))["momentum"]
    0.9
    """
    made = each_of(optimizer)
    told: dict[str, Any] = {"optimizer": "+".join(type(one).__name__ for one in made)}
    for one in made:
        prefix = f"{type(one).__name__}." if len(made) > 1 else ""
        values = {key: value for key, value in one.defaults.items() if key not in _IMPLEMENTATION}
        rates = list(dict.fromkeys(_setting(group["lr"]) for group in one.param_groups if "lr" in group))
        values |= {"lr": rates[0] if len(rates) == 1 else rates} if rates else {}
        told |= {f"{prefix}{key}": _setting(value) for key, value in values.items()}
    return told


def _setting(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.tolist() if value.numel() < 8 else f"tensor of {tuple(value.shape)}"  # sync: when a guard is made
    return as_plain(value)


def examined(
    remembered: Sequence[Any], batches: Iterable[Any] | None, loss: Callable[[Any], Tensor] | None
) -> tuple[Iterable[Any], Callable[[Any], Tensor]]:
    """Batches and loss of `Guard.examine`: those that were given, else those of the last steps."""
    if loss is None:
        if not remembered:
            raise MisuseError(
                "examine has no loss: pass loss=, a function of a batch, or train with step(f, batch=...)"
            )
        loss = remembered[-1].closure
    if batches is None:
        batches = [recipe.batch for recipe in remembered]
        if not batches:
            raise MisuseError("examine has no batches: pass your loader, or train with guard.step(closure, batch=...)")
    return batches, loss
