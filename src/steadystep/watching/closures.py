"""Steps with a closure: `optimizer.step(closure)` computes loss and gradients only once it is inside.

Most optimizers call it once, at the beginning; then it is the place to decide. LBFGS calls it as often as it likes and
moves the weights in between, so what it started from is kept, and a step that met a NaN on its way is undone.
"""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from steadystep.bare_calls import WRAPPER

Closure = Callable[[], Any]


def closure_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Closure | None:
    """What a step was called with; the optimizer itself comes first."""
    return args[1] if len(args) > 1 else kwargs.get("closure")


def with_closure(args: tuple[Any, ...], kwargs: dict[str, Any], closure: Closure) -> tuple[Any, Any]:
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


def is_finite(loss: Any, optimizer: Optimizer) -> bool:
    """One evaluation of a closure: its loss and all gradients."""
    grads = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    numbers = [norm.float() for norm in torch._foreach_norm(grads, torch.inf)] if grads else []
    if isinstance(loss, Tensor):
        numbers.append(loss.detach().reshape(()).float())
    return bool(torch.stack(numbers).isfinite().all()) if numbers else True  # sync: per evaluation of LBFGS
