"""How large attention logits can get: max|q| max|k| / sqrt(d_head), seen through hooks on one sampled forward pass.

By Cauchy and Schwarz no logit q k^T / sqrt(d_head) of a head exceeds that product, and it costs two rows of norms where
the logits themselves would cost [time, time]. Masks are not looked at: what they hide counts too.
"""

import functools
import math
from collections.abc import Callable
from contextlib import suppress
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrize

from steadystep.layers.attention import StableAttention
from steadystep.signals.activations import (
    ForwardHooks,
    SilentHook,
    compiles,
    evenly_chosen,
    numbers_may_leave,
    open_modules,
)

_NAME = "scaled_dot_product_attention"
_MOST = 64  # calls in one forward pass
_OURS = "_of_steadystep"

AttentionCall = Callable[..., Tensor]
See = Callable[[Tensor, Tensor, float | None], None]


@final
class AttentionCalls:
    """Stands in for torch's function while a sampled forward pass runs, and bounds the logits of each call."""

    def __init__(self, tell: Callable[[str, Tensor], None]) -> None:
        self._tell = tell
        self._count = 0
        self._plain: AttentionCall | None = None
        self._heard: AttentionCall | None = None

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
            queries, keys = _longest_per_head(query.detach()), _longest_per_head(key.detach())
            if queries.shape != keys.shape:  # several heads of queries to one of keys
                queries, keys = queries.amax(), keys.amax()
            times = 1.0 / math.sqrt(query.shape[-1]) if scale is None else abs(float(scale))
            self._tell(f"attention {number}", (queries * keys).amax() * times)


