"""Parameter groups from rules: learning rate and weight decay per group, from a model to what an optimizer takes."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, final

from torch import nn

from steadystep._utils.modules import unwrapped
from steadystep._utils.numbers import is_number
from steadystep._utils.text import plain_name
from steadystep.errors import ConfigError
from steadystep.groups.rule import NamedParameter, Rule, embed_and_attention, inventory, near

__all__ = ["LayerDecay", "Rule", "embed_and_attention", "param_groups", "table"]


def table(groups: Iterable[Mapping[str, Any]], *, names: int = 3) -> str:
    """Return a table of groups: one line per group, with its first parameter names.

    Args:
        groups: from `param_groups`, or `optimizer.param_groups`.
        names: number of parameter names per line.

    >>> from torch import nn
    >>> from steadystep.groups import param_groups
    >>> print(table(param_groups(nn.Linear(4, 2), lr=0.1, weight_decay=0.01)))
    group          lr   weight decay  tensors  numbers  parameters
    rest           0.1  0.01          1        8        weight
    rest/no decay  0.1  0             1        2        bias
    """
    rows = [("group", "lr", "weight decay", "tensors", "numbers", "parameters")]
    for number, group in enumerate(groups):
        params, members = group["params"], group.get("members", ())
        more = f", ... {len(members) - names} more" if len(members) > names else ""
        rows.append(
            (
                str(group.get("name", f"group {number}")),
                f"{float(group['lr']):.4g}",
                f"{float(group.get('weight_decay', 0.0)):.4g}",
                str(len(params)),
                f"{sum(p.numel() for p in params):,}",
                ", ".join(members[:names]) + more,
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)


@final
@dataclass(frozen=True, slots=True)
class LayerDecay:
    """Layer-wise learning-rate decay: each block learns `rate` times as fast as the one after it.

    Args:
        rate: 0.65 to 0.95 is usual.
        blocks: a glob over the paths of the blocks, bottom first, such as "encoder.layer.*". Default: the one
            ModuleList or Sequential in the model whose members are all of one type.

    >>> LayerDecay(0.9, blocks="encoder.layer.*").rate
    0.9
    """

    rate: float
    blocks: str | None = None

    def __post_init__(self) -> None:
        if not (is_number(self.rate) and 0 < self.rate <= 1):
            raise ConfigError(
                f"layer_decay = {self.rate!r}: must be greater than 0 and at most 1; 0.65 to 0.95 is usual"
            )


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """Where a parameter stands."""

    label: str
    lr_mult: float


def layers(model: nn.Module, items: list[NamedParameter], decay: LayerDecay) -> list[Layer]:
    """The layer of each item."""
    blocks = _named(model, decay.blocks) if decay.blocks else _found(model)
    number = {id(block): n for n, (_, block) in reversed(list(enumerate(blocks, 1)))}
    inside = [_depth(item, number) for item in items]
    last = max(position for position, depth in enumerate(inside) if depth)
    end, reached, placed = len(blocks) + 1, 0, []
    for position, (item, depth) in enumerate(zip(items, inside, strict=True)):
        if depth:
            reached = max(reached, depth)
        elif any(home.is_embedding for home in item.homes):
            depth = 0
        else:
            depth = end if position > last else reached  # registered between two blocks: with the lower one
        label = "before the blocks" if depth == 0 else "after the blocks" if depth == end else blocks[depth - 1][0]
        placed.append(Layer(label=label, lr_mult=decay.rate ** (end - depth)))
    return placed


def _depth(item: NamedParameter, number: dict[int, int]) -> int:
    found = [number[id(owner)] for home in item.homes for owner in home.owners if id(owner) in number]
    return min(found, default=0)


def _found(model: nn.Module) -> list[tuple[str, nn.Module]]:
    stacks: dict[str, nn.Module] = {}
    covered: set[int] = set()
    for path, module in model.named_modules():
        if id(module) not in covered and _repeats(module):
            stacks[path] = module
            covered |= {id(inner) for inner in module.modules()}
    if len(stacks) != 1:
        what = (
            f"{len(stacks)} stacks of repeated blocks ({', '.join(map(plain_name, stacks))})" if stacks else "no stack"
        )
        example = next((f"{plain_name(path)}.*" for path in stacks), "layers.*")
        raise ConfigError(
            f"layer_decay: found {what}, but needs exactly one: choose it with LayerDecay(0.9, blocks={example!r}); "
            "matching blocks are taken in registration order"
        )
    path, stack = next(iter(stacks.items()))
    return list(_members(path, stack))


def _repeats(module: nn.Module) -> bool:
    if not isinstance(module, nn.ModuleList | nn.Sequential):
        return False
    members = list(module.children())
    return len(members) > 1 and len({type(member) for member in members}) == 1 and _holds_parameters(members[0])


def _named(model: nn.Module, glob: str) -> list[tuple[str, nn.Module]]:
    found: list[tuple[str, nn.Module]] = []
    covered: set[int] = set()
    for path, module in model.named_modules():
        if id(module) in covered or not fnmatchcase(plain_name(path), glob):
            continue
        covered |= {id(inner) for inner in module.modules()}
        if isinstance(module, nn.ModuleList):  # why: a list is never a block itself
            found += _members(path, module)
        elif _holds_parameters(module):
            found.append((plain_name(path), module))
    if not found:
        paths = [plain_name(path) for path, module in model.named_modules() if isinstance(module, nn.ModuleList)]
        hint = f"; available: {', '.join(f'{path}.*' for path in paths[:3])}" if paths else ""
        raise ConfigError(f"layer_decay: blocks = {glob!r} matches no module with parameters{hint}")
    return found


def _members(path: str, stack: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, member in stack.named_children():
        if _holds_parameters(member):
            yield plain_name(f"{path}.{name}" if path else name), member


def _holds_parameters(module: nn.Module) -> bool:
    return any(True for _ in module.parameters())


_REST = "rest"


def param_groups(
    model: nn.Module,
    *,
    lr: float,
    weight_decay: float = 0.0,
    rules: Rule | Iterable[Rule] = (),
    no_decay: bool = True,
    layer_decay: float | LayerDecay | None = None,
) -> list[dict[str, Any]]:
    """Return groups for any torch optimizer, with every trainable parameter in exactly one; a tied weight counts once.

    Args:
        model: the model, also wrapped in DDP or torch.compile; names are without `module.` and `_orig_mod.`.
        lr: the base learning rate. Pass it to the optimizer too.
        weight_decay: weight decay where no rule sets another one.
        rules: the first rule that matches a parameter applies. A rule that no parameter is left for is an error.
        no_decay: no weight decay for norms, biases and embeddings, unless a rule sets one.
        layer_decay: rate of a `LayerDecay`, or the object itself; multiplied with the rules.

    Returns:
        Groups with `params`, `lr`, `weight_decay`, and three keys that torch carries along: `name`, `lr_mult` (lr /
        base) and `members`, the names of the parameters.

    >>> model = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 4), nn.LayerNorm(4))
    >>> groups = param_groups(model, lr=0.1, weight_decay=0.01, rules=[Rule(nn.Embedding, lr_mult=0.5)])
    >>> [(group["name"], group["lr"], group["weight_decay"]) for group in groups]
    [('Embedding/no decay', 0.05, 0.0), ('rest', 0.1, 0.01), ('rest/no decay', 0.1, 0.0)]
    """
    chosen = (rules,) if isinstance(rules, Rule) else tuple(rules)
    decay = LayerDecay(layer_decay) if isinstance(layer_decay, int | float) else layer_decay
    root = unwrapped(model, by_form=True)
    items = inventory(root)
    _check(lr, weight_decay, chosen, items)
    owners = _owners(chosen, items)
    placed: list[Layer | None] = [*layers(root, items, decay)] if decay else [None] * len(items)
    groups: dict[object, dict[str, Any]] = {}
    for item, rule, layer in zip(items, owners, placed, strict=True):
        if item.parameter.requires_grad:
            exempt = no_decay and weight_decay > 0 and any(home.is_undecayed for home in item.homes)
            made = _group(rule, layer, lr=lr, weight_decay=0.0 if exempt else weight_decay, exempt=exempt)
            group = groups.setdefault((rule and rule.label, layer and layer.label, made["name"]), made)
            group["params"].append(item.parameter)
            group["members"].append(item.name)
    return list(groups.values())


def _group(rule: Rule | None, layer: Layer | None, *, lr: float, weight_decay: float, exempt: bool) -> dict[str, Any]:
    parts, lr_mult = [rule.label if rule else _REST], rule.lr_mult if rule else 1.0
    if layer:
        parts.append(layer.label)
        lr_mult *= layer.lr_mult
    if rule and rule.weight_decay is not None:
        weight_decay = rule.weight_decay
    elif exempt:
        parts.append("no decay")
    return {
        "name": "/".join(parts),
        "params": [],
        "lr": lr * lr_mult,
        "weight_decay": weight_decay,
        "lr_mult": lr_mult,
        "members": [],
    }


def _owners(rules: tuple[Rule, ...], items: list[NamedParameter]) -> list[Rule | None]:
    """The first rule that speaks of each item; a rule without any trainable item is an error."""
    owners = [next((rule for rule in rules if rule.speaks_of(item)), None) for item in items]
    busy = {owner.label for owner, item in zip(owners, items, strict=True) if owner and item.parameter.requires_grad}
    for rule in rules:
        if rule.label not in busy:
            raise ConfigError(f"rule {rule.label!r} {_why_idle(rule, rules, items)}")
    return owners


def _why_idle(rule: Rule, rules: tuple[Rule, ...], items: list[NamedParameter]) -> str:
    spoken_of = [item for item in items if rule.speaks_of(item)]
    if not spoken_of:
        return f"matches no parameter: {near(rule, items)}"
    trainable = [item for item in spoken_of if item.parameter.requires_grad]
    if not trainable:
        return f"matches only frozen parameters ({spoken_of[0].name}, ...): remove it or unfreeze them"
    earlier = next(other for other in rules if other.speaks_of(trainable[0]))
    return (
        f"matches nothing that is left: {earlier.label!r} comes first and takes {trainable[0].name}; put the "
        "narrower rule first"
    )


def _check(lr: float, weight_decay: float, rules: tuple[Rule, ...], items: list[NamedParameter]) -> None:
    if not (is_number(lr) and lr > 0):
        raise ConfigError(f"param_groups: lr = {lr!r}: must be a finite number greater than 0")
    if not (is_number(weight_decay) and weight_decay >= 0):
        raise ConfigError(f"param_groups: weight_decay = {weight_decay!r}: must be 0 or more")
    labels = [*(rule.label for rule in rules), _REST]
    twice = next((label for label in labels if labels.count(label) > 1), None)
    if twice:
        raise ConfigError(f"param_groups: two groups would be named {twice!r}: set name= on one of the rules")
    if not any(item.parameter.requires_grad for item in items):
        raise ConfigError("param_groups: the model has no trainable parameter")
