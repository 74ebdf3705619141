"""Which loss a run is trained with: common losses of an output and its targets.

A loss that equals the loss of the step tells what it is.
"""

import torch
from torch import Tensor
from torch.nn import functional

OF = " of "
"""Between the kind of a loss and the tensor that it is of."""
KINDS = {
    "cross_entropy": "cross-entropy",
    "nll_loss": "nll",
    "binary_cross_entropy_with_logits": "bce with logits",
    "binary_cross_entropy": "bce",
    "mse_loss": "mse",
    "l1_loss": "l1",
    "huber_loss": "huber",
    "smooth_l1_loss": "huber",
}
"""What the loss functions of torch are called here."""
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
