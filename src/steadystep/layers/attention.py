"""Multi-head self-attention with two known cures for exploding logits, and none of them when switched off.

logits = q k^T / sqrt(d_head); q and k may be normalised per head (Dehghani et al. 2023), the logits soft-capped
(Gemma Team 2024).
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from steadystep.errors import ConfigError
from steadystep.init.rules import METHODS, InitMethod
from steadystep.layers.logits import softcap
from steadystep.layers.mlp import fill_linear_


class StableAttention(nn.Module):
    """Self-attention for [batch, time, d_model].

    `qk_norm` puts an RMSNorm with a learned gain on each head's queries and keys: with gains of 1 no logit exceeds
    sqrt(d_head). `logit_cap` bounds the logits whatever the weights are; it needs them in memory, so the fused kernel
    is not used. `zero_init_output` starts the block as the identity of the stream. `record_peaks` keeps the largest
    logit of each head seen in training in `peaks`, for `qk_clip_`; it costs one more q k^T per forward pass.

    >>> attention = StableAttention(16, 4, causal=True)
    >>> attention(torch.randn(2, 5, 16)).shape
    torch.Size([2, 5, 16])
    """

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        *,
        qk_norm: bool = True,
        logit_cap: float | None = None,
        zero_init_output: bool = False,
        causal: bool = False,
        dropout: float = 0.0,
        bias: bool = True,
        init_method: InitMethod = "xavier",
        record_peaks: bool = False,
    ) -> None:
        _check(d_model, n_heads, logit_cap, dropout, init_method)
        super().__init__()
        self.d_model, self.n_heads = d_model, n_heads
        self.logit_cap, self.causal, self.dropout = logit_cap, causal, dropout
        self.init_method, self.zero_init_output = init_method, zero_init_output
        self.record_peaks = record_peaks
        self.peaks: Tensor | None = None
        self.q_proj = nn.Linear(d_model, d_model, bias=bias)
        self.k_proj = nn.Linear(d_model, d_model, bias=bias)
        self.v_proj = nn.Linear(d_model, d_model, bias=bias)
        self.out_proj = nn.Linear(d_model, d_model, bias=bias)
        self.q_norm = nn.RMSNorm(d_model // n_heads) if qk_norm else None
        self.k_norm = nn.RMSNorm(d_model // n_heads) if qk_norm else None
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw the weights again."""
        for layer in (self.q_proj, self.k_proj, self.v_proj, self.out_proj):
            fill_linear_(layer, self.init_method)
        if self.zero_init_output:
            self.out_proj.weight.zero_()
        for norm in (self.q_norm, self.k_norm):
            if norm is not None:
                norm.reset_parameters()

    def forward(self, x: Tensor, *, mask: Tensor | None = None) -> Tensor:
        """Mix over time. `mask` is boolean, broadcast to [batch, head, query, key]; True means: may be attended to."""
        q, k = self.queries_and_keys(x)
        v = self._heads(self.v_proj(x))
        allowed = self.allowed(x.shape[1], mask, x.device)
        if self.record_peaks and self.training:
            self._record(q, k, allowed)
        dropout = self.dropout if self.training else 0.0
        if self.logit_cap is not None:
            mixed = _attend(q, k, v, allowed, cap=self.logit_cap, dropout=dropout)
        elif mask is None:
            mixed = functional.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=self.causal)
        else:
            mixed = functional.scaled_dot_product_attention(q, k, v, allowed, dropout_p=dropout)
        out: Tensor = self.out_proj(mixed.transpose(1, 2).flatten(2))
        return out

    def queries_and_keys(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[batch, head, time, d_head] each, normalised if asked for."""
        q, k = self._heads(self.q_proj(x)), self._heads(self.k_proj(x))
        return _normalised(q, self.q_norm), _normalised(k, self.k_norm)

    def allowed(self, time: int, mask: Tensor | None, device: torch.device) -> Tensor | None:
        """The mask and causality together; None when every position may see every other."""
        if not self.causal:
            return mask
        causal = torch.ones(time, time, dtype=torch.bool, device=device).tril()
        return causal if mask is None else mask & causal

    def extra_repr(self) -> str:
        """What the parts do not show."""
        return f"{self.d_model}, {self.n_heads}, causal={self.causal}, logit_cap={self.logit_cap}"

    def _heads(self, x: Tensor) -> Tensor:
        return split_heads(x, self.n_heads)

    @torch.no_grad()
    def _record(self, q: Tensor, k: Tensor, allowed: Tensor | None) -> None:
        peaks = largest_logits(q, k, allowed)
        self.peaks = peaks if self.peaks is None else torch.maximum(self.peaks.to(peaks), peaks)


def _normalised(x: Tensor, norm: nn.RMSNorm | None) -> Tensor:
    # why: under autocast the gain stays in fp32, and q, k and v must agree afterwards
    return x if norm is None else norm(x.to(norm.weight.dtype)).to(x.dtype)


def split_heads(x: Tensor, n_heads: int) -> Tensor:
    """[batch, time, width] to [batch, head, time, width per head]."""
    return x.reshape(*x.shape[:-1], n_heads, x.shape[-1] // n_heads).transpose(1, 2)


def largest_logits(q: Tensor, k: Tensor, allowed: Tensor | None) -> Tensor:
    """For each head the largest logit between positions that see each other, in fp32."""
    logits = q.float() @ k.float().transpose(-1, -2) / math.sqrt(q.shape[-1])
    if allowed is not None:
        logits = logits.masked_fill(~allowed, -math.inf)
    return logits.amax(dim=(0, 2, 3))


def _attend(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor | None, *, cap: float, dropout: float) -> Tensor:
    logits = softcap((q / math.sqrt(q.shape[-1]) @ k.transpose(-1, -2)).float(), cap)
    if allowed is None:
        weights = logits.softmax(dim=-1)
    else:
        weights = logits.masked_fill(~allowed, -math.inf).softmax(dim=-1)
        # why: a row that may see nothing is 0 / 0; the fused kernel makes it 0
        weights = weights.masked_fill(~allowed, 0.0)
    return functional.dropout(weights.to(v.dtype), dropout) @ v


def _check(d_model: int, n_heads: int, logit_cap: float | None, dropout: float, init_method: str) -> None:
    if n_heads < 1 or d_model < 1 or d_model % n_heads:
        raise ConfigError(f"d_model = {d_model!r} must be a multiple of n_heads = {n_heads!r}")
    if logit_cap is not None and not 0 < logit_cap < math.inf:
        raise ConfigError(f"logit_cap = {logit_cap!r}: must be a number greater than 0, or None")
    if not 0 <= dropout < 1:
        raise ConfigError(f"dropout = {dropout!r}: must be in [0, 1)")
    if init_method not in METHODS:
        raise ConfigError(f"init_method {init_method!r} is unknown: use one of {', '.join(METHODS)}")
