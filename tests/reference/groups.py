"""A slow, obvious twin of `param_groups`: each parameter is asked on its own what it should get."""

import fnmatch
from typing import NamedTuple

from torch import nn


class Share(NamedTuple):
    lr: float
    weight_decay: float
    glob: str | None


def expected(
    model: nn.Module, *, lr: float, weight_decay: float, rules: list[tuple[str, float, float | None]]
) -> dict[str, Share]:
    """The first name of each trainable parameter and what it gets, with rules (glob, lr_mult, weight_decay)."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter.requires_grad:
            names.setdefault(id(parameter), []).append(name)
    modules = dict(model.named_modules(remove_duplicate=False))
    answer = {}
    for aliases in names.values():
        rate, decay, taken = lr, weight_decay, None
        for name in aliases:
            owner, _, leaf = name.rpartition(".")
            if leaf == "bias" or isinstance(modules[owner], nn.LayerNorm | nn.Embedding):
                decay = 0.0
        for glob, lr_mult, own_decay in rules:
            if any(matches(name, glob) for name in aliases):
                rate, taken = lr * lr_mult, glob
                decay = decay if own_decay is None else own_decay
                break
        answer[aliases[0]] = Share(rate, decay, taken)
    return answer


def matches(name: str, glob: str) -> bool:
    while name:
        if fnmatch.fnmatchcase(name, glob):
            return True
        name = name.rpartition(".")[0]
    return False
