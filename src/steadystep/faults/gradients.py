"""Gradients that come out wrong."""

import math
from collections.abc import Container
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn

from steadystep.errors import UnsupportedError
from steadystep.faults.fault import Fault
from steadystep.faults.hooks import hooked, trained
from steadystep.faults.pick import Place, pick_layer, put


def bad_gradient(
    model: nn.Module,
    *,
    steps: Container[int],
    value: float = math.nan,
    parameter: str | int | None = 0,
    element: int | None = 0,
    seed: int = 0,
) -> Fault:
    """One element of one parameter's gradient becomes `value`, NaN unless told otherwise.

    `parameter` and `element` are drawn from `seed` and the step where they are None. Under a loss scaler a finite
    `value` is divided by the scale like everything else.
    """
    place = Place(model, parameter=parameter, element=element, seed=seed)

    def around(step: int) -> AbstractContextManager[None]:
        target, number = place.at(step)

        def spoil(gradient: Tensor) -> Tensor:
            if gradient.layout != torch.strided:
                raise UnsupportedError("a single element goes bad in dense gradients only, this one is sparse")
            spoilt = gradient.clone(memory_format=torch.contiguous_format)
            put(spoilt, number, value)
            return spoilt

        return hooked([(target, spoil)])

    return Fault(name="bad-gradient", steps=steps, around=around)


def scaled_gradients(
    model: nn.Module, *, steps: Container[int], factor: float, layer: str | int | None = None
) -> Fault:
    """All gradients times `factor`, or those of one layer; -1 turns descent into ascent.

    >>> model = nn.Linear(1, 1)
    >>> fault = scaled_gradients(model, steps={500}, factor=10.0)
    >>> def slope(step):
    ...     model.zero_grad()
    ...     with fault.at(step):
    ...         fault.loss(step, model(torch.ones(1, 1)).sum()).backward()
    ...     return model.weight.grad.item()
    >>> slope(499), slope(500), slope(501)
    (1.0, 10.0, 1.0)
    """
    target = model if layer is None else pick_layer(model, layer)

    def scale(gradient: Tensor) -> Tensor:
        return gradient * factor

    return Fault(name="scaled-gradients", steps=steps, around=lambda _: hooked((p, scale) for p in trained(target)))
