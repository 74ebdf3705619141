"""Hearing of a loop's own `clip_grad_norm_`: which gradients, and with which limit.

Programs import the function by name, so it cannot be replaced; the two that it calls can. Where a version of torch has
others, nothing is heard, and a step whose gradients were changed by nobody knows whom is not made again.
"""

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, final

import torch
from torch import Tensor
from torch.nn.utils import clip_grad

_NORM, _SCALE = "_get_total_norm", "_clip_grads_with_norm_"


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


def hear(hearer: Hearer) -> None:
    """Tell `hearer` until `stop` is called with it, or it is gone."""
    _HEARERS.add(hearer)
    found = {name: vars(clip_grad).get(name) for name in (_NORM, _SCALE)}
    if all(callable(function) for function in found.values()) and _scaled not in found.values():
        _plain.update({name: function for name, function in found.items() if function is not None})
        vars(clip_grad).update({_NORM: _total, _SCALE: _scaled})


def stop(hearer: Hearer) -> None:
    """Leave it alone. With the last one torch's functions are back."""
    _HEARERS.discard(hearer)
    if not _HEARERS and vars(clip_grad).get(_SCALE) is _scaled and vars(clip_grad).get(_NORM) is _total:
        vars(clip_grad).update(_plain)
