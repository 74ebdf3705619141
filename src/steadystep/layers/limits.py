"""A feed-forward block with a chosen initialisation, limits for logits, and an embedding whose rows cannot grow.

`nn.Embedding(max_norm=...)` shrinks the rows it is asked for, in place, during forward. Three things go wrong with
that: rows only a tied output head uses are never shrunk; a second forward pass in one graph writes to a weight that the
first one's graph still needs, which autograd refuses; and rows grow freely between lookups. Here

* what is looked up is bounded out of place, always, also under torch.compile and torch.func;
* what is stored is bounded before the lookup, the whole table at once. Rows within the bound are left bit for bit as
  they are, so that a second pass in the same graph changes nothing and needs no complaint from autograd;
* `bound_after(optimizer)` bounds it right after every step instead, so that no one ever sees a longer row.
"""

import math
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from steadystep.errors import ConfigError, MisuseError
from steadystep.init import rules
from steadystep.init.rules import METHODS, InitMethod


class StableMLP(nn.Module):
    """Linear, GELU, dropout, linear: the MLP of a transformer block, to be added to the stream.

    Args:
        d_model: width of the stream.
        d_ff: width of the hidden layer.
        init_method: "xavier", "kaiming" or "small" (N(0, 0.02)); biases start at 0.
        dropout: dropout after the activation.
        bias: biases in both layers.
        zero_init_output: start the block as the identity of the stream: the second layer is 0.

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
        """Map [..., d_model] to the same shape."""
        out: Tensor = self.fc2(self.dropout(self.activation(self.fc1(x))))
        return out


@torch.no_grad()
def fill_linear_(layer: nn.Linear, method: InitMethod) -> None:
    """A weight by `method`, a bias of 0."""
    rules.weight(method, layer.weight.shape).fill(layer.weight, None)
    if layer.bias is not None:
        layer.bias.zero_()


def softcap(x: Tensor, cap: float) -> Tensor:
    """Bend `x` into [-cap, cap] as cap * tanh(x / cap); small values stay nearly unchanged.

    Args:
        x: any tensor.
        cap: the bound.

    >>> softcap(torch.tensor([0.1, 1000.0]), 30.0)
    tensor([ 0.1000, 30.0000])
    """
    if not 0 < cap < math.inf:
        raise ConfigError(f"cap = {cap!r}: must be a number greater than 0")
    return cap * torch.tanh(x / cap)


def z_loss(logits: Tensor, coefficient: float = 1e-4, *, mask: Tensor | None = None) -> Tensor:
    """Return coefficient * mean(log(Z)^2), Z = sum(exp(logits)), to add to a cross-entropy.

    Softmax ignores a common shift of the logits, so nothing else keeps them in place. Computed in fp32.

    Args:
        logits: classes in the last dimension.
        coefficient: weight of the term.
        mask: positions that count; the shape of the logits without the last dimension.

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


