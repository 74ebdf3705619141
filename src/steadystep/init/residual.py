"""Which layers write into a residual stream, and how many do.

Every addition to the stream makes its variance grow, so GPT-2 draws those layers 1/sqrt(N) smaller, N being their
number (Radford et al. 2019, section 2.3). In a plain transformer of L layers N is 2L: attention and MLP each add once.
"""

import re
from collections import Counter
from collections.abc import Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase

from torch import nn

from steadystep.errors import ConfigError
from steadystep.init.slots import unwrap
from steadystep.names import plain

# The names common model code gives to the last projection of a branch.
NAMES = (
    *("attn_out", "out_proj", "o_proj", "c_proj", "proj", "wo"),
    *("fc2", "down_proj", "linear2", "w2", "dense_4h_to_h"),
)
_PAIRS = ("output.dense", "attention.dense", "self_attention.dense", "attn.dense")
_MLPS = ("mlp", "ffn", "ff", "feed_forward")


def residual_outputs(model: nn.Module, globs: Sequence[str] | None, num_layers: int | None) -> dict[str, int]:
    """For each residual output projection its module name and N, the number of additions to its stream."""
    modules = {plain(name): module for name, module in unwrap(model).named_modules()}
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
    if path[-1] in NAMES or ".".join(path[-2:]) in _PAIRS:
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
