"""A small model on the test device, and the loops it is trained in."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import steadystep
from tests.device import notgpu

Batch = tuple[Tensor, Tensor]
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def seed(number: int = 0) -> None:
    """Of the host and of the device."""
    torch.manual_seed(number)
    torch.get_device_module(notgpu.DEVICE).manual_seed(number)


def net(dropout: float = 0.1) -> nn.Module:
    """An embedding, buffers that change and random numbers of the device."""
    seed()
    layers = (nn.Embedding(20, 8), nn.Flatten(), nn.Linear(32, 16), nn.BatchNorm1d(16), nn.Dropout(dropout))
    return nn.Sequential(*layers, nn.GELU(), nn.Linear(16, 20)).to(notgpu.DEVICE)


def data(count: int, *, start: int = 1) -> list[Batch]:
    random = torch.Generator().manual_seed(start)
    made = [torch.randint(0, 20, (8, 5), generator=random).to(notgpu.DEVICE) for _ in range(count)]
    return [(tokens[:, :4], tokens[:, 0]) for tokens in made]


def closure_of(model: nn.Module) -> Callable[[Batch], Tensor]:
    return lambda batch: nn.functional.cross_entropy(model(batch[0]), batch[1])


def plain_step(
    model: nn.Module, optimizer: Optimizer, scaler: torch.amp.GradScaler, precision: str = "fp32"
) -> Callable[[Batch], Any]:
    """As people write it, with their own scaler."""
    closure = closure_of(model)

    def step(batch: Batch) -> None:
        with torch.autocast(notgpu.NAME, dtype=_DTYPES[precision], enabled=precision != "fp32"):
            loss = closure(batch)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    return step


def scaler_for(precision: str) -> torch.amp.GradScaler:
    return torch.amp.GradScaler(notgpu.NAME, enabled=precision == "fp16")


def stepper(kind: str, model: nn.Module, optimizer: Optimizer, precision: str) -> Callable[[Batch], Any]:
    """One step of a plain, a watched or a guarded loop."""
    if kind == "guard":
        guard = steadystep.Guard(model, optimizer, config={"training": {"mixed_precision": precision}})
        closure = closure_of(model)
        return lambda batch: guard.step(closure, batch=batch)
    scaler = scaler_for(precision)
    if kind == "watch":
        steadystep.watch(model, optimizer, scaler=scaler if precision == "fp16" else None)
    return plain_step(model, optimizer, scaler, precision)
