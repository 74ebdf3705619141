"""One fault as plain data, checked before there is a model."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, final

from torch import nn
from torch.optim import Optimizer

from steadystep.errors import ConfigError
from steadystep.faults import options as read
from steadystep.faults.fault import Fault
from steadystep.faults.kinds import KINDS, Ground, Kind
from steadystep.faults.together import on_rank
from steadystep.faults.when import When, read_when
from steadystep.names import nearest_names

COMMON = ("kind", "at", "for", "steps", "rank", "seed")
"""Keys that every kind takes."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Declaration:
    """What was declared, every value read."""

    kind: str
    when: When
    options: Mapping[str, Any]
    rank: int | None = None
    seed: int | None = None

    def made(self, model: nn.Module, optimizer: Optimizer, *, seed: int) -> Fault:
        """The fault itself; a model that cannot have it raises `MisuseError` or `UnsupportedError`."""
        own = seed if self.seed is None else self.seed
        ground = Ground(model=model, optimizer=optimizer, steps=self.when, seed=own)
        fault = replace(KINDS[self.kind].make(ground, self.options), name=self.kind)
        return fault if self.rank is None else on_rank(fault, self.rank)


def declared(entry: Any, *, where: str) -> Declaration:
    """Read one declaration. A `ConfigError` names every mistake in it, one on each line."""
    problems: list[str] = []
    if not isinstance(entry, Mapping):
        raise ConfigError(f"{where}: expected a mapping with 'kind' and 'at', got {type(entry).__name__}")
    if "kind" not in entry:
        raise ConfigError(f"{where}: the key 'kind' is missing, one of {', '.join(KINDS)}")
    word = entry["kind"]
    if not isinstance(word, str) or word not in KINDS:
        near = nearest_names(str(word), list(KINDS), count=1)
        raise ConfigError(f"{where}.kind = {word!r}: unknown{near}")
    kind, when, values = KINDS[word], When(()), dict[str, Any]()
    problems += _unknown(entry, kind)
    try:
        when = read_when(entry, lasts=kind.lasts)
    except ValueError as error:
        problems.append(str(error))
    if kind.once and len(when.stretches) > 1:
        problems.append(f".at = {entry['at']!r}: {word} grows from one step on, so it has one start")
    readers = {key: option.read for key, option in kind.options.items()} | {"rank": read.count, "seed": read.whole}
    for key in [key for key in readers if key in entry]:
        try:
            values[key] = readers[key](entry[key])
        except ValueError as error:
            about = f" ({kind.options[key].about})" if key in kind.options else ""
            problems.append(f".{key} = {entry[key]!r}: {error}{about}")
    if problems:
        raise ConfigError("\n".join(f"{where}{problem}" for problem in problems))
    rank, seed = values.pop("rank", None), values.pop("seed", None)
    defaults = {key: option.default for key, option in kind.options.items()}
    return Declaration(kind=word, when=when, options=defaults | values, rank=rank, seed=seed)


def _unknown(entry: Mapping[Any, Any], kind: Kind) -> Iterator[str]:
    known = [*kind.options, *COMMON]
    for key in entry:
        if key not in known:
            yield f": unknown key {key!r}{nearest_names(str(key), known, count=1)}"
