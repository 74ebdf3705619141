"""Which optimizer has a guard: two guards on one optimizer would each undo what the other decided."""

import gc
import inspect
import weakref
from typing import Any

from torch import nn
from torch.optim import Optimizer

from steadystep.errors import MisuseError

_HOLDERS: "weakref.WeakKeyDictionary[Optimizer, weakref.ref[Any]]" = weakref.WeakKeyDictionary()


def claim(holder: object, model: nn.Module, optimizer: Optimizer) -> None:
    """Make `holder` the only guard of `optimizer`."""
    if not isinstance(model, nn.Module):
        raise MisuseError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    if not isinstance(optimizer, Optimizer):
        raise MisuseError(f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}")
    if _held(optimizer):
        gc.collect()  # why: a guard that was dropped inside a reference cycle is not a second guard
    if _held(optimizer):
        raise MisuseError("this optimizer already has a guard: use that one, or call its close() first")
    _HOLDERS[optimizer] = weakref.ref(holder)


def release(optimizer: Optimizer) -> None:
    """Let another guard have it."""
    _HOLDERS.pop(optimizer, None)


def _held(optimizer: Optimizer) -> bool:
    holder = _HOLDERS.get(optimizer)
    return holder is not None and holder() is not None


def needs_closure(optimizer: Optimizer) -> bool:
    """An optimizer that cannot step without one evaluates it as often as it likes."""
    parameter = inspect.signature(type(optimizer).step).parameters.get("closure")
    return parameter is not None and parameter.default is inspect.Parameter.empty