class BoundedEmbedding(nn.Embedding):
    """`nn.Embedding` with row norms of at most `max_norm`, with its arguments, weights and state_dict.

    Gradients are those of projected descent, as if there were no bound, so that a row on the bound can leave it again.
    A row that holds NaN or infinity reads as NaN. With `sparse=True` forward bounds the rows it looks up, not the whole
    table.

    Args:
        num_embeddings: number of rows.
        embedding_dim: length of a row.
        padding_idx: as in `nn.Embedding`.
        max_norm: the largest norm of a row.
        norm_type: p of the norm, at least 1.
        scale_grad_by_freq: as in `nn.Embedding`.
        sparse: as in `nn.Embedding`.
        _weight: as in `nn.Embedding`; copied.
        _freeze: as in `nn.Embedding`.
        device: as in `nn.Embedding`.
        dtype: as in `nn.Embedding`.

    >>> table = BoundedEmbedding(10, 4, max_norm=2.0)
    >>> torch.nn.init.constant_(table.weight, 64.0).norm(dim=1).max().item()
    128.0
    >>> bool(table(torch.tensor([3])).norm() <= 2.0), bool(table.weight.norm(dim=1).max() <= 2.0)
    (True, True)
    """

    max_norm: float

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        max_norm: float = 1.0,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
        _weight: Tensor | None = None,
        _freeze: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if max_norm is None or not 0 < max_norm < math.inf:
            raise ConfigError(f"max_norm = {max_norm!r}: must be a number greater than 0")
        if not norm_type >= 1:
            raise ConfigError(f"norm_type = {norm_type!r}: must be at least 1")
        if _weight is not None:  # a copy: the caller's tensor is not ours to shrink
            _weight = bounded(_weight.detach(), max_norm, norm_type)
        self._seen_version = -1
        super().__init__(
            num_embeddings,
            embedding_dim,
            padding_idx=padding_idx,
            max_norm=max_norm,
            norm_type=norm_type,
            scale_grad_by_freq=scale_grad_by_freq,
            sparse=sparse,
            _weight=_weight,
            _freeze=_freeze,
            device=device,
            dtype=dtype,
        )

    @classmethod
    def from_pretrained(  # type: ignore[override]
        cls, embeddings: Tensor, freeze: bool = True, padding_idx: int | None = None, max_norm: float = 1.0, **more: Any
    ) -> Self:
        """Return a bounded table with a copy of the rows in `embeddings`."""
        rows, columns = embeddings.shape
        return cls(
            rows, columns, padding_idx=padding_idx, max_norm=max_norm, _weight=embeddings, _freeze=freeze, **more
        )

    def reset_parameters(self) -> None:
        """Draw from N(0, 1) as `nn.Embedding` does, then bound the rows."""
        super().reset_parameters()
        self.bound_()

    def forward(self, input: Tensor) -> Tensor:
        """Return the rows, each with a norm of at most `max_norm`."""
        if self._may_write():
            self.bound_(input.flatten() if self.sparse else None)
        rows = functional.embedding(
            input, self.weight, self.padding_idx, scale_grad_by_freq=self.scale_grad_by_freq, sparse=self.sparse
        )
        return bounded(rows, self.max_norm, self.norm_type)

    @torch.no_grad()
    def bound_(self, rows: Tensor | None = None) -> None:
        """Shrink stored rows that are too long: all, or those with the given numbers."""
        # why .data: a change that autograd must not refuse. Only rows beyond the bound change, and none does twice.
        weight = self.weight.data
        if rows is None:
            weight.mul_(shrink_factor(weight, self.max_norm, self.norm_type))
        else:
            weight[rows] = bounded(weight[rows], self.max_norm, self.norm_type)
        self._seen_version = -1 if self.weight.is_inference() else self.weight._version

    def bound_after(self, optimizer: Optimizer) -> RemovableHandle:
        """Bound the table after every step of `optimizer`; needed for the stored rows of compiled models."""
        if not any(p is self.weight for group in optimizer.param_groups for p in group["params"]):
            raise MisuseError("this optimizer does not hold the embedding's weight")

        def after(*_: object) -> None:
            gradient = self.weight.grad
            self.bound_(gradient._indices()[0] if gradient is not None and gradient.is_sparse else None)

        return optimizer.register_step_post_hook(after)

    def train(self, mode: bool = True) -> Self:
        """Set the mode as `nn.Module` does; the next lookup bounds the table."""
        self._seen_version = -1
        return super().train(mode)

    def _may_write(self) -> bool:
        """Training changes rows at every step, evaluation does not; a compiled or functional call must not write."""
        if torch.compiler.is_compiling() or not isinstance(self.weight, nn.Parameter) or self.weight.is_inference():
            return False
        return self.training or self.weight._version != self._seen_version

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self.bound_()


def bounded(rows: Tensor, max_norm: float, norm_type: float) -> Tensor:
    """The rows with those beyond the bound shrunk onto it; differentiable, the factor being a constant."""
    return (rows * shrink_factor(rows.detach(), max_norm, norm_type)).to(rows.dtype)


def shrink_factor(rows: Tensor, max_norm: float, norm_type: float) -> Tensor:
    """For each row 1, or what brings its norm to just below `max_norm`, rounding included."""
    exact = torch.float32 if rows.dtype in (torch.bfloat16, torch.float16) else rows.dtype
    norms = torch.linalg.vector_norm(rows, norm_type, dim=-1, keepdim=True, dtype=exact)
    margin = torch.finfo(rows.dtype).eps + 8 * torch.finfo(exact).eps
    # NaN compares false and keeps its row as it is; an infinite norm gives 0.
    return torch.where(norms > max_norm, max_norm * (1 - margin) / norms, torch.ones_like(norms))


def shrink_gradient(x: Tensor, alpha: float) -> Tensor:
    """Return `x` unchanged; in the backward pass its gradient is multiplied by `alpha`.

    Args:
        x: any tensor.
        alpha: factor on the gradient.

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
