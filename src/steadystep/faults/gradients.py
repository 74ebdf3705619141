"""Gradients that come out wrong, through hooks that last for one step."""

import math
from collections.abc import Container, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from steadystep.faults.fault import Fault
from steadystep.faults.pick import pick


def bad_gradient(
    model: nn.Module,
    *,
    steps: Container[int],
    value: float = math.nan,
    parameter: str | int = 0,
    element: int = 0,
) -> Fault:
    """One element of one parameter's gradient becomes `value`, NaN unless told otherwise."""
    _, target = pick(model, parameter)

    def spoil(gradient: Tensor) -> Tensor:
        spoilt = gradient.clone(memory_format=torch.contiguous_format)
        spoilt.view(-1)[element] = value
        return spoilt

    @contextmanager
    def hooked(step: int) -> Iterator[None]:
        handle = target.register_hook(spoil)  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            handle.remove()

    return Fault(name="bad-gradient", steps=steps, around=hooked)


def scaled_gradients(model: nn.Module, *, steps: Container[int], factor: float) -> Fault:
    """All gradients times `factor`."""

    def scale(gradient: Tensor) -> Tensor:
        return gradient * factor

    @contextmanager
    def hooked(step: int) -> Iterator[None]:
        trained = [p for p in model.parameters() if p.requires_grad]
        handles = [p.register_hook(scale) for p in trained]  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    return Fault(name="scaled-gradients", steps=steps, around=hooked)
