"""Steps with a closure: `optimizer.step(closure)` computes loss and gradients only once it is inside.

Most optimizers call it once, at the beginning; then it is the place to decide. LBFGS calls it as often as it likes and
moves the weights in between, so what it started from is kept, and a step that met a NaN on its way is undone.
"""

import copy
from collections.abc import Callable
from typing import Any, final

import torch
from torch import Tensor
from torch.optim import Optimizer

Closure = Callable[[], Any]


def closure_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Closure | None:
    """What a step was called with; the optimizer itself comes first."""
    return args[1] if len(args) > 1 else kwargs.get("closure")


def with_closure(args: tuple[Any, ...], kwargs: dict[str, Any], closure: Closure) -> tuple[Any, Any]:
    """The same arguments with another closure."""
    if len(args) > 1:
        return (args[0], closure, *args[2:]), kwargs
    return args, {**kwargs, "closure": closure}


@final
class Undo:
    """The weights and the state that a step started from. One copy of both."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._weights = [(p, p.detach().clone()) for group in optimizer.param_groups for p in group["params"]]
        self._state = {p: copy.deepcopy(state) for p, state in optimizer.state.items()}

    @property
    def needed(self) -> bool:
        """A weight is not finite."""
        norms = torch._foreach_norm([p.detach() for p, _ in self._weights], torch.inf)
        return not bool(torch.stack([norm.float() for norm in norms]).isfinite().all())  # sync: per step of LBFGS

    @torch.no_grad()
    def back(self) -> None:
        """As if the step had not been taken."""
        for parameter, weight in self._weights:
            parameter.copy_(weight)
            parameter.grad = None
        self._optimizer.state.clear()
        self._optimizer.state.update(self._state)


def is_finite(loss: Any, optimizer: Optimizer) -> bool:
    """One evaluation of a closure: its loss and all gradients."""
    grads = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    numbers = [norm.float() for norm in torch._foreach_norm(grads, torch.inf)] if grads else []
    if isinstance(loss, Tensor):
        numbers.append(loss.detach().reshape(()).float())
    return bool(torch.stack(numbers).isfinite().all()) if numbers else True  # sync: per evaluation of LBFGS
