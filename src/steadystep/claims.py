"""Which optimizer has a guard: two guards on one optimizer would each undo what the other decided."""

import gc
import inspect
import weakref
from typing import Any, ClassVar, final

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


@final
class Turns:
    """Whether guards of one process take turns: a generator and its critic, an actor and its critic.

    The loss of each then depends on the other, and its level says little by itself.
    """

    _ENOUGH, _MOST, _EACH = 16, 64, 8
    _last: ClassVar["weakref.ref[Turns] | None"] = None

    def __init__(self) -> None:
        self._count = 0

    @property
    def are_taken(self) -> bool:
        """Another guard has stepped between the steps of this one, again and again."""
        return self._count >= self._ENOUGH

    def take(self) -> None:
        """This guard looks at a step."""
        last = None if Turns._last is None else Turns._last()
        if last is self:
            self._count -= self._count > 0
            return
        Turns._last = weakref.ref(self)
        if last is not None:
            self._count = min(self._count + self._EACH, self._MOST)
