"""How a run is set up: which parameters are trained, with which settings, and with which loss.

Parameters and settings are read from model and optimizer without touching a number. The loss is known by its value:
one of the common losses of an output and its targets that equals the loss of the step.
"""

from collections.abc import Container
from typing import Any

import torch
from torch import Tensor, bfloat16, float16, nn
from torch.nn import functional
from torch.optim import Optimizer

from steadystep._utils.text import plain_name
from steadystep.records import Structure

_DECOUPLED = ("AdamW", "NAdamW", "Lion", "Adan", "Sophia", "Muon")
_PLAIN = ("SGD", "ASGD", "LBFGS")
_PLANNED = ("initial_lr", "max_lr")
_MOST_NODES = 20_000  # of a graph that is searched
_TURNS = ("TBackward0", "TransposeBackward0", "PermuteBackward0")
_MODES = (nn.modules.batchnorm._BatchNorm, nn.modules.dropout._DropoutNd)


def structure_of(model: nn.Module, optimizer: Optimizer) -> Structure:
    """As model and optimizer are now."""
    groups = [(p, group) for group in optimizer.param_groups for p in group["params"]]
    held = {id(p): group for p, group in groups}
    named = [(plain_name(name), p) for name, p in model.named_parameters()]
    trained = [(name, p) for name, p in named if p.requires_grad and id(p) in held]
    decays = [_number(group.get("weight_decay", 0.0), 0.0) for group in optimizer.param_groups]
    each = getattr(optimizer, "each", (optimizer,))
    kinds = {type(one).__name__ for one in each}
    dropouts = {name: module.p for name, module in model.named_modules() if _is_dropout(module)}
    most = max(dropouts.values(), default=0.0)
    return Structure(
        trained=tuple(name for name, _ in trained),
        sizes=tuple(p.numel() for _, p in trained),
        frozen=sum(not p.requires_grad for _, p in named),
        unheld=tuple(name for name, p in named if p.requires_grad and id(p) not in held),
        last=named[-1][0] if named else "",
        announced=max((_number(g.get(key, 0.0), 0.0) for g in optimizer.param_groups for key in _PLANNED), default=0.0),
        rate_zero=tuple(name for name, p in trained if _number(held[id(p)].get("lr", 1.0), 1.0) == 0.0),
        weight_decay=max(decays, default=0.0),
        decoupled=bool(kinds & set(_DECOUPLED)) or any(group.get("decoupled_weight_decay") for _, group in groups),
        scale_free=not kinds & set(_PLAIN),
        dropout=most,
        dropouts=tuple(name for name, p in dropouts.items() if p == most > 0.0),
        half=sum(p.dtype is float16 for _, p in trained),
        coarse=sum(p.dtype is bfloat16 for _, p in trained),
        norms=sum(isinstance(module, _MODES[0]) and module.training for module in model.modules()),
        modes=sum(_has_modes(module) for module in model.modules()),
    )


def has_frozen_statistics(model: nn.Module) -> bool:
    """Whether it has batch normalizations, all of them in evaluation mode."""
    modes = [module.training for module in model.modules() if isinstance(module, _MODES[0])]
    return bool(modes) and not any(modes)


def _is_dropout(module: nn.Module) -> bool:
    return isinstance(module, nn.modules.dropout._DropoutNd)


def _has_modes(module: nn.Module) -> bool:
    return isinstance(module, _MODES) and getattr(module, "p", 1.0) > 0.0


def _number(value: object, unknown: float) -> float:
    """A setting; `unknown` for one that is a tensor, which is not read here."""
    return float(value) if isinstance(value, int | float) else unknown


def count_leaves(output: Tensor, inside: set[int]) -> int:
    """Tensors at the ends of the graph of `output` that are not `inside`; 0 where the graph is too large to search."""
    waiting = [output.grad_fn] if output.grad_fn is not None else []
    seen: set[Any] = set(waiting)
    found: set[int] = set()
    while waiting:
        if len(seen) > _MOST_NODES:
            return 0
        node = waiting.pop()
        variable = getattr(node, "variable", None)
        if isinstance(variable, nn.Parameter) and id(variable) not in inside:
            found.add(id(variable))
        for below, _ in node.next_functions:
            if below is not None and below not in seen:
                seen.add(below)
                waiting.append(below)
    return len(found)


def untrained_heads(loss: Tensor, model: nn.Module, held: Container[int]) -> tuple[str, ...]:
    """Parameters of a layer that the loss is computed from at once, where all require a gradient and none is held.

    A layer behind one that is trained may be left out on purpose, as a body under a new head; the last one may not.
    """
    named = {id(p): plain_name(name) for name, p in model.named_parameters()}
    for layer in _last_layers(loss):
        if layer and all(id(p) in named and id(p) not in held for p in layer):
            return tuple(named[id(p)] for p in layer)
    return ()


def _last_layers(loss: Tensor) -> list[list[nn.Parameter]]:
    """The parameters of each node of the graph between which and the loss there are no others."""
    waiting: list[Any] = [loss.grad_fn] if loss.grad_fn is not None else []
    seen, found = set(waiting), []
    while waiting and len(seen) < _MOST_NODES:
        node = waiting.pop()
        near = [below for below, _ in node.next_functions if below is not None]
        # a transposed weight is one node farther away than a bias
        turned = [below for turn in near if type(turn).__name__ in _TURNS for below, _ in turn.next_functions]
        own = [leaf for each in (*near, *turned) if isinstance(leaf := getattr(each, "variable", None), nn.Parameter)]
        if own:
            found.append(own)
            continue
        new = [below for below in near if below not in seen]
        seen.update(new)
        waiting += new
    return found


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
