"""What a run is built of: parameters, groups and modes, and what the graph of its loss and outputs reaches."""

import math
from collections.abc import Container, Iterable, Iterator, Sequence
from typing import Any, Protocol

from torch import Tensor, bfloat16, float16, nn
from torch.optim import Optimizer

from steadystep._utils.tensors import graph_nodes, is_sharded
from steadystep._utils.text import plain_name
from steadystep.records import Structure

_DECOUPLED = ("AdamW", "NAdamW", "Lion", "Adan", "Sophia", "Muon")
_FEWEST_DRAWN = 64
_PLAIN = ("SGD", "ASGD", "LBFGS")
_PLANNED = ("initial_lr", "max_lr")
_MOST_NODES = 20_000  # of a graph that is searched
_TURNS = ("TBackward0", "TransposeBackward0", "PermuteBackward0")
_VIEWS = ("ViewBackward0", "UnsafeViewBackward0", "SqueezeBackward0", "SqueezeBackward1")
_MEETINGS = ("CatBackward0", "StackBackward0", "MmBackward0", "BmmBackward0", "CdistBackward0", "SubBackward0")
_LAYER_NODES = ("Addmm", "Mm", "Bmm", "Baddbmm", "Convolution", "Embedding", "Linear", "NativeLayerNorm", "MkldnnRnn")
_NEARBY = 200  # nodes
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
        widths=tuple(p.shape[-1] if p.dim() > 1 else 0 for _, p in trained),
        norm_momentum=min(_momenta(model), default=0.0),
        table_rows=max((m.num_embeddings for m in model.modules() if isinstance(m, _TABLES)), default=0),
        last_frozen=(
            frozen := bool(named) and not named[-1][1].requires_grad and not _has_adapter(*named[-1], trained)
        ),
        last_untrained=frozen and is_as_drawn([p for _, p in named[-2:]]),
        momentum=max((_number(g.get("momentum", 0.0), 0.0) for g in optimizer.param_groups), default=0.0),
    )


def is_as_drawn(layer: Sequence[Tensor]) -> bool:
    """Whether a matrix is spread evenly over 1 / sqrt(inputs) on both sides of zero, as no training leaves it.

    So `nn.Linear` and convolutions begin.
    """
    matrix = next((p.detach() for p in layer if p.dim() > 1), None)
    if matrix is None or matrix.numel() < _FEWEST_DRAWN or is_sharded([matrix]) or matrix.is_complex():
        return False
    bound = 1.0 / math.sqrt(math.prod(matrix.shape[1:]))
    largest, size = float(matrix.abs().amax()), float(matrix.float().square().mean())  # sync: of a frozen last layer
    spread = float(size * 3.0 / bound**2)  # 1 for numbers that are spread evenly
    return 0.95 * bound < largest <= 1.0001 * bound and abs(spread - 1.0) < 3.0 / math.sqrt(matrix.numel())


def _momenta(model: nn.Module) -> list[float]:
    """Of batch normalizations that update their running statistics."""
    norms = [m for m in model.modules() if isinstance(m, _MODES[0]) and m.training and m.track_running_stats]
    return [m.momentum for m in norms if m.momentum is not None]


def _has_adapter(name: str, last: nn.Parameter, trained: Sequence[tuple[str, nn.Parameter]]) -> bool:
    """Whether a trained tensor beside the last layer has one dimension of its size: a LoRA factor is added to it."""
    beside = name.rsplit(".", 2)[0] + "."
    return name.count(".") > 1 and any(n.startswith(beside) and len(last) in p.shape for n, p in trained if last.dim())


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


class Heard(Protocol):
    """What is asked of a recorder of calls."""

    @property
    def loss(self) -> Tensor | None:
        """What the program computed last."""
        ...

    @property
    def used(self) -> set[int]:
        """Parameters that were computed with."""
        ...


