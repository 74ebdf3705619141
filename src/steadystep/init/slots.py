"""The tensors of a model that can be filled: each once, under its plain name, wherever it is wrapped or tied."""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import final

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from steadystep._utils.modules import unwrapped
from steadystep._utils.text import plain_name
from steadystep.errors import ConfigError

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


def slots(model: nn.Module) -> list[Slot]:
    """Every tensor once, in the order of the modules. A tied one belongs to the embedding among its owners."""
    found: dict[int, Slot] = {}
    for slot in _all_slots(unwrapped(model)):
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
        path = plain_name(name)
        for key, value in module._parameters.items():
            if value is not None:
                yield Slot(path=path, module=module, key=key, value=value)
        if isinstance(module, nn.Module) and parametrize.is_parametrized(module):
            lists = module.get_submodule("parametrizations")
            for key, held in lists.named_children():
                with torch.no_grad():
                    value = getattr(module, key)
                yield Slot(path=path, module=module, key=key, value=value, originals=tuple(held.parameters()))


# The names common model code gives to the last projection of a branch.
RESIDUAL_NAMES = (
    *("attn_out", "out_proj", "o_proj", "c_proj", "proj", "wo"),
    *("fc2", "down_proj", "linear2", "w2", "dense_4h_to_h"),
)
_PAIRS = ("output.dense", "attention.dense", "self_attention.dense", "attn.dense")
_MLPS = ("mlp", "ffn", "ff", "feed_forward")


def residual_outputs(model: nn.Module, globs: Sequence[str] | None, num_layers: int | None) -> dict[str, int]:
    """For each residual output projection its module name and N, the number of additions to its stream."""
    modules = {plain_name(name): module for name, module in unwrapped(model).named_modules()}
    tops = _stacks(modules)
    if globs is None:
        inside = [n for n in modules if _top(n, tops) is not None] if tops or num_layers is None else list(modules)
        found = [n for n in inside if _is_output(n, modules)]
    else:
        found = _match(globs, modules)
    if num_layers is not None:
        return dict.fromkeys(found, 2 * num_layers)
    additions = {n: _addition(n) for n in found}
    sizes = Counter(_top(n, tops) for n in {additions[m]: m for m in found}.values())
    return {n: sizes[_top(n, tops)] for n in found}


def is_projection(module: nn.Module) -> bool:
    """A linear map, by any of its common classes."""
    # why: GPT-2 in transformers uses a class of its own, Conv1D, which is a Linear stored the other way round
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"


def _stacks(modules: dict[str, nn.Module]) -> list[str]:
    """The outermost containers of repeated blocks."""
    tops: list[str] = []
    for name, module in modules.items():
        if _top(name, tops) is None and isinstance(module, nn.ModuleList | nn.Sequential):
            kinds = Counter(type(child) for child in module.children() if any(True for _ in child.children()))
            needed = 1 if isinstance(module, nn.ModuleList) else 2
            if kinds and max(kinds.values()) >= needed:
                tops.append(name)
    return tops


def _top(name: str, tops: Sequence[str]) -> str | None:
    return next((top for top in tops if not top or name.startswith(f"{top}.")), None)


def _is_output(name: str, modules: dict[str, nn.Module]) -> bool:
    if not is_projection(modules[name]):
        return False
    path = name.split(".")
    if path[-1] in RESIDUAL_NAMES or ".".join(path[-2:]) in _PAIRS:
        return True
    parent = modules.get(".".join(path[:-1]))
    if not isinstance(parent, nn.Sequential) or len(path) < 2 or path[-2] not in _MLPS:
        return False
    return [child for child in parent.children() if is_projection(child)][-1] is modules[name]


def _addition(name: str) -> str:
    """Experts side by side add to the stream once together."""
    return re.sub(r"(expert\w*)\.\d+", r"\1", name)


def _match(globs: Sequence[str], modules: dict[str, nn.Module]) -> list[str]:
    holders = [name for name, module in modules.items() if "weight" in module._parameters or is_projection(module)]
    found: dict[str, None] = {}
    for glob in globs:
        hits = [name for name in holders if fnmatchcase(name, glob)]
        if not hits:
            near = get_close_matches(glob, holders, n=3, cutoff=0.3)
            raise ConfigError(f"residual: {glob!r} matches no layer; near it: {', '.join(near) or 'none'}")
        found.update(dict.fromkeys(hits))
    return list(found)
