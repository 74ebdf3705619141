"""QK-clip: W_q and W_k of a head whose largest logit S is too large are scaled by sqrt(limit / S) (Kimi Team 2025)."""

import math
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor, nn
from torch.nn import functional

from steadystep.errors import ConfigError, MisuseError
from steadystep.layers.attention import StableAttention, largest_logits, split_heads

Attention = StableAttention | nn.MultiheadAttention


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class QKClipReport:
    """Per head: the largest logit before, and what the logits are multiplied by from now on."""

    peaks: tuple[float, ...]
    scales: tuple[float, ...]

    @property
    def clipped(self) -> bool:
        """Any head was scaled."""
        return any(scale != 1.0 for scale in self.scales)

    @property
    def finite(self) -> bool:
        """No peak was NaN or infinite; a head with such a peak is left as it is."""
        return all(math.isfinite(peak) for peak in self.peaks)


@torch.no_grad()
def qk_clip_(attention: Attention, max_logit: float = 100.0, *, peaks: Tensor | None = None) -> QKClipReport:
    """Scale the query and key weights in place, head by head, so that the largest logit becomes `max_logit`.

    Call it after the optimizer's step. `peaks`, one number per head, comes from `peak_logits`; without it the peaks are
    those that a `StableAttention(record_peaks=True)` has seen since the last call. Values, output and all other heads
    stay as they are. Costs one host read, which is the report.

    >>> attention = StableAttention(8, 2, qk_norm=False)
    >>> report = qk_clip_(attention, max_logit=100.0, peaks=torch.tensor([50.0, 400.0]))
    >>> report.scales
    (1.0, 0.25)
    """
    if not 0 < max_logit < math.inf:
        raise ConfigError(f"max_logit = {max_logit!r}: must be a number greater than 0")
    _check(attention)
    num_heads = attention.n_heads if isinstance(attention, StableAttention) else attention.num_heads
    if isinstance(attention, StableAttention) and peaks is None:
        peaks, attention.peaks = attention.peaks, None
    if peaks is None:
        raise MisuseError("no peaks: use StableAttention(record_peaks=True) and train a step, or give peak_logits(...)")
    if peaks.shape != (num_heads,):
        raise MisuseError(
            f"peaks has the shape {tuple(peaks.shape)}, expected one number for each of {num_heads} heads"
        )
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
    """The largest attention logit of each head for this input, before any cap.

    `key` is for the cross-attention of `nn.MultiheadAttention`. `mask` is boolean; True means: may be attended to.

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


def _check(attention: object) -> None:
    if not isinstance(attention, StableAttention | nn.MultiheadAttention):
        raise MisuseError(f"{type(attention).__name__}: expected a StableAttention or an nn.MultiheadAttention")
    if isinstance(attention, StableAttention) and attention.q_norm is not None:
        raise MisuseError("with qk_norm the logits do not depend on the size of W_q and W_k: there is nothing to clip")
