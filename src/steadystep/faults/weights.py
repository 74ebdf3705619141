"""Weights that change by themselves: what a failing memory cell or link does."""

import math
from collections.abc import Container, Iterator
from contextlib import contextmanager
from typing import Literal

import torch
from torch import nn

from steadystep.errors import MisuseError, UnsupportedError
from steadystep.faults.fault import Element, Fault, draw, hooked, pick_layer, put, trained

_WHOLE = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def flipped_bit(
    model: nn.Module,
    *,
    steps: Container[int],
    parameter: str | int | None = 0,
    element: int | None = 0,
    bit: int | Literal["any"] | None = None,
    seed: int = 0,
) -> Fault:
    """One bit of one weight flips before the step. The damage stays, as it would in earnest.

    The default is the top bit of the exponent: any weight below 2 becomes huge (or, from 1 on, infinite or NaN).
    `parameter` and `element` are drawn from `seed` and the step where they are None, and so is the bit with "any".
    """
    place = Element(model, parameter=parameter, element=element, seed=seed)

    @contextmanager
    def flipped(step: int) -> Iterator[None]:
        target, number = place.at(step)
        flip(target, number, draw(seed, step, "bit", 8 * target.element_size()) if bit == "any" else bit)
        yield

    return Fault(name="flipped-bit", steps=steps, around=flipped)


def bad_weight(
    model: nn.Module,
    *,
    steps: Container[int],
    value: float = math.nan,
    parameter: str | int | None = None,
    element: int | None = None,
    seed: int = 0,
) -> Fault:
    """One weight becomes `value` before the step, and stays it. What is None is drawn from `seed` and the step."""
    place = Element(model, parameter=parameter, element=element, seed=seed)

    @contextmanager
    def spoilt(step: int) -> Iterator[None]:
        target, number = place.at(step)
        put(target, number, value)
        yield

    return Fault(name="bad-weight", steps=steps, around=spoilt)


@torch.no_grad()
def flip(tensor: torch.Tensor, element: int, bit: int | None = None) -> None:
    """Flip one bit in place, counted from the lowest; None is the top bit of the exponent."""
    size = tensor.element_size()
    if not tensor.is_floating_point() or size not in _WHOLE:
        raise UnsupportedError(f"bits are flipped in real numbers of 2, 4 or 8 bytes, this is {tensor.dtype}")
    which = size * 8 - 2 if bit is None else bit
    if not 0 <= which < size * 8:
        raise UnsupportedError(f"there is no bit {which} in a number of {size} bytes")
    bits = tensor.data.view(_WHOLE[size])
    where = torch.unravel_index(torch.tensor(element % tensor.numel()), bits.shape)
    bits[where] ^= 1 << which


def frozen_layer(model: nn.Module, *, steps: Container[int], layer: str | int | None = 0, seed: int = 0) -> Fault:
    """A layer that no longer learns: its gradients are zero, and its weights are put back after the update.

    So momentum and weight decay do not move it either. `layer` is drawn from `seed` where it is None.
    """
    target = _layer(model, layer, seed)

    @contextmanager
    def around(step: int) -> Iterator[None]:
        weights = trained(target)
        before = [weight.detach().clone() for weight in weights]
        try:
            with hooked((weight, torch.zeros_like) for weight in weights):
                yield
        finally:
            with torch.no_grad():
                for weight, old in zip(weights, before, strict=True):
                    weight.copy_(old)

    return Fault(name="frozen-layer", steps=steps, around=around)


def zeroed_layer(model: nn.Module, *, steps: Container[int], layer: str | int | None = 0, seed: int = 0) -> Fault:
    """All weights of a layer become zero before the step; what training makes of them afterwards is its own."""
    target = _layer(model, layer, seed)

    @contextmanager
    def around(step: int) -> Iterator[None]:
        with torch.no_grad():
            for weight in trained(target):
                weight.zero_()
        yield

    return Fault(name="zeroed-layer", steps=steps, around=around)


def dead_relus(model: nn.Module, *, steps: Container[int], bias: float = -1e3, layer: str | None = None) -> Fault:
    """The biases before each `nn.ReLU` become `bias` before the step: no unit fires and none has a gradient.

    `layer` names a module whose biases are meant, for models that call a ReLU as a function.
    """
    biases = _biases(model) if layer is None else _own_biases(pick_layer(model, layer))
    if not biases:
        what = "no nn.ReLU behind a layer with biases: name a `layer`" if layer is None else f"no biases in {layer!r}"
        raise MisuseError(f"dead-relus: {what}")

    @contextmanager
    def around(step: int) -> Iterator[None]:
        with torch.no_grad():
            for values in biases:
                values.fill_(bias)
        yield

    return Fault(name="dead-relus", steps=steps, around=around)


def _layer(model: nn.Module, layer: str | int | None, seed: int) -> nn.Module:
    if layer is not None:
        return pick_layer(model, layer)
    owners = [m for m in model.modules() if any(p.requires_grad for p in m.parameters(recurse=False))]
    if not owners:
        raise MisuseError("the model has no trainable parameter")
    return owners[draw(seed, 0, "layer", len(owners))]


def _biases(model: nn.Module) -> list[nn.Parameter]:
    """Of the layer nearest before each ReLU, in the order in which the model was built."""
    found: dict[int, nn.Parameter] = {}
    last: list[nn.Parameter] = []
    for module in model.modules():
        if isinstance(module, nn.ReLU):
            found |= {id(bias): bias for bias in last}
        elif any(True for _ in module.parameters(recurse=False)):
            last = [p for name, p in module.named_parameters(recurse=False) if name == "bias"]
    return list(found.values())


def _own_biases(module: nn.Module) -> list[nn.Parameter]:
    return [p for name, p in module.named_parameters() if name.rpartition(".")[2] == "bias"]
