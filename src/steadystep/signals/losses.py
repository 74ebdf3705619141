"""Which loss a run is trained with: common losses of an output and its targets, and calls of torch's loss functions.

A loss that equals the loss of the step tells what it is. Where no batch is given, torch's own loss functions stand
aside for one sampled forward pass, as `scaled_dot_product_attention` does in `attention_logits`, and the target is
heard there.
"""

import functools
from collections.abc import Callable
from contextlib import suppress
from typing import Any, final

import torch
from torch import Tensor
from torch.nn import functional

from steadystep.signals.activations import compiles

OF = " of "
"""Between the kind of a loss and the tensor that it is of."""
_IGNORED = -100


def losses_of(output: Tensor, batch: list[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Losses of the output and each tensor of the batch that fits, as "kind of name"."""
    found: dict[str, Tensor] = {}
    values = output.float()
    for name, target in batch:
        if target.device != output.device:
            continue
        more: dict[str, Tensor] = {}
        if not target.is_floating_point():
            more |= _of_classes(values, target)
        if target.numel() == output.numel():
            more |= _of_numbers(values.flatten(), target.flatten().float())
        if values.dim() == 2 and values.shape[1] == 1 < len(values) and target.shape == values.shape[:1]:
            more["broadcast mse"] = _broadcast(values, target.float())
        found |= {f"{kind}{OF}{name}": loss for kind, loss in more.items()}
    return found


def _of_classes(values: Tensor, target: Tensor) -> dict[str, Tensor]:
    if values.dim() < 2 or target.dtype is torch.bool:
        return {}
    if values.dim() > 2 and target.shape == (len(values), *values.shape[2:]):
        values = values.movedim(1, -1)
    classes = values.shape[-1]
    if classes < 2 or target.numel() * classes != values.numel():
        return {}
    values, target = values.reshape(-1, classes), target.reshape(-1).long()
    counted = target != _IGNORED
    # why clamped: a label out of range would stop a GPU
    chosen = target.clamp(0, classes - 1).unsqueeze(1)

    known = torch.where(((target >= 0) & (target < classes)) | ~counted, 0.0, torch.nan).sum()

    def mean(each: Tensor) -> Tensor:
        picked = each.gather(1, chosen).squeeze(1)
        return known - torch.where(counted, picked, 0.0).sum() / counted.sum().clamp(min=1)

    return {
        "cross-entropy": mean(torch.log_softmax(values, 1)),
        "nll": mean(values),
        "nll from probabilities": mean(values.clamp(min=1e-38).log()),
    }


def _of_numbers(values: Tensor, target: Tensor) -> dict[str, Tensor]:
    gap = values - target
    squares = gap.square()
    return {
        "bce with logits": functional.binary_cross_entropy_with_logits(values, target),
        "bce": -(target * _log(values) + (1.0 - target) * _log(1.0 - values)).mean(),
        "mse": squares.mean(),
        "l1": gap.abs().mean(),
        "huber": functional.huber_loss(values, target),
        "sum of squares": squares.sum(),
    }


def _log(values: Tensor) -> Tensor:
    return values.clamp(min=0.0).log().clamp(min=-100.0)  # as torch's own


def _broadcast(values: Tensor, target: Tensor) -> Tensor:
    """The mean of (o_i - t_j)² over all pairs."""
    return values.square().mean() - 2.0 * values.mean() * target.mean() + target.square().mean()


_NAMES = (
    "cross_entropy",
    "nll_loss",
    "binary_cross_entropy_with_logits",
    "binary_cross_entropy",
    "mse_loss",
    "l1_loss",
    "smooth_l1_loss",
    "huber_loss",
)
_OURS = "_heard_by_steadystep"


@final
class LossCalls:
    """Stands in for torch's loss functions and keeps the target of the first call."""

    def __init__(self) -> None:
        self._plain: dict[str, Any] = {}
        self._heard: dict[str, Any] = {}
        self.target: Tensor | None = None

    def start(self) -> None:
        """Not where something is compiled, nor where a function is replaced already."""
        self.target = None
        if self._plain or compiles():
            return
        for name in _NAMES:
            plain = vars(functional).get(name)
            if callable(plain) and not hasattr(plain, _OURS):
                self._plain[name] = plain
                self._heard[name] = vars(functional)[name] = _heard(plain, self._keep)

    def stop(self) -> None:
        """Torch's own functions are back."""
        for name, plain in self._plain.items():
            if vars(functional).get(name) is self._heard[name]:
                vars(functional)[name] = plain
        self._plain, self._heard = {}, {}

    def _keep(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        target = args[1] if len(args) > 1 else kwargs.get("target")
        if self.target is None and isinstance(target, Tensor):
            self.target = target.detach()


def _heard(plain: Callable[..., Any], tell: Callable[[tuple[Any, ...], dict[str, Any]], None]) -> Callable[..., Any]:
    @functools.wraps(plain)
    def call(*args: Any, **kwargs: Any) -> Any:
        with suppress(Exception):  # why: what cannot be kept is a loss all the same
            tell(args, kwargs)
        return plain(*args, **kwargs)

    setattr(call, _OURS, True)
    return call
