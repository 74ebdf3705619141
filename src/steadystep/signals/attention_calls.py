"""Attention written with torch's function: `functional.scaled_dot_product_attention` in a module of one's own."""

import functools
import math
from collections.abc import Callable
from contextlib import suppress
from typing import Any, final

import torch
from torch import Tensor
from torch.nn import functional

from steadystep.signals.hooks import compiles, numbers_may_leave

_NAME = "scaled_dot_product_attention"
_MOST = 64  # calls in one forward pass
_OURS = "_of_steadystep"

Attention = Callable[..., Tensor]
See = Callable[[Tensor, Tensor, float | None], None]


@final
class AttentionCalls:
    """Stands in for torch's function while a sampled forward pass runs, and bounds the logits of each call."""

    def __init__(self, tell: Callable[[str, Tensor], None]) -> None:
        self._tell = tell
        self._count = 0
        self._plain: Attention | None = None
        self._heard: Attention | None = None

    def start(self) -> None:
        """Not where something is compiled, which would be compiled again for another function, or is replaced."""
        plain = vars(functional).get(_NAME)
        if self._plain is None and callable(plain) and not hasattr(plain, _OURS) and not compiles():
            self._plain, self._count = plain, 0
            self._heard = vars(functional)[_NAME] = _heard(plain, self._see)

    def stop(self) -> None:
        """Torch's own function is back."""
        plain, self._plain = self._plain, None
        if plain is not None and vars(functional).get(_NAME) is self._heard:
            vars(functional)[_NAME] = plain
        self._heard = None

    @torch.no_grad()
    def _see(self, query: Tensor, key: Tensor, scale: float | None) -> None:
        number, self._count = self._count, self._count + 1
        if number < _MOST and query.numel() and key.numel() and numbers_may_leave():
            queries, keys = _longest(query.detach()), _longest(key.detach())
            if queries.shape != keys.shape:  # several heads of queries to one of keys
                queries, keys = queries.amax(), keys.amax()
            times = 1.0 / math.sqrt(query.shape[-1]) if scale is None else abs(float(scale))
            self._tell(f"attention {number}", (queries * keys).amax() * times)


def _heard(plain: Attention, see: See) -> Attention:
    """Torch's function, told of before it is called."""

    @functools.wraps(plain)
    def attention(query: Tensor, key: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        with suppress(Exception):  # why: what cannot be measured is attention all the same
            see(query, key, kwargs.get("scale"))
        return plain(query, key, *args, **kwargs)

    setattr(attention, _OURS, True)
    return attention


def _longest(x: Tensor) -> Tensor:
    """The largest norm in each head of [..., head, time, d_head]."""
    norms: Tensor = torch.linalg.vector_norm(x, dim=-1, dtype=torch.promote_types(x.dtype, torch.float32)).amax(-1)
    return norms if norms.dim() < 2 else norms.flatten(0, -2).amax(0)
