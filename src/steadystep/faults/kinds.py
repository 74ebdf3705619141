"""The table of fault kinds, and declarations of faults, checked before there is a model."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, final

from torch import nn
from torch.optim import Optimizer

from steadystep._utils.text import nearest_names
from steadystep.errors import ConfigError, MisuseError, UnsupportedError
from steadystep.faults import bits, tensors
from steadystep.faults import options as read
from steadystep.faults.fault import Fault, on_rank, together
from steadystep.faults.optimizer import (
    OVERFLOW,
    UNDERFLOW,
    bad_gradient,
    bad_loss,
    creeping_lr,
    drifting_loss,
    fp16_overflow,
    fp16_underflow,
    missing_zero_grad,
    scaled_gradients,
    scaled_lr,
    scaled_moments,
)
from steadystep.faults.options import Option, When, read_when


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Ground:
    """What a fault is injected into."""

    model: nn.Module
    optimizer: Optimizer
    steps: When
    seed: int


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class FaultKind:
    """One kind: what it does, how it is made, and the keys it takes beside `at`."""

    about: str
    make: Callable[[Ground, Mapping[str, Any]], Fault]
    options: Mapping[str, Option] = field(default_factory=dict)
    lasts: int | Literal["ever"] = 1
    """Number of steps, unless the declaration sets it."""
    once: bool = False
    """Whether it grows from one start, and so cannot begin at several steps."""


def _from_start(make: Callable[..., Fault]) -> Callable[[Ground, Mapping[str, Any]], Fault]:
    return lambda g, o: replace(make(g, start=g.steps.first, **o), steps=g.steps)


_FACTOR = Option(read=read.number, default=10.0, about="what to multiply by")
_VALUE = Option(read=read.any_number, default=math.nan, about="a number, nan, inf or -inf")
_PARAMETER = Option(read=read.name_or_position, default=None, about="name or position; default: drawn from the seed")
_ELEMENT = Option(read=read.whole, default=None, about="index of the element; default: drawn from the seed")
_PART = Option(read=read.name_or_position, default=0, about="position or key in the batch")
_LAYER = Option(read=read.name_or_position, default=None, about="name or position; default: drawn from the seed")
_SOME = Option(read=read.name_or_position, default=None, about="name or position of one layer; default: all")
_POWER = Option(read=read.power, default=OVERFLOW, about="power of two")

KINDS: dict[str, FaultKind] = {
    "grad-scale": FaultKind(
        about="multiply all gradients by a factor",
        make=lambda g, o: scaled_gradients(g.model, steps=g.steps, **o),
        options={"factor": _FACTOR, "layer": _SOME},
    ),
    "grad-sign-flip": FaultKind(
        about="flip the sign of all gradients",
        make=lambda g, o: scaled_gradients(g.model, steps=g.steps, factor=-1.0, **o),
        options={"layer": _SOME},
    ),
    "bad-gradient": FaultKind(
        about="set one element of a gradient to NaN",
        make=lambda g, o: bad_gradient(g.model, steps=g.steps, seed=g.seed, **o),
        options={"value": _VALUE, "parameter": _PARAMETER, "element": _ELEMENT},
    ),
    "missing-zero-grad": FaultKind(
        about="add the gradients of the previous step again",
        make=lambda g, o: missing_zero_grad(g.model, steps=g.steps),
    ),
    "fp16-overflow": FaultKind(
        about="gradients overflow fp16; no effect in fp32 and bf16",
        make=lambda g, o: fp16_overflow(g.model, steps=g.steps, **o),
        options={"power": _POWER},
    ),
    "fp16-underflow": FaultKind(
        about="gradients underflow fp16; no effect in fp32 and bf16",
        make=lambda g, o: fp16_underflow(g.model, steps=g.steps, **o),
        options={"power": replace(_POWER, default=UNDERFLOW)},
    ),
    "bad-weight": FaultKind(
        about="set one weight to NaN, permanently",
        make=lambda g, o: tensors.bad_weight(g.model, steps=g.steps, seed=g.seed, **o),
        options={"value": _VALUE, "parameter": _PARAMETER, "element": _ELEMENT},
    ),
    "bit-flip": FaultKind(
        about="flip one bit: of a weight, permanently, or of what `target` names",
        make=lambda g, o: bits.flipped_bit(g.model, steps=g.steps, seed=g.seed, optimizer=g.optimizer, **o),
        options={"parameter": _PARAMETER, "element": _ELEMENT, **bits.OPTIONS},
    ),
    "frozen-layer": FaultKind(
        about="freeze a layer: no gradients, no updates",
        make=lambda g, o: tensors.frozen_layer(g.model, steps=g.steps, seed=g.seed, **o),
        options={"layer": _LAYER},
    ),
    "zeroed-layer": FaultKind(
        about="set all weights of a layer to zero",
        make=lambda g, o: tensors.zeroed_layer(g.model, steps=g.steps, seed=g.seed, **o),
        options={"layer": _LAYER},
    ),
    "dead-relus": FaultKind(
        about="lower biases until no ReLU is active",
        make=lambda g, o: tensors.dead_relus(g.model, steps=g.steps, **o),
        options={
            "bias": Option(read=read.number, default=-1e3, about="new value of the biases"),
            "layer": Option(
                read=read.name, default=None, about="layer whose biases are set; default: those before each nn.ReLU"
            ),
        },
    ),
    "moments-scale": FaultKind(
        about="multiply the optimizer's moments by a factor; 0 clears them",
        make=lambda g, o: scaled_moments(g.optimizer, steps=g.steps, **o),
        options={
            "factor": replace(_FACTOR, default=0.0),
            "moments": Option(read=read.names, default=(), about="such as exp_avg_sq; default: all"),
        },
    ),
    "lr-scale": FaultKind(
        about="multiply the learning rate by a factor",
        make=lambda g, o: scaled_lr(g.optimizer, steps=g.steps, **o),
        options={"factor": _FACTOR},
    ),
    "lr-creep": FaultKind(
        about="grow the learning rate at every step",
        make=_from_start(lambda g, **o: creeping_lr(g.optimizer, **o)),
        options={"growth": Option(read=read.positive, default=1.01, about="multiplier per step")},
        lasts="ever",
        once=True,
    ),
    "bad-loss": FaultKind(
        about="set the loss to NaN",
        make=lambda g, o: bad_loss(steps=g.steps, **o),
        options={"value": _VALUE},
    ),
    "loss-drift": FaultKind(
        about="raise the reported loss at every step; gradients are unchanged",
        make=_from_start(lambda g, **o: drifting_loss(**o)),
        options={"per_step": Option(read=read.number, default=0.01, about="increase per step")},
        lasts="ever",
        once=True,
    ),
    "bad-input": FaultKind(
        about="set one element of the batch to NaN",
        make=lambda g, o: tensors.bad_input(steps=g.steps, seed=g.seed, **o),
        options={"value": _VALUE, "part": _PART, "element": _ELEMENT},
    ),
    "data-scale": FaultKind(
        about="multiply a part of the batch by a factor",
        make=lambda g, o: tensors.scaled_data(steps=g.steps, **o),
        options={"factor": _FACTOR, "part": _PART},
    ),
    "data-constant": FaultKind(
        about="set a part of the batch to one constant",
        make=lambda g, o: tensors.constant_data(steps=g.steps, **o),
        options={"value": replace(_VALUE, default=0.0), "part": _PART},
    ),
    "shuffled-labels": FaultKind(
        about="shuffle the labels against the inputs",
        make=lambda g, o: tensors.shuffled_labels(steps=g.steps, seed=g.seed, **o),
        options={"part": replace(_PART, default=1)},
    ),
    "stale-batch": FaultKind(
        about="repeat the batch of the previous step",
        make=lambda g, o: tensors.stale_batch(steps=g.steps),
    ),
}
"""Kinds of faults that `parse` accepts, by name, with their options."""

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
    if not isinstance(entry, Mapping):
        raise ConfigError(f"{where}: expected a mapping with 'kind' and 'at', got {type(entry).__name__}")
    if "kind" not in entry:
        raise ConfigError(f"{where}: the key 'kind' is missing, one of {', '.join(KINDS)}")
    word = entry["kind"]
    if not isinstance(word, str) or word not in KINDS:
        raise ConfigError(f"{where}.kind = {word!r}: unknown{nearest_names(str(word), list(KINDS), count=1)}")
    kind, when, values = KINDS[word], When(()), dict[str, Any]()
    problems = [*_unknown(entry, kind)]
    try:
        when = read_when(entry, lasts=kind.lasts)
    except ValueError as error:
        problems.append(str(error))
    if kind.once and len(when.stretches) > 1:
        problems.append(f".at = {entry['at']!r}: {word} grows from one step on, so it takes a single start")
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
    """Return the fault that is declared, or all of them as one. A wrong declaration is a `ConfigError`.

    Each declaration has a `kind` (see `KINDS`) and an `at`: a step, a list of steps, "first-last" or {start, steps};
    `for` (or `steps`) sets how long it lasts, a number or "ever". `rank` limits it to one rank.

    Args:
        spec: one declaration, or several.
        model: the model to break.
        optimizer: its optimizer.
        seed: draws what is left open, together with the step.

    >>> import torch
    >>> model = nn.Linear(2, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> fault = parse({"kind": "lr-scale", "at": 500, "factor": 10}, model=model, optimizer=optimizer)
    >>> with fault.at(500):
    ...     print(optimizer.param_groups[0]["lr"])
    1.0
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
