"""From a model and rules to the groups an optimizer takes."""

from collections.abc import Iterable
from typing import Any

from torch import nn

from steadystep.errors import ConfigError
from steadystep.groups.inventory import Item, inventory, unwrapped
from steadystep.groups.layer_decay import Layer, LayerDecay, layers
from steadystep.groups.rule import Rule, is_number, near

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
    """Groups for any torch optimizer: every trainable parameter in exactly one, a tied weight once.

    >>> model = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 4), nn.LayerNorm(4))
    >>> groups = param_groups(model, lr=0.1, weight_decay=0.01, rules=[Rule(nn.Embedding, lr_mult=0.5)])
    >>> [(group["name"], group["lr"], group["weight_decay"]) for group in groups]
    [('Embedding/no decay', 0.05, 0.0), ('rest', 0.1, 0.01), ('rest/no decay', 0.1, 0.0)]

    Args:
        model: also one wrapped in DDP or torch.compile; names are without `module.` and `_orig_mod.`.
        lr: the base learning rate. Give it to the optimizer too.
        weight_decay: for what no rule gives another one.
        rules: the first that matches a parameter has it. One that matches nothing, or is left nothing, is an error.
        no_decay: no weight decay for norms, biases and embeddings, unless a rule says otherwise.
        layer_decay: each of a stack of blocks learns so many times as fast as the one after it; times the rules.

    Returns:
        Groups with `params`, `lr`, `weight_decay`, and three keys torch carries along: `name`, `lr_mult` (lr / base)
        and `members`, the names of the parameters.
    """
    chosen = (rules,) if isinstance(rules, Rule) else tuple(rules)
    decay = LayerDecay(layer_decay) if isinstance(layer_decay, int | float) else layer_decay
    root = unwrapped(model)
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


def _owners(rules: tuple[Rule, ...], items: list[Item]) -> list[Rule | None]:
    """The first rule that speaks of each item; a rule without any trainable item is an error."""
    owners = [next((rule for rule in rules if rule.speaks_of(item)), None) for item in items]
    busy = {owner.label for owner, item in zip(owners, items, strict=True) if owner and item.parameter.requires_grad}
    for rule in rules:
        if rule.label not in busy:
            raise ConfigError(f"rule {rule.label!r} {_why_idle(rule, rules, items)}")
    return owners


def _why_idle(rule: Rule, rules: tuple[Rule, ...], items: list[Item]) -> str:
    spoken_of = [item for item in items if rule.speaks_of(item)]
    if not spoken_of:
        return f"matches no parameter: {near(rule, items)}"
    trainable = [item for item in spoken_of if item.parameter.requires_grad]
    if not trainable:
        return f"matches only frozen parameters ({spoken_of[0].name}, ...): remove it or unfreeze them"
    earlier = next(other for other in rules if other.speaks_of(trainable[0]))
    return f"is left nothing: {earlier.label!r} comes first and takes {trainable[0].name}; put the narrower rule first"


def _check(lr: float, weight_decay: float, rules: tuple[Rule, ...], items: list[Item]) -> None:
    if not (is_number(lr) and lr > 0):
        raise ConfigError(f"param_groups: lr = {lr!r}: must be a finite number greater than 0")
    if not (is_number(weight_decay) and weight_decay >= 0):
        raise ConfigError(f"param_groups: weight_decay = {weight_decay!r}: must be 0 or more")
    labels = [*(rule.label for rule in rules), _REST]
    twice = next((label for label in labels if labels.count(label) > 1), None)
    if twice:
        raise ConfigError(f"param_groups: two groups would be called {twice!r}: give one of the rules another name=")
    if not any(item.parameter.requires_grad for item in items):
        raise ConfigError("param_groups: the model has no trainable parameter")
