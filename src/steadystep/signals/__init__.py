"""MEASURE: tensors become numbers here, in one pass and one transfer per optimizer step."""

import math
from collections.abc import Container, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, bfloat16, float16, nn
from torch.optim import Optimizer

from steadystep._utils import lazy_names
from steadystep._utils.text import plain_name
from steadystep._utils.tree import tensors_in
from steadystep.records import Structure

if TYPE_CHECKING:
    from steadystep.signals.activations import Activations
    from steadystep.signals.attention_logits import AttentionLogits
    from steadystep.signals.batches import Inputs, Metrics, checked_metrics
    from steadystep.signals.gradients import Gradients
    from steadystep.signals.measurer import Measurer
    from steadystep.signals.outputs import Evidence, Outputs
    from steadystep.signals.probes import UpdateProbes
    from steadystep.signals.weights import GradientSamples, RowNorms, StatePeaks, WeightNorms

__all__ = [
    "Activations",
    "AttentionLogits",
    "Evidence",
    "GradientSamples",
    "Gradients",
    "Inputs",
    "Measurer",
    "Metrics",
    "Outputs",
    "RowNorms",
    "StatePeaks",
    "UpdateProbes",
    "WeightNorms",
    "checked_metrics",
    "structure_of",
]

__getattr__ = lazy_names(
    __name__,
    {
        "activations": ("Activations",),
        "attention_logits": ("AttentionLogits",),
        "batches": ("Inputs", "Metrics", "checked_metrics"),
        "gradients": ("Gradients",),
        "measurer": ("Measurer",),
        "outputs": ("Evidence", "Outputs"),
        "probes": ("UpdateProbes",),
        "weights": ("GradientSamples", "RowNorms", "StatePeaks", "WeightNorms"),
    },
)


MOST = 1 << 20
"""Elements of an output that are measured."""
UNKNOWN = torch.full((), math.nan)
_DECOUPLED = ("AdamW", "NAdamW", "Lion", "Adan", "Sophia", "Muon")
_PLAIN = ("SGD", "ASGD", "LBFGS")
_PLANNED = ("initial_lr", "max_lr")
_MOST_NODES = 20_000  # of a graph that is searched
_TURNS = ("TBackward0", "TransposeBackward0", "PermuteBackward0")
_TABLES = (nn.Embedding, nn.EmbeddingBag)
_LAYERS = (nn.Linear, nn.modules.conv._ConvNd)
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
    layers = {id(m.weight): m.weight for m in model.modules() if isinstance(m, _LAYERS)}
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
        # why from the shape: to index a DTensor is a collective, and a rank may ask alone
        fan_ins=tuple(math.prod(p.shape[1:]) if id(p) in layers and len(p) else 0 for _, p in trained),
        table_rows=max((m.num_embeddings for m in model.modules() if isinstance(m, _TABLES)), default=0),
        last_frozen=bool(named) and not named[-1][1].requires_grad,
        momentum=max((_number(g.get("momentum", 0.0), 0.0) for g in optimizer.param_groups), default=0.0),
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


def left_out(loss: Tensor, model: nn.Module, held: Container[int], used: Container[int]) -> dict[str, tuple[str, ...]]:
    """Fields of `OutputStats`: parameters that the loss depends on and no optimizer holds, and the other way round."""
    named = {id(p): plain_name(name) for name, p in model.named_parameters()}
    leaves = graph_leaves(loss)
    return {
        "untrained": untrained_heads(loss, model, held),
        "unheld": tuple(name for key, name in named.items() if key in (leaves or ()) and key not in held),
        "severed": tuple(
            name for key, name in named.items() if leaves and key in held and key in used and key not in leaves
        ),
    }


def graph_leaves(loss: Tensor) -> set[int] | None:
    """What the loss depends on; None where the graph is too large to search."""
    waiting: list[Any] = [loss.grad_fn] if loss.grad_fn is not None else []
    seen, found = set(waiting), set()
    while waiting and len(seen) < _MOST_NODES:
        node = waiting.pop()
        found.add(id(getattr(node, "variable", None)))
        new = [below for below, _ in node.next_functions if below is not None and below not in seen]
        seen.update(new)
        waiting += new
    return None if waiting else found


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


def is_batch_first(shape: Sequence[int], batch: list[tuple[str, Tensor]]) -> bool:
    """Whether the first dimension is that of the samples: so say the inputs and the targets of the batch."""
    if len(batch) < 2:
        return False
    inputs, targets = batch[0][1], batch[-1][1]
    rows = len(inputs)
    one_label_each = targets.dim() == 1 and len(targets) == rows
    return one_label_each and inputs.dim() > 1 and shape[0] == rows != shape[1]


def main_tensor(output: Any) -> Tensor | None:
    """The logits by their name, else the first tensor of real numbers."""
    if isinstance(output, Mapping) and isinstance(output.get("logits"), Tensor):
        output = output["logits"]
    for _, tensor in tensors_in(output, most_parts=64):
        if tensor.dim() and tensor.is_floating_point() and tensor.layout is torch.strided and tensor.numel():
            return tensor
    return None


def faintest(everything: Any, main: Tensor) -> Tensor:
    """How little the samples differ in any further output that has a row for each, as a share of its size."""
    others = [
        t.detach().float()
        for _, t in tensors_in(everything, most_parts=8)
        if t is not main and t.is_floating_point() and t.dim() > 1 and len(t) == len(main) > 1 and t.numel() <= MOST
    ]
    shares = [spread_of(t) / t.square().mean().sqrt().clamp(min=1e-30) for t in others]
    return torch.stack(shares).amin() if shares else UNKNOWN


def spread_of(values: Tensor | None) -> Tensor:
    """How far the samples of a batch are apart; NaN for fewer than two."""
    if values is None or len(values) < 2 or values.is_complex():
        return torch.full((), math.nan)
    rows = values[: max(2, MOST // max(1, values[0].numel()))]
    return rows.float().var(0, correction=0).mean().sqrt()


def values_of(values: Tensor) -> list[Tensor]:
    """Smallest, largest, RMS, spread, errors of the sums over rows and columns, entropy, alignment, distinct rows."""
    low, high = torch.aminmax(values)
    rms = values.square().mean().sqrt()
    unknown = torch.full_like(rms, math.nan)
    if values.dim() < 2:
        return [low, high, rms, spread_of(values), unknown, unknown, unknown, unknown, unknown]
    row = (values.sum(-1) - 1.0).abs().amax()
    column = (values.sum(0) - 1.0).abs().amax()
    logs = torch.log_softmax(values, -1)
    entropy = -(logs.exp() * logs).sum(-1).mean() if values.shape[-1] > 1 else unknown
    rows = values.flatten(0, -2)
    units = rows * rows.square().sum(-1, keepdim=True).clamp(min=1e-24).rsqrt()
    alignment = units.mean(0).square().sum().sqrt() if values.shape[-1] > 1 else unknown
    samples = values.flatten(1)
    apart = ((samples - samples.roll(1, 0)).abs().amax(1) > 1e-6 * rms).float().mean()
    return [low, high, rms, spread_of(values), row, column, entropy, alignment, apart]
