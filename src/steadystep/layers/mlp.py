"""A feed-forward block with a chosen initialisation."""

import math

import torch
from torch import Tensor, nn

from steadystep.errors import ConfigError
from steadystep.init import rules
from steadystep.init.rules import METHODS, InitMethod


class StableMLP(nn.Module):
    """Linear, GELU, dropout, linear: the MLP of a transformer block, to be added to the stream.

    `init_method` is "xavier", "kaiming" or "small" (N(0, 0.02)); biases start at 0. With `zero_init_output` the block
    starts as the identity of the stream: the second layer is 0.

    >>> mlp = StableMLP(8, 32, init_method="small")
    >>> mlp(torch.zeros(2, 5, 8)).shape
    torch.Size([2, 5, 8])
    """

    def __init__(
        self,
        d_model: int,
        d_ff: int,
        *,
        init_method: InitMethod = "xavier",
        dropout: float = 0.0,
        bias: bool = True,
        zero_init_output: bool = False,
    ) -> None:
        if d_model < 1 or d_ff < 1:
            raise ConfigError(f"d_model = {d_model!r}, d_ff = {d_ff!r}: must be at least 1")
        if not 0 <= dropout < 1:
            raise ConfigError(f"dropout = {dropout!r}: must be in [0, 1)")
        if init_method not in METHODS:
            raise ConfigError(f"init_method {init_method!r} is unknown: use one of {', '.join(METHODS)}")
        super().__init__()
        self.init_method = init_method
        self.zero_init_output = zero_init_output
        self.fc1 = nn.Linear(d_model, d_ff, bias=bias)
        self.activation = nn.GELU()
        self.dropout = nn.Dropout(dropout)
        self.fc2 = nn.Linear(d_ff, d_model, bias=bias)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw the weights again."""
        for layer in (self.fc1, self.fc2):
            fill_linear_(layer, self.init_method)
        if self.zero_init_output:
            self.fc2.weight.zero_()

    def forward(self, x: Tensor) -> Tensor:
        """[..., d_model] to the same shape."""
        out: Tensor = self.fc2(self.dropout(self.activation(self.fc1(x))))
        return out


@torch.no_grad()
def fill_linear_(layer: nn.Linear, method: InitMethod) -> None:
    """A weight by `method`, a bias of 0."""
    rules.weight(method, layer.weight.shape).fill(layer.weight, None)
    if layer.bias is not None:
        layer.bias.zero_()


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
