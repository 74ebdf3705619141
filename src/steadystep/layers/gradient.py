"""Gradient shrink: GLM-130B trained its embedding with a tenth of the gradient (Zeng et al. 2022)."""

from typing import Any

import torch
from torch import Tensor

from steadystep.errors import ConfigError


def shrink_gradient(x: Tensor, alpha: float) -> Tensor:
    """`x` unchanged, bit for bit; on the way back the gradient is multiplied by `alpha`.

    >>> weight = torch.ones(3, requires_grad=True)
    >>> shrink_gradient(weight, 0.1).sum().backward()
    >>> weight.grad
    tensor([0.1000, 0.1000, 0.1000])
    """
    if not 0 <= alpha <= 1:
        raise ConfigError(f"alpha = {alpha!r}: must be between 0 and 1")
    shrunk: Tensor = _Shrink.apply(x, alpha)  # type: ignore[no-untyped-call]
    return shrunk


# why: the formula in the paper, alpha * x + (1 - alpha) * x.detach(), rounds and so changes x a little
class _Shrink(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, alpha: float) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, float], output: Tensor) -> None:
        ctx.alpha = inputs[1]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0] * ctx.alpha, None
