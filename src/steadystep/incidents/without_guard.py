"""What would have happened without the guard: the refused update is applied, and the steps after it are run.

Only on demand: `steadystep replay BUNDLE --factory module:make --without-guard 20`. The result is written beside the
bundle's other files, and the report draws it.
"""

import json
import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch
from torch import nn
from torch.optim import Optimizer

from steadystep._utils.numbers import with_words
from steadystep._utils.rng import random_numbers_kept, restore_torch
from steadystep._utils.tensors import device_of
from steadystep._utils.tree import mapped
from steadystep.errors import ConfigError
from steadystep.incidents import _DTYPES, ReplayFactory, _loaded, _made, _note, _num_required, _recorded
from steadystep.incidents.bundle import Bundle, read_bundle

FILE = "without_guard.json"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class WithoutGuard:
    """Result of `without_guard`: the loss at the incident's step and at the steps after it."""

    step: int
    """The step of the incident."""
    losses: tuple[float, ...]
    """Loss at each step, from that one on."""
    grad_norms: tuple[float, ...]
    """Gradient norm at each step, before clipping."""
    same_batch: bool
    """Whether every step had the batch of the incident; else the factory gave the others."""

    @property
    def lost_at(self) -> int | None:
        """The first step whose loss is not finite; None if all are."""
        return next((self.step + i for i, loss in enumerate(self.losses) if not math.isfinite(loss)), None)

    def write(self, bundle: Path) -> Path:
        """Write it beside the bundle's other files, where the report finds it."""
        told = {"format": 1, "step": self.step, "loss": self.losses, "norm": self.grad_norms}
        path = bundle / FILE
        path.write_text(json.dumps(with_words({**told, "same_batch": self.same_batch})) + "\n", encoding="utf-8")
        return path


def without_guard(bundle: Path, factory: ReplayFactory, *, steps: int = 20) -> WithoutGuard:
    """Apply the update that was refused, and take the steps after it, with nothing that holds them back.

    Gradients are clipped where the run's settings did so. The learning rate stays what it was at the incident.

    Args:
        bundle: folder of one incident.
        factory: returns (model, closure, optimizer), or (model, closure, optimizer, batches) with the batches that
            come after that of the incident. Without them, the closure gets the batch of the incident at every step.
        steps: number of steps, that of the incident included.

    Raises:
        ConfigError: no bundle, one without the optimizer's state, or a factory that does not fit.
        CheckpointError: the bundle is damaged.
    """
    kept = read_bundle(bundle)
    seen, _, precision = _recorded(kept)
    state = kept.state
    if state is None or state.get("optimizer") is None:
        raise ConfigError(f"{bundle} does not contain the state of the optimizer ({_note(kept, 'state')})")
    if precision == "fp16":
        raise ConfigError("--without-guard: a loop in fp16 has a loss scaler that skips steps by itself; not simulated")
    model, closure, optimizer, batches = _parts(factory)
    _loaded(model, kept)
    try:
        optimizer.load_state_dict(state["optimizer"])
    except (LookupError, TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(f"the factory's optimizer does not fit the bundle: {str(error)[:200]}") from error
    device = device_of(model.parameters())
    dtype = _DTYPES.get(precision)
    limit = (kept.record.get("config") or {}).get("training", {}).get("max_grad_norm")
    losses, norms = [], []
    with random_numbers_kept(device):
        restore_torch(state["random"], device)
        for given in _inputs(kept, closure, batches, steps, device):
            with torch.autocast(device.type, dtype=dtype) if dtype else nullcontext():
                loss = _loss(closure, given)
            loss.backward()  # type: ignore[no-untyped-call]
            norm = nn.utils.clip_grad_norm_(model.parameters(), math.inf if limit is None else float(limit))
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))  # sync: on demand, in a process of its own
            norms.append(float(norm))  # sync: the same
    return WithoutGuard(
        step=seen.step, losses=tuple(losses), grad_norms=tuple(norms), same_batch=batches is None and kept.has_batch
    )


def _parts(factory: ReplayFactory) -> tuple[nn.Module, Callable[..., Any], Optimizer, Iterator[Any] | None]:
    model, closure, *more = _made(factory)
    if not more or not isinstance(more[0], Optimizer):
        raise ConfigError(
            "--without-guard: the factory must return (model, closure, optimizer), or batches as a fourth"
        )
    return model, closure, more[0], iter(more[1]) if len(more) > 1 else None


def _inputs(
    kept: Bundle, closure: Callable[..., Any], batches: Iterator[Any] | None, steps: int, device: torch.device
) -> Iterator[tuple[Any, ...]]:
    """What the closure is called with: the batch of the incident first."""
    wanted = _num_required(closure)
    if wanted and not kept.has_batch:
        raise ConfigError(f"the closure takes a batch, and the bundle has none ({_note(kept, 'batch')})")
    if not kept.has_batch or wanted == 0:
        yield from ((),) * steps
        return
    batch = kept.batch
    for _ in range(steps):
        yield (mapped(batch, lambda tensor: tensor.to(device)),)
        if batches is not None:
            batch = next(batches, None)
            if batch is None:
                return


def _loss(closure: Callable[..., Any], given: tuple[Any, ...]) -> torch.Tensor:
    try:
        loss = closure(*given)
    except Exception as error:
        raise ConfigError(f"the closure raised {type(error).__name__}: {error}") from error
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        raise ConfigError(f"the closure must return the loss as a tensor of one element, not {type(loss).__name__}")
    return loss
