"""Refused steps, kept so that they can be run again: the source of a NaN, bundles on disk; and replay of a bundle."""

import inspect
import json
import math
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor, nn

from steadystep._deprecated import old_names
from steadystep._utils import object_at
from steadystep._utils.modules import unwrapped
from steadystep._utils.rng import RngState, random_numbers_kept, restore_torch
from steadystep._utils.tensors import device_of
from steadystep._utils.text import nearest_names, plain_name
from steadystep._utils.tree import mapped
from steadystep.errors import CheckpointError, ConfigError
from steadystep.incidents.bundle import Bundle, read_bundle, write_bundle
from steadystep.incidents.incidents import History, Incidents, RefusedStep
from steadystep.incidents.locate import locate, trace_step
from steadystep.incidents.nan_tracer import NaNTracer
from steadystep.incidents.origin import NaNTrace, Origin
from steadystep.records import Outcome

__all__ = [
    "Bundle",
    "History",
    "Incidents",
    "NaNTrace",
    "NaNTracer",
    "Origin",
    "RefusedStep",
    "Replay",
    "RngState",
    "locate",
    "read_bundle",
    "replay",
    "trace_step",
    "write_bundle",
]

__getattr__ = old_names(__name__)


ReplayFactory = Callable[[], tuple[Any, ...]]
_DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
_ALIKE = 1e-2  # of loss and norm: another machine adds in another order


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """Result of `replay`: an incident, and what happened this time."""

    bundle: Path
    """Folder of the bundle."""
    step: int
    """The optimizer step."""
    what: str
    """What was found when it happened."""
    then: Origin
    """Origin found when it happened."""
    now: NaNTrace
    """Result of this run."""
    seen_loss: float
    """Loss when it happened."""
    seen_norm: float
    """Gradient norm when it happened."""
    precision: str
    """Precision of this run."""
    recorded_precision: str
    """Precision when it happened."""
    reproduces: bool
    """Whether it is non-finite again; for an incident of finite numbers, whether loss and gradient norm are the same.
    Whether it is non-finite again; for an incident of finite numbers, whether loss and gradient norm are the same."""


def replay(bundle: Path, factory: ReplayFactory, *, precision: str | None = None, device: str | None = None) -> Replay:
    """Load a bundle into the factory's model and run its step under `locate`.

    Args:
        bundle: folder of one incident.
        factory: returns (model, closure), the closure being the one given to `Guard.step`: it is called with the batch
            if the bundle holds one, else without arguments. An optimizer and batches may follow; see `without_guard`.
        precision: "fp32", "bf16" or "fp16" instead of the recorded one, to test whether it would have survived.
        device: where to run. Default: where the factory puts the model.

    Raises:
        ConfigError: no bundle, a factory that does not fit, or a choice that does not exist.
        CheckpointError: the bundle is damaged.
    """
    kept = read_bundle(bundle)
    if kept.state is None:
        raise ConfigError(f"{bundle} has no stored state to start from ({_note(kept, 'state')})")
    seen, then, recorded = _recorded(kept)
    chosen = recorded if precision is None else precision
    if chosen not in _DTYPES:
        raise ConfigError(f"precision {chosen!r} is unknown: use one of {', '.join(_DTYPES)}")
    model, closure, *_ = _made(factory)
    _loaded(model, kept)
    if device is not None:
        model = model.to(_device(device))
    if precision == "fp32":
        model = model.float()
    scale = seen.signals.scale if seen.signals is not None and chosen == "fp16" else 1.0
    now = _run(model, closure, kept, _DTYPES[chosen], scale)
    signals = seen.signals
    norm = math.nan if signals is None else signals.grad_norm
    healthy = signals is not None and signals.all_finite
    return Replay(
        bundle=bundle,
        step=seen.step,
        what=str(kept.record.get("what", "")),
        then=then,
        now=now,
        seen_loss=seen.loss,
        seen_norm=norm,
        precision=chosen,
        recorded_precision=recorded,
        reproduces=_alike(now.loss, seen.loss) and _alike(now.grad_norm, norm) if healthy else not now.finite,
    )


def load_factory(name: str) -> ReplayFactory:
    """The function that `module:factory` names; modules in the working directory are found too.

    Raises:
        ConfigError: it cannot be imported; the message says why.
    """
    path, colon, attribute = name.partition(":")
    if not (path and colon and attribute):
        raise ConfigError(f"--factory {name!r}: write it as package.module:function")
    try:
        factory: ReplayFactory = object_at(name)
    except Exception as error:  # whatever the user's module does when it is imported
        raise ConfigError(f"--factory {name!r} cannot be loaded: {type(error).__name__}: {error}") from error
    if not callable(factory):
        raise ConfigError(f"--factory {name!r} is a {type(factory).__name__}, not a function")
    return factory