def _heard(plain: AttentionCall, see: See) -> AttentionCall:
    """Torch's function, told of before it is called."""

    @functools.wraps(plain)
    def attention(query: Tensor, key: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        with suppress(Exception):  # why: what cannot be measured is attention all the same
            see(query, key, kwargs.get("scale"))
        return plain(query, key, *args, **kwargs)

    setattr(attention, _OURS, True)
    return attention


def _longest_per_head(x: Tensor) -> Tensor:
    """The largest norm in each head of [..., head, time, d_head]."""
    norms: Tensor = torch.linalg.vector_norm(x, dim=-1, dtype=torch.promote_types(x.dtype, torch.float32)).amax(-1)
    return norms if norms.dim() < 2 else norms.flatten(0, -2).amax(0)


_CALLS = 4  # of one module in one forward pass
Measure = Callable[[tuple[Any, ...], dict[str, Any], Any], None]


@final
class AttentionLogits(ForwardHooks):
    """Watches `StableAttention` and `nn.MultiheadAttention` and keeps one number of each, on its device.

    In a model that has neither, calls of torch's `scaled_dot_product_attention` by way of its module are watched.

    A hook can never break the forward pass: a module that cannot be measured is left out from then on. An
    `nn.MultiheadAttention` in evaluation is left alone, because a hook would take torch's fast path from it.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self._queries: dict[str, Tensor] = {}
        self._bounds: dict[str, Tensor] = {}
        self._calls = AttentionCalls(self._keep)

    def start(self) -> None:
        """Put the hooks in place; what was seen before is forgotten."""
        self.clear()
        watchable = self._watchable()
        if not watchable and not self._left_out and open_modules(self._model):
            self._calls.start()
        for name, module in evenly_chosen(watchable, _MOST):
            if isinstance(module, StableAttention):
                self._watch_stable(name, module)
            elif isinstance(module, nn.MultiheadAttention):
                self._watch_torch(name, module)

    def stop(self) -> None:
        """Take the hooks away; what they saw stays."""
        self._calls.stop()
        super().stop()
        self._queries = {}

    def clear(self) -> None:
        """Take the hooks away and forget what they saw."""
        self.stop()
        self._bounds = {}

    @property
    def modules(self) -> tuple[str, ...]:
        """What was seen; of a module that ran several times the largest bound counts."""
        return tuple(self._bounds)

    def pending(self) -> list[Tensor]:
        """One flat tensor for the next host read: the bound of each of `modules`; or none."""
        bounds = list(self._bounds.values())
        return [torch.stack([bound.to(bounds[0].device) for bound in bounds])] if bounds else []

    def _watchable(self) -> list[tuple[str, nn.Module]]:
        return [(n, m) for n, m in open_modules(self._model) if _is_attention(m) and n not in self._left_out]

    def _watch_stable(self, name: str, module: StableAttention) -> None:
        """What its own layers put out is looked at: nothing is computed twice."""
        scale, cap = math.sqrt(module.d_model // module.n_heads), module.logit_cap

        def see_queries(_: tuple[Any, ...], __: dict[str, Any], output: Tensor) -> None:
            if output.numel():
                self._queries[name] = _longest(_by_head(output.detach(), module.n_heads))

        def see_keys(_: tuple[Any, ...], __: dict[str, Any], output: Tensor) -> None:
            queries = self._queries.pop(name, None)
            if queries is not None and output.numel():
                bound = (queries * _longest(_by_head(output.detach(), module.n_heads))).amax() / scale
                self._keep(name, bound if cap is None else bound.clamp(max=cap))

        self._hook(name, module.q_proj if module.q_norm is None else module.q_norm, see_queries)
        self._hook(name, module.k_proj if module.k_norm is None else module.k_norm, see_keys)

    def _watch_torch(self, name: str, module: nn.MultiheadAttention) -> None:
        """Its queries and keys never leave the function that makes them, so they are made once more."""

        def see(args: tuple[Any, ...], kwargs: dict[str, Any], _: Any) -> None:
            query: Tensor = args[0] if args else kwargs["query"]
            key: Tensor = args[1] if len(args) > 1 else kwargs["key"]
            if not (query.numel() and key.numel()):
                return
            # why: under autocast a cast made without gradients would be cached and used by the next forward pass
            with torch.autocast(query.device.type, enabled=False):
                self._keep(name, _torch_bound(module, query.detach(), key.detach()))

        self._hook(name, module, see)

    def _hook(self, name: str, module: nn.Module, measure: Measure) -> None:
        calls = 0

        def look(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            nonlocal calls
            calls += 1
            if calls > _CALLS or name in self._left_out or not numbers_may_leave():
                return
            try:
                with torch.no_grad():
                    measure(args, kwargs, output)
            except Exception:
                self._left_out.add(name)
                self._bounds.pop(name, None)

        self._handles.append(module.register_forward_hook(SilentHook(look), with_kwargs=True))

    def _keep(self, name: str, bound: Tensor) -> None:
        before = self._bounds.get(name)
        self._bounds[name] = bound if before is None else torch.maximum(before, bound)


def _is_attention(module: nn.Module) -> bool:
    if isinstance(module, nn.MultiheadAttention):
        # why: reading a parametrised weight computes it again, and spectral norm changes its state by that
        return module.training and not parametrize.is_parametrized(module)
    return isinstance(module, StableAttention)


def _torch_bound(module: nn.MultiheadAttention, query: Tensor, key: Tensor) -> Tensor:
    size, heads = module.embed_dim, module.num_heads
    if module._qkv_same_embed_dim:
        weight_q, weight_k = module.in_proj_weight[:size], module.in_proj_weight[size : 2 * size]
    else:
        weight_q, weight_k = module.q_proj_weight, module.k_proj_weight
    bias_q, bias_k = None, None
    if module.in_proj_bias is not None:
        bias_q, bias_k = module.in_proj_bias[:size], module.in_proj_bias[size : 2 * size]
    queries = _longest(_by_head(functional.linear(query.to(weight_q.dtype), weight_q, bias_q), heads))
    keys = _longest(_by_head(functional.linear(key.to(weight_k.dtype), weight_k, bias_k), heads))
    if module.bias_k is not None:  # one more key, the same for all
        keys = torch.maximum(keys, _longest(_by_head(module.bias_k, heads)))
    return (queries * keys).amax() / math.sqrt(module.head_dim)


def _by_head(x: Tensor, heads: int) -> Tensor:
    """[..., head, d_head] from [..., width], or from [batch, head, time, d_head]."""
    return x.transpose(1, 2) if x.dim() == 4 else x.reshape(*x.shape[:-1], heads, -1)


def _longest(x: Tensor) -> Tensor:
    """The largest norm in each head of [..., head, d_head]."""
    norms: Tensor = torch.linalg.vector_norm(x, dim=-1, dtype=torch.promote_types(x.dtype, torch.float32))
    return norms.flatten(0, -2).amax(0)