def around_graph(
    output: Tensor, model: nn.Module, held: Sequence[Tensor], given: Iterable[Tensor], heard: Heard | None
) -> dict[str, Any]:
    """Fields of `OutputStats` about parameters that model, optimizer and the graph of `output` do not share.

    None where the graph has other tensors than the optimizer: FSDP2 gathers the shards of a weight into a new one.
    """
    leaves, kept = graph_leaves(output) or {}, {id(p) for p in held}
    if any(is_sharded([p]) and p.requires_grad and id(p) not in leaves for p in held):
        return {}
    inside = kept | {id(tensor) for tensor in (*model.parameters(), *given)}
    outside = sum(isinstance(leaf, nn.Parameter) and key not in inside for key, leaf in leaves.items())
    found: dict[str, Any] = {"outside": outside}
    if heard is not None and heard.loss is not None:
        found |= left_out(heard.loss, model, kept, heard.used) | {"compared": compares_outputs(heard.loss)}
    return found


def compares_outputs(loss: Tensor) -> bool:
    """Whether outputs of layers meet each other between the last layers and the loss.

    Then a class is no unit of a layer but a place among samples: two views, a positive before its negatives.
    """
    nodes = list(_behind_layers(loss))
    ranks = any(type(node).__name__ == "LogSoftmaxBackward0" for node in nodes) and any(map(_ranks, nodes))
    return ranks or any(map(_compares, nodes))


def _ranks(node: Any) -> bool:
    """Whether scores of samples, one each, become the columns of a table."""
    if type(node).__name__ not in _VIEWS:
        return False
    before, after = node._saved_self_sym_sizes, node._input_metadata[0].shape
    return len(after) == 2 and after[1] > 1 and (len(before) == 1 or before[-1] == 1)


def _compares(node: Any) -> bool:
    name, sides = type(node).__name__, _near(node)
    if name not in _MEETINGS or len(sides) < 2 or getattr(node, "_saved_dim", None) == 0:
        return False
    below = [_nodes_below(side) for side in sides]
    if name == "SubBackward0" and (sides[0] in below[1] or sides[1] in below[0]):
        return False  # why: a row less its own mean is no difference of two
    return sum(any(map(_is_layer, each)) for each in below) > 1


def _is_layer(node: Any) -> bool:
    return type(node).__name__.startswith(_LAYER_NODES)


def _near(node: Any) -> list[Any]:
    return [below for below, _ in node.next_functions if below is not None]


def _nodes_below(node: Any) -> set[Any]:
    waiting, seen = [node], {node}  # as far as is needed to find a layer
    while waiting and len(seen) < _NEARBY:
        new = [below for below in _near(waiting.pop(0)) if below not in seen]
        seen.update(new)
        waiting += new
    return seen


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


def graph_leaves(loss: Tensor) -> dict[int, Tensor] | None:
    """What the loss depends on, by its identity; None where the graph is too large to search."""
    seen, found = set[Any](), dict[int, Tensor]()
    for node in graph_nodes([loss], seen):
        if len(seen) >= _MOST_NODES:
            return None
        if (leaf := getattr(node, "variable", None)) is not None:
            found[id(leaf)] = leaf
    return found


def _last_layers(loss: Tensor) -> list[list[nn.Parameter]]:
    """The parameters of each node of the graph between which and the loss there are no others."""
    return [own for node in _behind_layers(loss) if (own := _own(node))]


def _own(node: Any) -> list[nn.Parameter]:
    # a transposed weight is one node farther away than a bias
    turned = [below for turn in _near(node) if type(turn).__name__ in _TURNS for below in _near(turn)]
    return [
        leaf for each in (*_near(node), *turned) if isinstance(leaf := getattr(each, "variable", None), nn.Parameter)
    ]


def _behind_layers(loss: Tensor) -> Iterator[Any]:
    """The nodes of the graph from the loss to its last layers, these included."""
    waiting: list[Any] = [loss.grad_fn] if loss.grad_fn is not None else []
    seen = set(waiting)
    while waiting and len(seen) < _MOST_NODES:
        yield (node := waiting.pop())
        new = [] if _own(node) else [below for below in _near(node) if below not in seen]
        seen.update(new)
        waiting += new
