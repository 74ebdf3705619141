"""One fault as plain data, checked before there is a model."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

from torch import nn
from torch.optim import Optimizer

from steadystep._utils.text import nearest_names
from steadystep.errors import ConfigError, MisuseError, UnsupportedError
from steadystep.faults import options as read
from steadystep.faults.fault import Fault, on_rank, together
from steadystep.faults.kinds import KINDS, FaultKind, Ground
from steadystep.faults.options import When, read_when

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


def _unknown(entry: Mapping[Any, Any], kind: FaultKind) -> Iterator[str]:
    known = [*kind.options, *COMMON]
    for key in entry:
        if key not in known:
            yield f": unknown key {key!r}{nearest_names(str(key), known, count=1)}"


def parse(
    spec: Mapping[str, Any] | Sequence[Mapping[str, Any]], *, model: nn.Module, optimizer: Optimizer, seed: int = 0
) -> Fault:
    """The fault that was declared, or all of them as one. Raises `ConfigError` with every mistake in it.

    Each has a `kind` (see `KINDS`) and an `at`: a step, a list of steps, "first-last" or {start, steps}; `for` (or
    `steps`) says how long it lasts, a number or "ever". With `rank` it happens on one rank of a distributed run only.
    What is left open (which element, which order) is drawn from `seed` and the step.

    >>> import torch
    >>> model = nn.Linear(2, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> fault = parse({"kind": "lr-scale", "at": 500, "factor": 10}, model=model, optimizer=optimizer)
    >>> for step in (499, 500, 501):
    ...     with fault.at(step):
    ...         print(step, optimizer.param_groups[0]["lr"])
    499 0.1
    500 1.0
    501 0.1
    >>> parse({"kind": "lr-scale", "at": 500, "facter": 10}, model=model, optimizer=optimizer)
    Traceback (most recent call last):
    ...
    steadystep.errors.ConfigError: fault: unknown key 'facter': did you mean 'factor'?
    """
    if isinstance(spec, Mapping):
        entries: dict[str, Any] = {"fault": spec}
    elif isinstance(spec, list | tuple):
        entries = {f"faults[{i}]": entry for i, entry in enumerate(spec)}
    else:
        raise ConfigError(f"faults: expected a mapping or a list of mappings, got {type(spec).__name__}")
    made, problems = list[Fault](), list[str]()
    for where, entry in entries.items():
        try:
            made.append(declared(entry, where=where).made(model, optimizer, seed=seed))
        except ConfigError as error:
            problems.append(str(error))
        except (MisuseError, UnsupportedError) as error:
            problems.append(f"{where}: {error}")
    if problems:
        raise ConfigError("\n".join(problems))
    return together(made)