def _loaded(model: nn.Module, kept: Bundle) -> None:
    assert kept.state is not None
    try:
        load_step_state(model, kept.state)
    except (AttributeError, LookupError, TypeError, ValueError, RuntimeError) as error:
        if isinstance(error, ConfigError):
            raise
        what = f"{type(error).__name__}: {str(error)[:200]}"
        raise CheckpointError(f"{kept.path / 'state'} does not contain the state of a step ({what})") from error


def _made(factory: ReplayFactory) -> tuple[Any, ...]:
    try:
        made: Any = factory()
    except Exception as error:
        raise ConfigError(f"the factory raised {type(error).__name__}: {error}") from error
    if isinstance(made, tuple) and 2 <= len(made) <= 4 and isinstance(made[0], nn.Module) and callable(made[1]):
        return made
    raise ConfigError(f"the factory must return (model, closure), it returned {_described(made)}")


def _run(
    model: nn.Module, closure: Callable[..., Any], kept: Bundle, dtype: torch.dtype | None, scale: float
) -> NaNTrace:
    assert kept.state is not None
    device = device_of(model.parameters())
    batch = mapped(kept.batch, lambda tensor: tensor.to(device))
    wanted = _num_required(closure)
    if wanted and not kept.has_batch:
        raise ConfigError(f"the closure takes a batch, and the bundle has none ({_note(kept, 'batch')})")
    given = (batch,) if kept.has_batch and wanted != 0 else ()

    def work() -> Any:
        with torch.autocast(device.type, dtype=dtype) if dtype else nullcontext():
            return closure(*given)

    with random_numbers_kept(device):
        try:
            restore_torch(kept.state["random"], device)
        except (AttributeError, LookupError, TypeError, ValueError, RuntimeError) as error:
            raise CheckpointError(f"{kept.path / 'state'} contains no random state ({str(error)[:200]})") from error
        try:
            return trace_step(model, work, batch=batch, scale=scale)
        except Exception as error:
            raise ConfigError(f"the closure raised {type(error).__name__}: {error}") from error


def _recorded(kept: Bundle) -> tuple[Outcome, Origin, str]:
    try:
        outcome = Outcome.from_json(json.dumps(kept.record["outcome"]))
        return outcome, Origin.from_json(json.dumps(kept.record["origin"])), str(kept.record["precision"])
    except (KeyError, ValueError) as error:
        why = " ".join(str(error).split())[:300]
        raise ConfigError(f"{kept.path / 'incident.json'} is incomplete: {why}") from None


def _note(kept: Bundle, name: str) -> str:
    notes = kept.record.get("kept")
    return str(notes.get(name)) if isinstance(notes, dict) else "no note"


def _num_required(closure: Callable[..., Any]) -> int | None:
    """Positional arguments that must be given; None when that cannot be told or one may be given."""
    try:
        taken = [p for p in inspect.signature(closure).parameters.values() if p.kind is not p.KEYWORD_ONLY]
    except (TypeError, ValueError):
        return None
    required = [p for p in taken if p.default is p.empty and p.kind is not p.VAR_POSITIONAL]
    return len(required) if required or not taken else None


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"device {name!r} cannot be used: {str(error).splitlines()[0]}") from None
    return device


def _alike(left: float, right: float) -> bool:
    return left == right or abs(left - right) <= _ALIKE * abs(right)


def _described(made: Any) -> str:
    return f"({', '.join(type(m).__name__ for m in made)})" if isinstance(made, tuple) else type(made).__name__


def load_step_state(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Into a model of the same make, strictly.

    Raises:
        ConfigError: something is missing, left over or of another shape; the message names the first that differs.
    """
    model = unwrapped(model)
    for kind, named in (("parameters", model.named_parameters()), ("buffers", model.named_buffers())):
        _fill(kind, {plain_name(name): tensor for name, tensor in named}, state[kind])
    evaluating = set(state["evaluating"])
    for name, module in model.named_modules():
        module.training = plain_name(name) not in evaluating


@torch.no_grad()
def _fill(kind: str, here: Mapping[str, Tensor], kept: Mapping[str, Tensor]) -> None:
    one = kind[:-1]
    for name, tensor in kept.items():
        if name not in here:
            raise ConfigError(
                f"{one} {name!r} is in the bundle but not in the factory's model{nearest_names(name, list(here))}"
            )
        mine = here[name]
        if nn.parameter.is_lazy(mine):
            raise ConfigError(
                f"{one} {name!r} of the factory's model is lazy: run one batch through the model in the factory"
            )
        if mine.shape != tensor.shape:
            kept_shape, shape = list(tensor.shape), list(mine.shape)
            raise ConfigError(f"{one} {name!r} has shape {kept_shape} in the bundle and {shape} in the factory's model")
    for name in here:
        if name not in kept:
            raise ConfigError(f"{one} {name!r} of the factory's model is not in the bundle")
    for name, tensor in kept.items():
        mine = here[name]
        mine.data = tensor.to(mine.device, copy=True) if mine.dtype != tensor.dtype else mine.data.copy_(tensor)
