"""Hearing of a loop's `loss.backward()`.

Torch has hooks for an optimizer's step, for a module's forward pass and for the gradient of a tensor one holds, but
none that says which tensor `backward` was called on. So while at least one watcher listens, `torch.Tensor.backward`
tells them before and after it does what it always did. With the last listener the attribute is what it was:
docs/adr/0004.
"""

import functools
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor


class Listener(Protocol):
    """Who wants to know."""

    def before_backward(self) -> None:
        """Gradients are about to be added."""
        ...

    def after_backward(self, loss: Tensor | None) -> None:
        """They have been; None when it was not called on one real number."""
        ...


_LISTENERS: "weakref.WeakSet[Any]" = weakref.WeakSet()
_PLAIN: Callable[..., None] = torch.Tensor.backward


@functools.wraps(_PLAIN)
def _telling(self: Tensor, gradient: Any = None, *args: Any, **kwargs: Any) -> None:
    if torch.overrides.has_torch_function_unary(self):  # torch comes back here for what is inside the subclass
        _PLAIN(self, gradient, *args, **kwargs)
        return
    listeners: tuple[Listener, ...] = tuple(_LISTENERS)
    for listener in listeners:
        listener.before_backward()
    _PLAIN(self, gradient, *args, **kwargs)
    loss = self if gradient is None and self.numel() == 1 and self.is_floating_point() else None
    for listener in listeners:
        listener.after_backward(loss)


def listen(listener: Listener) -> None:
    """Tell `listener` until `stop` is called with it, or it is gone."""
    _LISTENERS.add(listener)
    if torch.Tensor.backward is _PLAIN:
        torch.Tensor.backward = _telling  # type: ignore[method-assign]


def stop(listener: Listener) -> None:
    """Leave it alone. With the last one torch's own method is back."""
    _LISTENERS.discard(listener)
    # why: somebody may have wrapped ours since; theirs is not ours to remove, and ours does nothing without listeners
    if not _LISTENERS and torch.Tensor.backward is _telling:
        torch.Tensor.backward = _PLAIN  # type: ignore[method-assign]
