"""The tensors of a model that can be filled: each once, under its plain name, wherever it is wrapped or tied."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import final

import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.utils import parametrize

from steadystep.names import plain

_LOOKUPS = (nn.Embedding, nn.EmbeddingBag)


@final
@dataclass(slots=True, kw_only=True)
class Slot:
    """A place for weights: a parameter, or the value that a parametrization computes from its originals."""

    path: str
    """The plain name of the module."""
    module: nn.Module
    key: str
    value: Tensor
    originals: tuple[Tensor, ...] = ()
    """What a parametrization keeps instead; empty for a plain parameter."""
    also: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        """The plain name of the tensor."""
        return f"{self.path}.{self.key}" if self.path else self.key

    @property
    def frozen(self) -> bool:
        """True when nothing here is trained."""
        return not any(t.requires_grad for t in self.originals or (self.value,))


def unwrap(model: nn.Module) -> nn.Module:
    """The model inside torch.compile, DataParallel and DistributedDataParallel."""
    while True:
        if isinstance(model, DataParallel | DistributedDataParallel):
            model = model.module
        elif "_orig_mod" in model._modules:
            model = model.get_submodule("_orig_mod")
        else:
            return model


def slots(model: nn.Module) -> list[Slot]:
    """Every tensor once, in the order of the modules. A tied one belongs to the embedding among its owners."""
    found: dict[int, Slot] = {}
    for slot in _all_slots(unwrap(model)):
        key = id(slot.originals[0] if slot.originals else slot.value)
        first = found.get(key)
        if first is None:
            found[key] = slot
        elif isinstance(slot.module, _LOOKUPS) and not isinstance(first.module, _LOOKUPS):
            slot.also = [first.name, *first.also]
            found[key] = slot
        else:
            first.also.append(slot.name)
    return list(found.values())


def _all_slots(model: nn.Module) -> Iterator[Slot]:
    for name, module in model.named_modules():
        if "parametrizations" in name.split("."):
            continue
        path = plain(name)
        for key, value in module._parameters.items():
            if value is not None:
                yield Slot(path=path, module=module, key=key, value=value)
        if isinstance(module, nn.Module) and parametrize.is_parametrized(module):
            lists = module.get_submodule("parametrizations")
            for key, held in lists.named_children():
                with torch.no_grad():
                    value = getattr(module, key)
                yield Slot(path=path, module=module, key=key, value=value, originals=tuple(held.parameters()))
