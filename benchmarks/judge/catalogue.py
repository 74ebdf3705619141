"""The faults of the study. Step, parameter and element depend on the seed, so that no single place is judged."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import final

import torch
from torch import nn

from steadystep.faults import (
    Fault,
    bad_gradient,
    bad_loss,
    creeping_lr,
    drifting_loss,
    flipped_bit,
    scaled_data,
    scaled_gradients,
    scaled_lr,
    since,
)
from steadystep.lab.tasks import Task

_BOTH = ("gpt", "clusters")


def first_step(seed: int) -> int:
    """When it begins: between 220 and 400."""
    return 220 + 20 * (seed % 10)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One row of the table."""

    make: Callable[[Task, int], Fault]
    tasks: tuple[str, ...] = _BOTH
    bar: float | None = 1.05
    """Held-out loss over the fault-free twin's; None where only the end of divergence counts."""


def _bad_gradient(task: Task, seed: int, value: float) -> Fault:
    name, element = _somewhere(task.model, seed)
    return bad_gradient(task.model, steps={first_step(seed)}, value=value, parameter=name, element=element)


def _five_nans(task: Task, seed: int) -> Fault:
    rng = torch.Generator().manual_seed(seed)
    return bad_loss(steps={int(step) for step in torch.randperm(560, generator=rng)[:5] + 20})


def _flipped_bit(task: Task, seed: int) -> Fault:
    name, element = _somewhere(task.model, seed)
    return flipped_bit(task.model, steps={first_step(seed)}, parameter=name, element=element)


def _somewhere(model: nn.Module, seed: int) -> tuple[str, int]:
    """A matrix and an element that matters: in a table of bytes of width 32 it belongs to the space, 32."""
    matrices = [(name, p) for name, p in model.named_parameters() if p.dim() > 1]
    name, parameter = matrices[seed % len(matrices)]
    return name, (1024 + seed % 10) % parameter.numel()


FAULTS: dict[str, Entry] = {
    "NaN in a gradient": Entry(make=lambda task, seed: _bad_gradient(task, seed, math.nan)),
    "Inf in a gradient": Entry(make=lambda task, seed: _bad_gradient(task, seed, math.inf)),
    "NaN loss": Entry(make=lambda task, seed: bad_loss(steps={first_step(seed)})),
    "five NaN batches": Entry(make=_five_nans),
    "inputs x1e20": Entry(
        make=lambda task, seed: scaled_data(steps={first_step(seed)}, factor=1e20), tasks=("clusters", "regression")
    ),
    "targets x1e6": Entry(
        make=lambda task, seed: scaled_data(steps={first_step(seed)}, factor=1e6, part=1), tasks=("regression",)
    ),
    "gradients x10": Entry(make=lambda task, seed: scaled_gradients(task.model, steps={first_step(seed)}, factor=10.0)),
    "gradients x1e4": Entry(make=lambda task, seed: scaled_gradients(task.model, steps={first_step(seed)}, factor=1e4)),
    "flipped bit": Entry(make=_flipped_bit),
    "LR x300 for 50": Entry(
        make=lambda task, seed: scaled_lr(
            task.optimizer, steps=range(first_step(seed), first_step(seed) + 50), factor=300.0
        ),
        bar=1.5,
    ),
    "LR x30 for good": Entry(
        make=lambda task, seed: scaled_lr(task.optimizer, steps=since(first_step(seed)), factor=30.0), bar=None
    ),
    "LR creeping": Entry(make=lambda task, seed: creeping_lr(task.optimizer, start=first_step(seed)), bar=None),
}
"""By the name shown in the table."""

SLOW: dict[str, Entry] = {
    "LR +1% a step": FAULTS["LR creeping"],
    "loss +.002 a step": Entry(make=lambda task, seed: drifting_loss(start=first_step(seed), per_step=0.002)),
}
"""What must be noticed before it has cost 0.2 nats."""

CURVES = ("gradients x10", "gradients x1e4", "LR x300 for 50", "LR x30 for good", "LR creeping")
"""The faults that a curve can show."""
