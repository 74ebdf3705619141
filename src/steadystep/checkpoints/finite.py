"""Tensors of a state that hold NaN or infinity: such a state is not written, and not continued from.

A parameter that held infinity when the run began (a frozen table of logits) does so on purpose, and of the buffers some
are masks. So a state says which of its tensors are to be finite.
"""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, final

import torch
from torch import Tensor, nn

from steadystep._utils.tensors import local_part
from steadystep._utils.text import plain_name
from steadystep.checkpoints.packing import pack
from steadystep.errors import CheckpointError, SteadystepError
from steadystep.state import KeptObject
from steadystep.stats import LARGEST

FINITE = "finite"
"""The key of a state under which it says what is to be finite."""

_KINDS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
_ALWAYS = ("parameters.", "optimizer.state")
_PARTS = ("infinite", "buffers", "kept")
_SHOWN = 3


@final
class FiniteParts:
    """What is to be finite: all parameters but those that held infinity when this was made, and certain buffers."""

    def __init__(self, model: nn.Module, buffers: Callable[[], Iterable[str]]) -> None:
        held = _parameters(model)
        self.infinite = frozenset(_without_nan(held, bad_names(held)))
        """Parameters that hold infinity on purpose."""
        self.without_norm = frozenset(_without_nan(held, bad_names({name: _norm(t) for name, t in held.items()})))
        """Those, and others so large from the start that the sum of their squares is not finite: masks, for example."""
        self.kept = KeptTensors()
        self._buffers = buffers

    def saved(self) -> dict[str, list[str]]:
        """For the state."""
        return {"infinite": sorted(self.infinite), "buffers": list(self._buffers()), "kept": list(self.kept.names)}


@final
class KeptTensors:
    """Tensors of kept objects that are to be finite: those that were when the object was first kept."""

    def __init__(self) -> None:
        self._things: dict[str, KeptObject] = {}
        self.names: tuple[str, ...] = ()
        """As they are called in a state that was taken apart."""

    def add(self, name: str, thing: KeptObject) -> None:
        """Check `thing` too."""
        self._things[name] = thing
        held = _tensors_of({name: thing})
        bad = bad_names(held)
        own = (f"kept.{name}.", f"kept.{name}[")
        fresh = [key for key, t in held.items() if key not in bad and t.dtype in _KINDS]
        self.names = (*(key for key in self.names if not key.startswith(own)), *fresh)

    def tensors(self) -> dict[str, Tensor]:
        """As they are now, alive."""
        held = _tensors_of(self._things) if self._things else {}
        return {name: held[name] for name in self.names if name in held}


def _tensors_of(things: Mapping[str, KeptObject]) -> dict[str, Tensor]:
    try:
        return pack({"kept": {name: thing.state_dict() for name, thing in things.items()}}).tensors
    except SteadystepError:  # a state without form in a file: there is nothing to check it by
        return {}


def not_finite(tensors: Mapping[str, Tensor], tree: Any) -> tuple[str, ...]:
    """Names of those that hold NaN or infinity and should not, of a state of a guarded loop that was taken apart.

    Raises:
        CheckpointError: what it says of its tensors is not what a guard writes.
    """
    rules = _rules(tree.get(FINITE) if isinstance(tree, Mapping) else None)
    return bad_names({name: t for name, t in tensors.items() if _is_judged(name, rules)})


def bad_names(tensors: Mapping[str, Tensor], *, absurd: bool = False) -> tuple[str, ...]:
    """Names of the floating-point tensors that hold NaN or infinity; with `absurd` also what no training comes to."""
    named = [(name, t.detach()) for name, t in tensors.items() if t.dtype in _KINDS and t.numel()]
    if not named:
        return ()
    peaks = torch._foreach_norm([tensor for _, tensor in named], torch.inf)
    flags = [_is_good(peak, absurd=absurd) for peak in peaks]
    together = torch.stack([flag.to(flags[0].device) for flag in flags])
    good = together.tolist()  # sync: once for all of them, when a state is read or written, and in trouble
    return tuple(name for (name, _), is_good in zip(named, good, strict=True) if not is_good)


