"""Attention written with torch's function: `functional.scaled_dot_product_attention` in a module of one's own."""

import math
import sys
from collections.abc import Callable
from typing import Any, final

import torch
from torch import Tensor
from torch.nn import functional

from steadystep.signals.hooks import numbers_may_leave

_NAME = "scaled_dot_product_attention"
_MOST = 64  # calls in one forward pass


@final
class AttentionCalls:
    """Stands in for torch's function while a sampled forward pass runs, and bounds the logits of each call."""

    def __init__(self, tell: Callable[[str, Tensor], None]) -> None:
        self._tell = tell
        self._count = 0
        self._plain: Callable[..., Tensor] | None = None

    def start(self) -> None:
        """Not where something is compiled, which would be compiled again for another function, or is replaced."""
        plain = vars(functional).get(_NAME)
        if self._plain is None and callable(plain) and not isinstance(plain, _Heard) and not _compiles():
            self._plain, self._count = plain, 0
            vars(functional)[_NAME] = _Heard(plain, self._see)

    def stop(self) -> None:
        """Torch's own function is back."""
        plain, self._plain = self._plain, None
        if plain is not None and isinstance(vars(functional).get(_NAME), _Heard):
            vars(functional)[_NAME] = plain

    @torch.no_grad()
    def _see(self, query: Tensor, key: Tensor, scale: float | None) -> None:
        number, self._count = self._count, self._count + 1
        if number < _MOST and query.numel() and key.numel() and numbers_may_leave():
            queries, keys = _longest(query.detach()), _longest(key.detach())
            if queries.shape != keys.shape:  # several heads of queries to one of keys
                queries, keys = queries.amax(), keys.amax()
            times = 1.0 / math.sqrt(query.shape[-1]) if scale is None else abs(float(scale))
            self._tell(f"attention {number}", (queries * keys).amax() * times)


@final
class _Heard:
    """Torch's function, told of before it is called."""

    def __init__(self, plain: Callable[..., Tensor], see: Callable[[Tensor, Tensor, float | None], None]) -> None:
        self._plain, self._see = plain, see

    def __call__(self, query: Tensor, key: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        try:
            self._see(query, key, kwargs.get("scale"))
        except Exception:  # why: what cannot be measured is attention all the same
            self._see = _nothing
        return self._plain(query, key, *args, **kwargs)


def _nothing(query: Tensor, key: Tensor, scale: float | None) -> None:
    """Nothing to see."""


def _longest(x: Tensor) -> Tensor:
    """The largest norm in each head of [..., head, time, d_head]."""
    norms: Tensor = torch.linalg.vector_norm(x, dim=-1, dtype=torch.promote_types(x.dtype, torch.float32)).amax(-1)
    return norms if norms.dim() < 2 else norms.flatten(0, -2).amax(0)


def _compiles() -> bool:
    dynamo = sys.modules.get("torch._dynamo.utils")
    return dynamo is not None and bool(dynamo.counters["frames"])
