"""Limits on logits: a soft cap (Gemma Team 2024) and a penalty on the partition function (Chowdhery et al. 2022)."""

import math

import torch
from torch import Tensor

from steadystep.errors import ConfigError


def softcap(x: Tensor, cap: float) -> Tensor:
    """Bend `x` into [-cap, cap] by cap * tanh(x / cap), leaving small values nearly as they are.

    >>> softcap(torch.tensor([0.1, 1000.0]), 30.0)
    tensor([ 0.1000, 30.0000])
    """
    if not 0 < cap < math.inf:
        raise ConfigError(f"cap = {cap!r}: must be a number greater than 0")
    return cap * torch.tanh(x / cap)


def z_loss(logits: Tensor, coefficient: float = 1e-4, *, mask: Tensor | None = None) -> Tensor:
    """A term to add to a cross-entropy: coefficient * mean(log(Z)^2), Z = sum(exp(logits)) over the last dimension.

    Softmax does not care about a common shift of the logits, so nothing holds them in place; this does. It is computed
    in fp32. `mask`, with the shape of the logits without the last dimension, says which positions count.

    >>> abs(float(z_loss(torch.zeros(2, 10), coefficient=1.0)) - math.log(10) ** 2) < 1e-5
    True
    """
    if not 0 <= coefficient < math.inf:
        raise ConfigError(f"coefficient = {coefficient!r}: must be a number of at least 0")
    squares = torch.logsumexp(logits.float(), dim=-1).square()
    if mask is None:
        return coefficient * squares.mean()
    # why: where, not a product, so that an infinity at a masked position stays out
    kept = torch.where(mask.bool(), squares, torch.zeros_like(squares))
    return coefficient * kept.sum() / mask.bool().sum().clamp(min=1)
