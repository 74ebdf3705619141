"""A refused step of any optimizer leaves weights and state at their bits.

Torch's own optimizers leave a parameter without a gradient alone, so a step without gradients is no step. Others count
in their groups, turn a missing gradient into zeros and move by their momentum, keep moments in attributes, or wrap
another optimizer. They step over zeros, and what they did is undone: one copy of weights and state, only then.
"""

import copy
import inspect
import types
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, final

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from steadystep._utils.modules import TensorCopy
from steadystep._utils.rng import RngState, generator_back
from steadystep.optimizers.bare_calls import WRAPPER

_QUIET = frozenset(
    (
        torch.optim.ASGD,
        torch.optim.Adadelta,
        torch.optim.Adafactor,
        torch.optim.Adagrad,
        torch.optim.Adam,
        torch.optim.AdamW,
        torch.optim.Adamax,
        torch.optim.Muon,
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.RMSprop,
        torch.optim.Rprop,
        torch.optim.SGD,
        torch.optim.SparseAdam,
    )
)
_HOOKS = "_optimizer_"  # how torch names the hooks of an optimizer
_PLAIN = (str, bytes, int, float, complex, bool, type(None), torch.dtype, torch.device)
_SKIPPED = (nn.Module, types.FunctionType, types.MethodType, types.ModuleType, type)


def is_quiet(optimizer: Optimizer) -> bool:
    """Whether a step without gradients is known to change nothing. A subclass may do as it likes."""
    return type(optimizer) in _QUIET


@final
class Undo:
    """Everything an optimizer may change in a step, as it is now: weights, state, groups, its other attributes.

    It is put back in place, so that whoever holds a tensor of it (a compiled model, a wrapper) goes on with it.
    """

    def __init__(self, optimizer: Optimizer, *, rng: bool = False) -> None:
        self._optimizer = optimizer
        self._weights = [p for group in optimizer.param_groups for p in group["params"]]
        self._tensors: list[TensorCopy] = []
        self._arrays: list[tuple[Any, Any]] = []
        self._generators: list[Callable[[], Any]] = []
        self._held: list[tuple[Any, Any]] = []
        self._rng = RngState(self._weights[0].device) if rng and self._weights else None
        self._module = type(optimizer).__module__
        seen: dict[int, Any] = {}
        waiting: list[Any] = [optimizer]
        while waiting:
            thing = waiting.pop()
            if id(thing) not in seen:
                seen[id(thing)] = thing
                waiting.extend(self._keep(thing))

    @property
    def needed(self) -> bool:
        """A weight is not finite."""
        norms = torch._foreach_norm([p.detach() for p in self._weights], torch.inf)
        return not bool(torch.stack([norm.float() for norm in norms]).isfinite().all())  # sync: per step of LBFGS

    @property
    def moved(self) -> bool:
        """Something is no longer what it was."""
        # sync: in the first steps with a closure
        return any(kept.differs for kept in self._tensors) or any(_changed(*pair) for pair in self._held)

    @torch.no_grad()
    def back(self) -> None:
        """As if the step had not been taken; without gradients."""
        for thing, kept in self._held:
            _refill(thing, kept)
        for copy_of in self._tensors:
            copy_of.write()
        for array, value in self._arrays:
            array[...] = value
        for restore in self._generators:
            restore()
        for parameter in self._weights:
            parameter.grad = None
        if self._rng is not None:
            self._rng.restore()

    def _keep(self, thing: Any) -> Iterator[Any]:
        """Remember one thing; what it holds comes next."""
        if isinstance(thing, Tensor):
            self._tensors.append(TensorCopy(thing))
        elif isinstance(thing, np.ndarray):
            self._arrays.append((thing, thing.copy()))
        elif (restore := generator_back(thing)) is not None:
            self._generators.append(restore)
        elif isinstance(thing, dict | list | set | deque):
            self._held.append((thing, copy.copy(thing)))
            yield from thing.values() if isinstance(thing, dict) else thing
        elif isinstance(thing, tuple):
            yield from thing
        elif self._is_own(thing):
            own = _attributes(thing)
            self._held.append((thing, own))
            yield from own.values()

    def _is_own(self, thing: Any) -> bool:
        """An optimizer inside the optimizer, or a helper written beside it; not the trainer it may know."""
        if isinstance(thing, (*_PLAIN, *_SKIPPED)):
            return False
        return isinstance(thing, Optimizer) or (type(thing).__module__ == self._module and hasattr(thing, "__dict__"))


def _refill(thing: Any, kept: Any) -> None:
    if isinstance(thing, list | deque):
        thing.clear()
        thing.extend(kept)
    elif isinstance(thing, dict | set):
        thing.clear()
        thing.update(kept)
    else:
        held = vars(thing)
        for name in [name for name in held if name not in kept and not name.startswith(_HOOKS)]:
            del held[name]
        held.update(kept)


def _changed(thing: Any, kept: Any) -> bool:
    """Whether it holds other things than it held; what they hold is looked at by itself."""
    now = thing if isinstance(thing, dict | list | set | deque) else _attributes(thing)
    if len(now) != len(kept):
        return True
    if isinstance(now, dict):
        return any(key not in now or _differ(now[key], value) for key, value in kept.items())
    return not isinstance(now, set) and any(map(_differ, now, kept))


def _differ(now: Any, then: Any) -> bool:
    return now is not then and not (isinstance(then, _PLAIN) and now == then)


def _attributes(thing: Any) -> dict[str, Any]:
    return {key: value for key, value in vars(thing).items() if not key.startswith(_HOOKS)}


StepClosure = Callable[[], Any]


def closure_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> StepClosure | None:
    """What a step was called with; the optimizer itself comes first."""
    return args[1] if len(args) > 1 else kwargs.get("closure")


def with_closure(args: tuple[Any, ...], kwargs: dict[str, Any], closure: StepClosure) -> tuple[Any, Any]:
    """The same arguments with another closure."""
    if len(args) > 1:
        return (args[0], closure, *args[2:]), kwargs
    return args, {**kwargs, "closure": closure}


def may_nest(optimizer: Optimizer) -> bool:
    """A subclass may call the step of the class above it, and torch then calls our hooks inside our hooks."""
    kinds = [kind for kind in type(optimizer).__mro__ if kind is not Optimizer and "step" in vars(kind)]
    return len({_inner(vars(kind)["step"]) for kind in kinds}) > 1


def _inner(step: Any) -> Any:
    """Torch wraps the step that a class inherits anew: AdamW's is Adam's, and does not call it."""
    return step.__wrapped__ if getattr(step, "__code__", None) is WRAPPER else step


def is_nested(optimizer: Optimizer) -> bool:
    """Called from a hook: whether a step of `optimizer` is inside another one of its steps."""
    depth, frame = 0, inspect.currentframe()
    while frame is not None and depth < 2:
        depth += frame.f_code is WRAPPER and frame.f_locals.get("self") is optimizer
        frame = frame.f_back
    return depth > 1


def loss_is_finite(loss: Any, optimizer: Optimizer) -> bool:
    """One evaluation of a closure: its loss and all gradients."""
    grads = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    numbers = [norm.float() for norm in torch._foreach_norm(grads, torch.inf)] if grads else []
    if isinstance(loss, Tensor):
        numbers.append(loss.detach().reshape(()).float())
    return bool(torch.stack(numbers).isfinite().all()) if numbers else True  # sync: per evaluation of LBFGS
