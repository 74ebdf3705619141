"""Hearing of a loop's `loss.backward()` and `clip_grad_norm_`, and how its optimizer's step was called.

Torch has hooks for an optimizer's step, for a module's forward pass and for the gradient of a tensor one holds, but
none that says which tensor `backward` was called on. So while at least one watcher listens, `torch.Tensor.backward`
tells them before and after it does what it always did. With the last listener the attribute is what it was:
docs/adr/0004.
"""

import functools
import inspect
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, final

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad
from torch.optim import Optimizer

from steadystep._utils.text import logger
from steadystep.engine.ownership import others_guard
from steadystep.optimizers import WRAPPER


class Listener(Protocol):
    """Who wants to know."""

    def hush(self) -> None:
        """Stop listening to the functions that the loop calls: backward is one too."""
        ...

    def before_backward(self, loss: Tensor, *, plainly: bool) -> None:
        """Gradients are about to be added; `plainly`: of one number, to all that led to it."""
        ...

    def after_backward(self, loss: Tensor | None) -> None:
        """They have been; None when it was not called on one real number."""
        ...


_LISTENERS: "list[weakref.ref[Any]]" = []  # why no WeakSet: to go through one costs as much as a norm
_made: dict[Callable[..., None], Callable[..., None]] = {}  # the newest one of ours, and what it stands in front of
_telling = threading.local()


def _told(plain: Callable[..., None]) -> Callable[..., None]:
    """What was there, torch's own method or somebody's wrapper of it, with a word to the listeners around it."""

    @functools.wraps(plain)
    def tell(self: Tensor, gradient: Any = None, *args: Any, **kwargs: Any) -> None:
        listeners: list[Listener] = [listener for reference in _LISTENERS if (listener := reference()) is not None]
        for listener in listeners:
            listener.hush()
        # why: torch comes back here for what is inside a subclass; and somebody may have wrapped an older one of ours
        if torch.overrides.has_torch_function_unary(self) or getattr(_telling, "now", False):
            plain(self, gradient, *args, **kwargs)
            return
        plainly = gradient is None and not args and not kwargs.get("create_graph") and kwargs.get("inputs") is None
        for listener in listeners:
            listener.before_backward(self, plainly=plainly)
        _telling.now = True
        try:
            plain(self, gradient, *args, **kwargs)
        finally:
            _telling.now = False
        loss = self if gradient is None and self.numel() == 1 and self.is_floating_point() else None
        for listener in listeners:
            listener.after_backward(loss)

    backward: Callable[..., None] = torch.compiler.disable(tell)  # type: ignore[no-untyped-call]  # why: as torch's own
    _made.clear()
    _made[backward] = plain
    return backward


def _replaced() -> Callable[..., None] | None:
    """What ours stands in front of, where ours is the one that is called."""
    return _made.get(torch.Tensor.backward)


def listen_to_backward(listener: Listener) -> None:
    """Tell `listener` until `stop` is called with it, or it is gone."""
    _LISTENERS[:] = [reference for reference in _LISTENERS if reference() is not None]
    _LISTENERS.append(weakref.ref(listener))
    if _replaced() is None:
        torch.Tensor.backward = _told(torch.Tensor.backward)  # type: ignore[method-assign]


def stop_listening(listener: Listener) -> None:
    """Leave it alone. With the last one the method is what it was."""
    _LISTENERS[:] = [reference for reference in _LISTENERS if reference() not in (None, listener)]
    # why: somebody may have wrapped ours since; theirs is not ours to remove, and ours does nothing without listeners
    plain = _replaced()
    if not _LISTENERS and plain is not None:
        torch.Tensor.backward = plain  # type: ignore[method-assign]


_CERTAIN = 8  # changes of the weights; loading them once or twice is none of this


