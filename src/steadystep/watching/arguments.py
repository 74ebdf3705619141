"""What `watch` was given, looked at before anything is hooked."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from steadystep.config import Config
from steadystep.engine.arguments import has_method, sequence
from steadystep.engine.ownership import refuse_foreign_steps
from steadystep.errors import ConfigError, MisuseError
from steadystep.optimizers import as_one
from steadystep.records import Outcome


def check_watched(model: nn.Module, optimizer: Optimizer | Sequence[Optimizer] | None) -> None:
    """One that the loop steps, or several."""
    if optimizer is None:
        raise MisuseError(
            "watch() takes the optimizer that the loop steps; without one: Guard(model, None), inspect, commit"
        )
    for each in optimizer if isinstance(optimizer, list | tuple) else [optimizer]:
        refuse_foreign_steps(model, each)


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
            raise MisuseError(f"schedulers: {scheduler!r} has no step(): give the schedulers that the loop steps")
    return found


def checked_settings(config: Config) -> Config:
    """Those that do not ask for what the loop does itself."""
    theirs = {
        "training.mixed_precision": config.training.mixed_precision != "fp32",
        "training.gradient_accumulation_steps": config.training.gradient_accumulation_steps != 1,
        "training.fp32_modules": bool(config.training.fp32_modules),
        "monitoring.save_checkpoints": bool(config.monitoring.save_checkpoints),
    }
    named = [key for key, is_set in theirs.items() if is_set]
    if named:
        raise ConfigError(
            f"watch: {', '.join(named)} cannot be honoured here, because the loop does this itself. Leave it out; "
            "with your own checkpoints save watcher.guard.state_dict()"
        )
    return config
