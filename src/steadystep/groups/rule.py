"""Which parameters a rule speaks of, and what it says about them."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import KW_ONLY, dataclass, field
from fnmatch import fnmatchcase
from typing import final

from torch import nn
from torch.nn import Parameter

from steadystep._utils.numbers import is_number
from steadystep._utils.text import alike, plain_name
from steadystep.errors import ConfigError

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
class NamedParameter:
    """One parameter and its homes."""

    parameter: Parameter
    homes: list[Home] = field(default_factory=list)

    @property
    def name(self) -> str:
        """The first of its names, the one `named_parameters` gives."""
        return self.homes[0].name


def inventory(model: nn.Module) -> list[NamedParameter]:
    """Every parameter once, frozen ones too, in the order of `named_parameters`."""
    items: dict[int, NamedParameter] = {}
    owners: dict[str, tuple[nn.Module, ...]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        above = owners[path.rpartition(".")[0]] if path else ()
        owners[path] = (*above, module)
        for leaf, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            home = Home(name=plain_name(f"{path}.{leaf}" if path else leaf), owners=owners[path])
            items.setdefault(id(parameter), NamedParameter(parameter=parameter)).homes.append(home)
    return list(items.values())


Match = str | type[nn.Module]


@final
@dataclass(frozen=True, slots=True)
class Rule:
    """Learning-rate multiplier and, optionally, weight decay for the parameters that `match`.

    A string is a glob over the whole parameter name (`*` also matches dots) or over a module path that it begins with:
    "blocks.3" is everything in that block and nothing of "blocks.30". A module type is everything inside modules of
    that type.

    Args:
        match: a glob, a module type, or several of them, any of which may match.
        lr_mult: multiple of the base learning rate.
        weight_decay: weight decay of all these parameters, biases and norms included. Default: the usual rules.
        name: name of the group. Default: derived from `match`.

    >>> Rule("head.*", lr_mult=10.0).label
    'head.*'
    >>> Rule((nn.LayerNorm, "*.gain"), weight_decay=0.0).label
    'LayerNorm|*.gain'
    """

    match: Match | tuple[Match, ...] | list[Match]
    _: KW_ONLY
    lr_mult: float = 1.0
    weight_decay: float | None = None
    name: str = ""

    def __post_init__(self) -> None:
        if not self.matches or not all(_usable(match) for match in self.matches):
            raise ConfigError(
                f"Rule: match = {self.match!r}: pass a glob such as '*.attn.*', a module type, or several"
            )
        if not (is_number(self.lr_mult) and self.lr_mult > 0):
            raise ConfigError(
                f"Rule {self.label!r}: lr_mult = {self.lr_mult!r}: must be greater than 0; "
                "to freeze parameters call requires_grad_(False) on them"
            )
        if self.weight_decay is not None and not (is_number(self.weight_decay) and self.weight_decay >= 0):
            raise ConfigError(f"Rule {self.label!r}: weight_decay = {self.weight_decay!r}: must be 0 or more")

    @property
    def matches(self) -> tuple[Match, ...]:
        """`match` as a tuple."""
        return tuple(self.match) if isinstance(self.match, tuple | list) else (self.match,)

    @property
    def label(self) -> str:
        """Name of the group."""
        return self.name or "|".join(m if isinstance(m, str) else m.__name__ for m in self.matches)

    def speaks_of(self, item: NamedParameter) -> bool:
        """Return whether the rule matches the parameter; a tied weight matches by each of its names."""
        return any(_at(match, home) for match in self.matches for home in item.homes)


def embed_and_attention() -> tuple[Rule, ...]:
    """Return rules for a transformer: embeddings at a tenth of the learning rate, attention at twice.

    >>> [(rule.label, rule.lr_mult) for rule in embed_and_attention()]
    [('embeddings', 0.1), ('attention', 2.0)]
    """
    embeddings: tuple[Match, ...] = (nn.Embedding, nn.EmbeddingBag, "*embed*")
    attention: tuple[Match, ...] = (nn.MultiheadAttention, "*attn*", "*attention*", "*qkv*", "*[qkvo]_proj*")
    return Rule(embeddings, lr_mult=0.1, name="embeddings"), Rule(attention, lr_mult=2.0, name="attention")


def near(rule: Rule, items: Iterable[NamedParameter]) -> str:
    """For a rule that matches nothing: what there is that sounds like it."""
    homes = [home for item in items for home in item.homes]
    globs = [match for match in rule.matches if isinstance(match, str)]
    if not globs:
        kinds = dict.fromkeys(type(owner).__name__ for home in homes for owner in home.owners)
        return f"the modules here are {', '.join(kinds)}"
    paths = list(dict.fromkeys(path for home in homes for path in home.paths()))
    found = list(dict.fromkeys(path for glob in globs for path in _near_paths(glob, paths)))
    what = f"similar names are {', '.join(found[:4])}" if found else f"names look like {', '.join(paths[:2])}"
    return f"{what}; a glob matches from the start of a name; a leading '*' matches anywhere"


def _near_paths(glob: str, paths: list[str]) -> list[str]:
    core = re.sub(r"[*?!\[\]]", "", glob).strip(". ")
    inside = [path for path in paths if core and core.lower() in path.lower()]
    by_end = {path.rpartition(".")[2]: path for path in reversed(paths)}
    ends = alike(core, by_end, count=2)
    return [*inside[:2], *alike(core, paths, count=2, cutoff=0.6), *(by_end[end] for end in ends)]


def _at(match: Match, home: Home) -> bool:
    if isinstance(match, str):
        return any(fnmatchcase(path, match) for path in home.paths())
    return any(isinstance(owner, match) for owner in home.owners)


def _usable(match: object) -> bool:
    return bool(match) if isinstance(match, str) else isinstance(match, type) and issubclass(match, nn.Module)