@final
class StepsElsewhere:
    """Warns once where weights change between backward passes and `step` of their optimizer was never called."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._optimizers, self._changes = optimizers, 0
        self._versions: list[int] | None = None

    def stop(self) -> None:
        """A step was called."""
        self._changes = _CERTAIN

    def look(self) -> None:
        """Another backward pass begins."""
        if self._changes == _CERTAIN:
            return
        versions = [p._version for each in self._optimizers for group in each.param_groups for p in group["params"]]
        self._changes += self._versions is not None and versions != self._versions
        self._versions = versions
        if self._changes == _CERTAIN and not others_guard(self._optimizers):
            names = " or ".join(f"{type(each).__name__}.step()" for each in self._optimizers)
            logger.warning(
                "the weights change between backward passes, and %s has not been called: these updates are not "
                "guarded. Give watch() %s",
                names,
                self._advice(),
            )

    def _advice(self) -> str:
        held = ((name, one) for each in self._optimizers for name, one in vars(each).items())
        inner = next((name for name, one in held if isinstance(one, Optimizer)), "")
        call = f": watch(model, optimizer.{inner})" if inner else ""
        return f"the optimizer whose step() the loop calls{call}"


_NORM, _SCALE = "_get_total_norm", "_clip_grads_with_norm_"
_OTHERS = ("clip_grads_with_norm_", "clip_grad_value_")  # of `torch.nn.utils`: they leave no trace in a DTensor


@final
@dataclass(frozen=True, slots=True)
class Clip:
    """One call of it."""

    parameters: Sequence[Tensor]
    max_norm: float
    norm_type: float
    foreach: bool | None

    def __call__(self) -> None:
        """Once more, on the gradients as they are."""
        torch.nn.utils.clip_grad_norm_(self.parameters, self.max_norm, self.norm_type, foreach=self.foreach)


class Hearer(Protocol):
    """Who wants to know."""

    def clipped(self, clip: Clip, total_norm: Tensor) -> None:
        """Gradients were held down; their norm was `total_norm`."""
        ...

    def changed(self, parameters: Sequence[Tensor]) -> None:
        """Gradients of these were changed by another function of torch."""
        ...


_HEARERS: "weakref.WeakSet[Any]" = weakref.WeakSet()
_plain: dict[str, Callable[..., Any]] = {}
_norm_type = 2.0


def _total(tensors: Any, norm_type: float = 2.0, *args: Any, **kwargs: Any) -> Any:
    global _norm_type  # why: torch's two functions know of each other only through their caller
    _norm_type = float(norm_type)
    return _plain[_NORM](tensors, norm_type, *args, **kwargs)


def _scaled(
    parameters: Iterable[Tensor] | Tensor, max_norm: float, total_norm: Tensor, foreach: bool | None = None
) -> None:
    held = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    _plain[_SCALE](held, max_norm, total_norm, foreach)
    clip = Clip(held, float(max_norm), _norm_type, foreach)
    for hearer in tuple(_HEARERS):
        hearer.clipped(clip, total_norm)


def _told_of(name: str) -> Callable[..., Any]:
    @functools.wraps(_plain[name])
    def tell(parameters: Iterable[Tensor] | Tensor, *args: Any, **kwargs: Any) -> Any:
        held = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        result = _plain[name](held, *args, **kwargs)
        for hearer in tuple(_HEARERS):
            hearer.changed(held)
        return result

    return tell


def listen_to_clipping(hearer: Hearer) -> None:
    """Tell `hearer` until `stop` is called with it, or it is gone."""
    _HEARERS.add(hearer)
    found = {name: vars(clip_grad).get(name) for name in (_NORM, _SCALE)}
    if all(callable(function) for function in found.values()) and _scaled not in found.values():
        _plain.update({name: function for name, function in found.items() if function is not None})
        vars(clip_grad).update({_NORM: _total, _SCALE: _scaled})
        _plain.update({name: vars(nn.utils)[name] for name in _OTHERS if callable(vars(nn.utils).get(name))})
        vars(nn.utils).update({name: _told_of(name) for name in _OTHERS if name in _plain})


def stop_hearing(hearer: Hearer) -> None:
    """Leave it alone. With the last one torch's functions are back."""
    _HEARERS.discard(hearer)
    if not _HEARERS and vars(clip_grad).get(_SCALE) is _scaled and vars(clip_grad).get(_NORM) is _total:
        vars(clip_grad).update({name: _plain[name] for name in (_NORM, _SCALE)})
        vars(nn.utils).update({name: _plain[name] for name in _OTHERS if name in _plain})


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
