"""Weight initialization: named recipes for any module tree, and a check of a model before its first step."""

import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal, final, get_args

import torch
from torch import Generator, Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from steadystep._utils.modules import unwrapped
from steadystep._utils.text import alike, plain_name
from steadystep.errors import ConfigError, MisuseError
from steadystep.init import rules
from steadystep.init.check import check_init
from steadystep.init.findings import InitReport, LayerScale
from steadystep.init.rules import InitMethod, InitRule, Slot, is_projection, rule_for, slots

__all__ = ["InitReport", "InitRow", "InitTable", "LayerScale", "Recipe", "check_init", "initialise_"]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class InitRow:
    """One tensor: the rule that filled it, or why it was left untouched."""

    name: str
    """Name of the parameter."""
    shape: tuple[int, ...]
    """Its shape."""
    rule: str
    """The rule in words; for an untouched tensor, the reason."""
    std: float = 0.0
    """Standard deviation of the distribution; 0 for constants."""
    also: tuple[str, ...] = ()
    """Other names of the same (tied) tensor."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class InitTable:
    """Result of `initialise_`. `str(table)` has one line per tensor, the untouched ones at the end.

    >>> row = InitRow(name="head.weight", shape=(10, 4), rule="N(0, std)", std=0.02)
    >>> print(InitTable(recipe="small", rows=(row,), untouched=()))
    small: 1 tensor set, none untouched
      head.weight  10x4  std 0.02  N(0, std)
    """

    recipe: str
    """Name of the recipe."""
    rows: tuple[InitRow, ...]
    """Tensors that were filled."""
    untouched: tuple[InitRow, ...]
    """Tensors that were left as they are."""

    def __str__(self) -> str:
        left = f"{len(self.untouched)} untouched" if self.untouched else "none untouched"
        lines = [f"{self.recipe}: {len(self.rows)} tensor{'s' * (len(self.rows) != 1)} set, {left}"]
        cells = [_cells(row, f"std {row.std:.3g}") for row in self.rows]
        cells += [_cells(row, "untouched") for row in self.untouched]
        widths = [max((len(c[i]) for c in cells), default=0) for i in range(3)]
        lines += ["  " + "  ".join([*(c[i].ljust(widths[i]) for i in range(3)), c[3]]) for c in cells]
        return "\n".join(lines)

    def row(self, name: str) -> InitRow:
        """Return the row of one tensor, by any of its names."""
        for row in (*self.rows, *self.untouched):
            if name == row.name or name in row.also:
                return row
        raise KeyError(name)


def _cells(row: InitRow, std: str) -> tuple[str, str, str, str]:
    shape = "x".join(str(n) for n in row.shape) or "scalar"
    tied = f" (tied: {', '.join(row.also)})" if row.also else ""
    return row.name, shape, std, row.rule + tied


Recipe = Literal["xavier", "kaiming", "small", "gpt2", "zero-residual"]
"""Names of the recipes that `initialise_` accepts."""
_METHODS: dict[str, InitMethod] = {
    "xavier": "xavier",
    "kaiming": "kaiming",
    "small": "small",
    "gpt2": "small",
    "zero-residual": "small",
}
_RESIDUAL = ("gpt2", "zero-residual")


@torch.no_grad()
def initialise_(
    model: nn.Module,
    recipe: Recipe,
    *,
    num_layers: int | None = None,
    residual: Sequence[str] | None = None,
    seed: int | None = None,
    generator: Generator | None = None,
) -> InitTable:
    """Fill the weights of `model` in place and return what was set.

    Args:
        model: frozen parameters, and those that no rule covers, are listed as untouched.
        recipe: `gpt2` divides residual output projections by sqrt(N); `zero-residual` sets them to zero.
        num_layers: N is 2 * `num_layers`. Default: the number of residual projections on the same stream.
        residual: globs of the residual output projections. Default: the names that common model code uses.
        seed: seed of a generator of its own, on each device.
        generator: the generator to draw from, instead of `seed`.

    >>> layer = nn.TransformerEncoderLayer(8, 2, dim_feedforward=16, batch_first=True)
    >>> table = initialise_(nn.TransformerEncoder(layer, num_layers=2), "gpt2", seed=0)
    >>> table.row("layers.0.linear2.weight").rule, table.row("layers.0.linear2.weight").std
    ('N(0, std), residual: 0.02 / sqrt(4)', 0.01)
    """
    if recipe not in get_args(Recipe):
        raise ConfigError(f"init recipe {recipe!r} is unknown: use one of {', '.join(get_args(Recipe))}")
    _check_arguments(model, recipe, num_layers, residual, seed, generator)
    outputs = residual_outputs(model, residual, num_layers) if recipe in _RESIDUAL else {}
    if recipe in _RESIDUAL and not outputs:
        raise ConfigError(
            f"init recipe {recipe!r} found no residual output projection in repeated blocks: name them with "
            "residual=['blocks.*.my_out'], or use 'small'"
        )
    random = _RandomStreams(seed, generator)
    rows: list[InitRow] = []
    untouched: list[InitRow] = []
    for slot in slots(model):
        rule = rule_for(slot, _METHODS[recipe])
        if isinstance(rule, InitRule) and slot.path in outputs and slot.key == "weight":
            rule = _residual_rule(recipe, outputs[slot.path])
        if isinstance(rule, InitRule):
            rule = _fill(slot, rule, random)
        (rows if isinstance(rule, InitRule) else untouched).append(_row(slot, rule))
    rows += _reset_statistics(unwrapped(model))
    return InitTable(recipe=recipe, rows=tuple(rows), untouched=tuple(untouched))


@final
class _RandomStreams:
    """One stream of random numbers per device: a seed means the same on each, and the global one is left alone."""

    def __init__(self, seed: int | None, generator: Generator | None) -> None:
        self._seed = seed
        self._given = generator
        self._made: dict[torch.device, Generator] = {}

    def on(self, device: torch.device) -> Generator | None:
        if self._seed is None:
            return self._given
        if device not in self._made:
            self._made[device] = Generator(device).manual_seed(self._seed)
        return self._made[device]


def _residual_rule(recipe: Recipe, additions: int) -> InitRule:
    if recipe == "zero-residual":
        return rules.constant_rule(0.0, "0, residual")
    label = f"N(0, std), residual: {rules.SMALL_STD} / sqrt({additions})"
    return rules.normal(rules.SMALL_STD / math.sqrt(additions), label)


def _fill(slot: Slot, rule: InitRule, random: _RandomStreams) -> InitRule | str:
    """Fill the slot; a reason when a parametrization cannot hold the value."""
    if not slot.originals:
        rule.fill(slot.value.detach(), random.on(slot.value.device))
        return rule
    before = [t.detach().clone() for t in slot.originals]
    value = torch.empty_like(slot.value)
    rule.fill(value, random.on(value.device))
    try:
        setattr(slot.module, slot.key, value)
        held = bool(getattr(slot.module, slot.key).isfinite().all())
    except (NotImplementedError, RuntimeError, ValueError):
        held = False
    if held:
        return rule
    for original, old in zip(slot.originals, before, strict=True):
        original.detach().copy_(old)
    return f"its parametrization cannot represent: {rule.label}"


def _row(slot: Slot, rule: InitRule | str) -> InitRow:
    label, std = (rule, 0.0) if isinstance(rule, str) else (rule.label, rule.std)
    return InitRow(name=slot.name, shape=tuple(slot.value.shape), rule=label, std=std, also=tuple(slot.also))


def _reset_statistics(model: nn.Module) -> Iterator[InitRow]:
    """Running means and variances belong to the old weights."""
    for name, module in model.named_modules():
        if isinstance(module, _NormBase) and module.track_running_stats and module.running_mean is not None:
            module.reset_running_stats()
            slot = Slot(path=plain_name(name), module=module, key="running_mean", value=module.running_mean)
            yield _row(slot, rules.constant_rule(0.0, "statistics reset to 0 and 1"))


def _check_arguments(
    model: nn.Module,
    recipe: Recipe,
    num_layers: int | None,
    residual: Sequence[str] | None,
    seed: int | None,
    generator: Generator | None,
) -> None:
    if recipe not in _RESIDUAL and (num_layers is not None or residual is not None):
        raise ConfigError(
            f"num_layers and residual have no effect with recipe {recipe!r}: use {' or '.join(_RESIDUAL)}"
        )
    if num_layers is not None and num_layers < 1:
        raise ConfigError(f"num_layers = {num_layers!r}: must be at least 1")
    if seed is not None and generator is not None:
        raise ConfigError("pass seed or generator, not both")
    if isinstance(model, DistributedDataParallel) and seed is None and generator is None:
        raise ConfigError("the model is already distributed: pass seed=, or the ranks would draw different weights")
    for name, tensor in model.named_parameters():
        _check_fillable(name, tensor)


def _check_fillable(name: str, tensor: Tensor) -> None:
    if is_lazy(tensor):
        raise MisuseError(f"{name} is not initialized yet: run one batch through the lazy modules first")
    if tensor.is_meta:
        raise MisuseError(f"{name} is on the meta device: call model.to_empty(device=...) first")


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
            near = alike(glob, holders, count=3, cutoff=0.3)
            raise ConfigError(f"residual: {glob!r} matches no layer; similar names: {', '.join(near) or 'none'}")
        found.update(dict.fromkeys(hits))
    return list(found)