def _is_good(peak: Tensor, *, absurd: bool) -> Tensor:
    finite = peak.isfinite()
    # the end of a format is what masks are filled with
    return finite & ((peak <= LARGEST) | (peak == torch.finfo(peak.dtype).max)) if absurd else finite


def said(names: Iterable[str]) -> str:
    """For a sentence: the first few."""
    listed = list(names)
    more = f" and {len(listed) - _SHOWN} more" if len(listed) > _SHOWN else ""
    return ", ".join(listed[:_SHOWN]) + more


def _rules(saved: Any) -> Mapping[str, frozenset[str]] | None:
    """What a state says about its tensors; None in a state of an older version, which says nothing."""
    if saved is None:
        return None
    if not isinstance(saved, Mapping):
        raise CheckpointError(f"the checkpoint does not match: {FINITE} is a {type(saved).__name__}")
    for part in _PARTS:
        named = saved.get(part, [])
        if not isinstance(named, list) or not all(isinstance(name, str) for name in named):
            raise CheckpointError(f"the checkpoint does not match: {FINITE}.{part} is {named!r:.60}")
    return {part: frozenset(saved.get(part, ())) for part in _PARTS}


def _is_judged(name: str, rules: Mapping[str, frozenset[str]] | None) -> bool:
    if rules is None:
        return name.startswith(_ALWAYS)
    if name.startswith("buffers."):
        return name.removeprefix("buffers.") in rules["buffers"]
    if name.startswith("kept"):
        return name in rules["kept"]
    return name.startswith(_ALWAYS) and name.removeprefix("parameters.") not in rules["infinite"]


def _parameters(model: nn.Module) -> dict[str, Tensor]:
    named = {plain_name(name): p for name, p in model.named_parameters() if not nn.parameter.is_lazy(p)}
    return {name: local_part(p).detach() for name, p in named.items() if p.device.type != "meta"}


def _norm(tensor: Tensor) -> Tensor:
    """As weights are measured at every look."""
    half = tensor.dtype in (torch.float16, torch.bfloat16)
    usable = tensor.dtype in _KINDS and tensor.numel() and tensor.layout is torch.strided
    return torch.linalg.vector_norm(tensor, dtype=torch.float32 if half else None) if usable else torch.zeros(1)


def _without_nan(held: Mapping[str, Tensor], names: Iterable[str]) -> Iterable[str]:
    """Nobody begins with a NaN on purpose."""
    return [name for name in names if not bool(held[name].isnan().any())]  # sync: once, when a guard is made


def load_kept(name: str, thing: KeptObject, saved: Any) -> Callable[[], object]:
    """Load its state; what is returned takes that back.

    Raises:
        CheckpointError: the object refused it, or took a tensor of another shape than it holds; it is as it was.
    """
    before = copy.deepcopy(thing.state_dict())
    try:
        thing.load_state_dict(saved)
        wrong = _other_shape(saved, thing.state_dict())
    except Exception as error:
        wrong = f"{type(error).__name__}: {error}"
    if wrong:
        thing.load_state_dict(before)
        raise CheckpointError(f"the checkpoint does not match: its state of {name!r} was rejected ({wrong})")
    return lambda: thing.load_state_dict(before)


def _other_shape(saved: Any, loaded: Any) -> str:
    """Where a tensor was stretched over one of another shape, as `copy_` does without a word."""
    held = dict(_tensors(loaded, ""))
    for place, tensor in _tensors(saved, ""):
        if place in held and held[place].shape != tensor.shape:
            return (
                f"{place} has shape {list(tensor.shape)} in the checkpoint and {list(held[place].shape)} in this model"
            )
    return ""


def _tensors(value: Any, place: str) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield place, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _tensors(item, f"{place}.{key}" if place else str(key))
    elif isinstance(value, list | tuple):
        for i, item in enumerate(value):
            yield from _tensors(item, f"{place}[{i}]")
