"""The parameters of a model, each once, with every name it has and every module it lives under."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import final

from torch import nn
from torch.nn import Parameter

from steadystep.names import plain

_NORM_CLASS = re.compile(r"Norm(\dd)?$")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Home:
    """One place of a parameter; a tied weight has several."""

    name: str
    """Without the wrappers' segments."""
    owners: tuple[nn.Module, ...]
    """From the root down to the module that holds it."""

    def paths(self) -> Iterator[str]:
        """The name and the module paths it begins with: `a.b.weight`, `a`, `a.b`."""
        yield self.name
        for dot in re.finditer(r"\.", self.name):
            yield self.name[: dot.start()]

    @property
    def is_embedding(self) -> bool:
        """Held by an embedding module, or a bare parameter called one (`pos_embed`)."""
        owner, leaf = self._owner_and_leaf
        return (
            isinstance(owner, nn.Embedding | nn.EmbeddingBag)
            or type(owner).__name__.endswith("Embedding")
            or "embed" in leaf
        )

    @property
    def is_undecayed(self) -> bool:
        """A norm, a bias or an embedding: weight decay has no use there and can do harm."""
        owner, leaf = self._owner_and_leaf
        return bool(_NORM_CLASS.search(type(owner).__name__)) or "bias" in leaf.split("_") or self.is_embedding

    @property
    def _owner_and_leaf(self) -> tuple[nn.Module, str]:
        layer, parametrized, inner = self.name.partition("parametrizations.")
        if parametrized:  # layer.parametrizations.weight.original0 is the weight of layer
            return self.owners[-3], inner.partition(".")[0]
        return self.owners[-1], layer.rpartition(".")[2]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One parameter and its homes."""

    parameter: Parameter
    homes: list[Home] = field(default_factory=list)

    @property
    def name(self) -> str:
        """The first of its names, the one `named_parameters` gives."""
        return self.homes[0].name


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside DDP, DataParallel, torch.compile and the like.

    A wrapper is a module without parameters of its own whose only child is called `module` or `_orig_mod`.
    """
    while [name for name, _ in model.named_children()] in (["module"], ["_orig_mod"]):
        if any(True for _ in model.parameters(recurse=False)):
            break
        model = next(model.children())
    return model


def inventory(model: nn.Module) -> list[Item]:
    """Every parameter once, frozen ones too, in the order of `named_parameters`."""
    items: dict[int, Item] = {}
    owners: dict[str, tuple[nn.Module, ...]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        above = owners[path.rpartition(".")[0]] if path else ()
        owners[path] = (*above, module)
        for leaf, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            home = Home(name=plain(f"{path}.{leaf}" if path else leaf), owners=owners[path])
            items.setdefault(id(parameter), Item(parameter=parameter)).homes.append(home)
    return list(items.values())
