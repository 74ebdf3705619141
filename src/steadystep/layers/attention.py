"""Multi-head self-attention with two known cures for exploding logits, and none of them when switched off.

logits = q k^T / sqrt(d_head); q and k may be normalised per head (Dehghani et al. 2023), the logits soft-capped
(Gemma Team 2024).
"""

import math
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor, nn
from torch.nn import functional

from steadystep.errors import ConfigError, MisuseError
from steadystep.init.rules import METHODS, InitMethod
from steadystep.layers.limits import fill_linear_, softcap


class StableAttention(nn.Module):
    """Self-attention for [batch, time, d_model].

    Args:
        d_model: width of the stream.
        n_heads: number of heads; divides `d_model`.
        qk_norm: RMSNorm with a learned gain on each head's queries and keys: with gains of 1 no logit exceeds
            sqrt(d_head).
        logit_cap: bound on the logits, whatever the weights are. Holds the logits in memory: no fused kernel.
        zero_init_output: start the block as the identity of the stream.
        causal: attend to earlier positions only.
        dropout: dropout on the attention weights.
        bias: biases in the projections.
        init_method: "xavier", "kaiming" or "small" (N(0, 0.02)).
        record_peaks: keep the largest training logit of each head in `peaks`, for `qk_clip_`; costs one more q k^T per
            forward pass.

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
        """Return queries and keys as [batch, head, time, d_head], normalized with `qk_norm`."""
        q, k = self._heads(self.q_proj(x)), self._heads(self.k_proj(x))
        return _normalised(q, self.q_norm), _normalised(k, self.k_norm)

    def allowed(self, time: int, mask: Tensor | None, device: torch.device) -> Tensor | None:
        """Combine `mask` and causality; None if every position may attend to every other."""
        if not self.causal:
            return mask
        causal = torch.ones(time, time, dtype=torch.bool, device=device).tril()
        return causal if mask is None else mask & causal

    def extra_repr(self) -> str:
        """Return the options for `repr`."""
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


Attention = StableAttention | nn.MultiheadAttention


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class QKClipReport:
    """What `qk_clip_` measured and did, per head."""

    peaks: tuple[float, ...]
    """Largest logit of each head before clipping."""
    scales: tuple[float, ...]
    """Factor on the logits of each head from now on."""

    @property
    def clipped(self) -> bool:
        """Whether any head was scaled."""
        return any(scale != 1.0 for scale in self.scales)

    @property
    def finite(self) -> bool:
        """Whether all peaks were finite; a head with a non-finite peak is left as it is."""
        return all(math.isfinite(peak) for peak in self.peaks)


@torch.no_grad()
def qk_clip_(attention: Attention, max_logit: float = 100.0, *, peaks: Tensor | None = None) -> QKClipReport:
    """Scale query and key weights in place, head by head, so that the largest logit becomes `max_logit`.

    Call it after the optimizer's step. Values, output and all other heads stay as they are. Costs one host read.

    Args:
        attention: a `StableAttention` or `nn.MultiheadAttention`.
        max_logit: the largest logit allowed.
        peaks: one number per head, from `peak_logits`. Default: the peaks that a `StableAttention(record_peaks=True)`
            has recorded since the last call.

    >>> attention = StableAttention(8, 2, qk_norm=False)
    >>> report = qk_clip_(attention, max_logit=100.0, peaks=torch.tensor([50.0, 400.0]))
    >>> report.scales
    (1.0, 0.25)
    """
    if not 0 < max_logit < math.inf:
        raise ConfigError(f"max_logit = {max_logit!r}: must be a number greater than 0")
    _check_projections(attention)
    num_heads = attention.n_heads if isinstance(attention, StableAttention) else attention.num_heads
    if isinstance(attention, StableAttention) and peaks is None:
        peaks, attention.peaks = attention.peaks, None
    if peaks is None:
        raise MisuseError(
            "no peaks recorded: use StableAttention(record_peaks=True) and run a training step, or "
            "pass peak_logits(...)"
        )
    if peaks.shape != (num_heads,):
        raise MisuseError(f"peaks has shape {tuple(peaks.shape)}, expected one number for each of {num_heads} heads")
    over = torch.isfinite(peaks) & (peaks > max_logit)
    scales = torch.where(over, max_logit / peaks, torch.ones_like(peaks))
    for tensor in _query_and_key(attention):
        rows = tensor.view(num_heads, -1)
        rows.mul_(scales.sqrt().unsqueeze(1).to(rows))
    return QKClipReport(peaks=tuple(peaks.tolist()), scales=tuple(scales.tolist()))  # sync: the report


@torch.no_grad()
def peak_logits(
    attention: Attention, query: Tensor, key: Tensor | None = None, *, mask: Tensor | None = None
) -> Tensor:
    """Return the largest attention logit of each head for this input, before any cap.

    Args:
        attention: a `StableAttention` or `nn.MultiheadAttention`.
        query: the input.
        key: the other input, for the cross-attention of `nn.MultiheadAttention`.
        mask: boolean; True means: may be attended to.

    >>> attention = StableAttention(8, 2, qk_norm=False)
    >>> x = torch.randn(3, 5, 8)
    >>> report = qk_clip_(attention, 0.01, peaks=peak_logits(attention, x))
    >>> bool(peak_logits(attention, x).max() <= 0.0101)
    True
    """
    if isinstance(attention, StableAttention):
        q, k = attention.queries_and_keys(query)
        return largest_logits(q, k, attention.allowed(query.shape[1], mask, query.device))
    key = query if key is None else key
    weight_q, weight_k, *rest = _query_and_key(attention)
    bias_q, bias_k = (rest[0], rest[1]) if attention.in_proj_bias is not None else (None, None)
    q = _heads(attention, functional.linear(query, weight_q, bias_q))
    k = _heads(attention, functional.linear(key, weight_k, bias_k))
    return largest_logits(q, k, mask)


def _heads(attention: nn.MultiheadAttention, x: Tensor) -> Tensor:
    x = x.unsqueeze(0) if x.ndim == 2 else x if attention.batch_first else x.transpose(0, 1)
    return split_heads(x, attention.num_heads)


def _query_and_key(attention: Attention) -> list[Tensor]:
    """W_q, W_k, then their biases if there are any: rows belong to heads, in order."""
    if isinstance(attention, StableAttention):
        layers = (attention.q_proj, attention.k_proj)
        return [p for key in ("weight", "bias") for layer in layers if (p := getattr(layer, key)) is not None]
    size = attention.embed_dim
    if attention._qkv_same_embed_dim:
        found = [attention.in_proj_weight[:size], attention.in_proj_weight[size : 2 * size]]
    else:
        found = [attention.q_proj_weight, attention.k_proj_weight]
    if attention.in_proj_bias is not None:
        found += [attention.in_proj_bias[:size], attention.in_proj_bias[size : 2 * size]]
    if attention.bias_k is not None:
        found.append(attention.bias_k)
    return found


def _check_projections(attention: object) -> None:
    if not isinstance(attention, StableAttention | nn.MultiheadAttention):
        raise MisuseError(f"{type(attention).__name__}: expected a StableAttention or an nn.MultiheadAttention")
    if isinstance(attention, StableAttention) and attention.q_norm is not None:
        raise MisuseError("with qk_norm the logits do not depend on the scale of W_q and W_k: there is nothing to clip")
