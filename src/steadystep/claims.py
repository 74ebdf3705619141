"""Which optimizer has a guard: two guards on one optimizer would each undo what the other decided."""

import atexit
import gc
import inspect
import weakref
from typing import Any, ClassVar, final

from torch import nn
from torch.optim import Optimizer

from steadystep.calls import check_model
from steadystep.errors import MisuseError
from steadystep.optimizers import each_of

_HOLDERS: "weakref.WeakKeyDictionary[Optimizer, weakref.ref[Any]]" = weakref.WeakKeyDictionary()


def claim(holder: object, model: nn.Module, optimizer: Optimizer) -> None:
    """Make `holder` the only guard of `optimizer`."""
    check_model(model)
    if not isinstance(optimizer, Optimizer):
        raise MisuseError(f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}")
    if any(map(_held, each_of(optimizer))):
        gc.collect()  # why: a guard that was dropped inside a reference cycle is not a second guard
    if any(map(_held, each_of(optimizer))):
        raise MisuseError("this optimizer already has a guard: use that one, or call its close() first")
    for each in each_of(optimizer):
        _HOLDERS[each] = weakref.ref(holder)


def release(optimizer: Optimizer) -> None:
    """Let another guard have it."""
    for each in each_of(optimizer):
        _HOLDERS.pop(each, None)


@atexit.register
def conclude_all() -> None:
    """Nobody has to call close(): the end of the program is the end of a run too."""
    alive = {id(holder): holder for reference in list(_HOLDERS.values()) if (holder := reference()) is not None}
    for holder in alive.values():  # once each: a guard of several optimizers is there several times
        conclude = getattr(holder, "_conclude", None)
        if conclude is not None:
            conclude()


def _held(optimizer: Optimizer) -> bool:
    holder = _HOLDERS.get(optimizer)
    return holder is not None and holder() is not None


def needs_closure(optimizer: Optimizer) -> bool:
    """An optimizer that cannot step without one evaluates it as often as it likes."""
    found = [inspect.signature(type(each).step).parameters.get("closure") for each in each_of(optimizer)]
    return any(parameter is not None and parameter.default is inspect.Parameter.empty for parameter in found)


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
