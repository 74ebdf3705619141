"""Batches, losses and weights that are not what they should be: bad data, a failing memory cell or link."""

import copy
import math
from collections.abc import Container, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn

from steadystep.errors import MisuseError, UnsupportedError
from steadystep.faults.fault import (
    Element,
    Fault,
    WithEves,
    draw,
    hooked,
    permutation,
    pick_layer,
    put,
    replaced,
    since,
    trained,
)


def scaled_data(*, steps: Container[int], factor: float, part: int | str = 0) -> Fault:
    """One part of the batch times `factor`: inputs are mostly part 0 and targets part 1, or named in a mapping."""

    def scale(values: Tensor) -> Tensor:
        return _real(values) * factor

    return Fault(name="scaled-data", steps=steps, change_batch=lambda _, batch: replaced(batch, part, scale))


def constant_data(*, steps: Container[int], value: float = 0.0, part: int | str = 0) -> Fault:
    """Every number in one part of the batch becomes `value`: a camera with its cap on."""

    def fill(values: Tensor) -> Tensor:
        if not values.is_floating_point() and not float(value).is_integer():
            raise MisuseError(f"a part of {values.dtype} cannot become {value}")
        return torch.full_like(values, value)

    return Fault(name="data-constant", steps=steps, change_batch=lambda _, batch: replaced(batch, part, fill))


def bad_input(
    *,
    steps: Container[int],
    value: float = math.nan,
    part: int | str = 0,
    element: int | None = None,
    seed: int = 0,
) -> Fault:
    """One number in one part of the batch becomes `value`; which one is drawn from `seed` and the step."""

    def change(step: int, values: Tensor) -> Tensor:
        spoilt = _real(values).clone(memory_format=torch.contiguous_format)
        put(spoilt, draw(seed, step, "element", values.numel()) if element is None else element, value)
        return spoilt

    return Fault(
        name="bad-input",
        steps=steps,
        change_batch=lambda step, batch: replaced(batch, part, lambda values: change(step, values)),
    )


def shuffled_labels(*, steps: Container[int], part: int | str = 1, seed: int = 0) -> Fault:
    """The rows of one part change places, so that inputs and labels no longer belong together.

    >>> fault = shuffled_labels(steps={500}, seed=1)
    >>> batch = torch.arange(5.0), torch.arange(5)
    >>> inputs, labels = fault.batch(500, batch)
    >>> torch.equal(inputs, batch[0]), torch.equal(labels, batch[1]), torch.equal(labels.sort()[0], batch[1])
    (True, False, True)
    """

    def change(step: int, labels: Tensor) -> Tensor:
        order = permutation(seed, step, "labels", len(labels)) if labels.dim() else torch.tensor([])
        return labels[order.to(labels.device)] if len(order) > 1 else labels

    def change_batch(step: int, batch: object) -> object:
        if isinstance(batch, Tensor):
            raise MisuseError("labels can be shuffled only where they are a separate part; this batch is one tensor")
        return replaced(batch, part, lambda labels: change(step, labels))

    return Fault(name="shuffled-labels", steps=steps, change_batch=change_batch)


def _real(values: Tensor) -> Tensor:
    if not values.is_floating_point():
        raise MisuseError(f"only a tensor of real numbers can be changed; this part of the batch is {values.dtype}")
    return values


def stale_batch(*, steps: Container[int]) -> Fault:
    """The batch of the step before comes again, and again for as long as the fault lasts.

    Ask for `fault.batch` at every step: the one before the first is kept, as a copy.

    >>> fault = stale_batch(steps={2, 3})
    >>> [fault.batch(step, f"batch {step}") for step in range(5)]
    ['batch 0', 'batch 1', 'batch 1', 'batch 1', 'batch 4']
    """
    kept: list[Any] = []

    def change(step: int, batch: Any) -> Any:
        if step not in steps:
            kept[:] = [copy.deepcopy(batch)]
            return batch
        if not kept:
            raise MisuseError(f"stale-batch at step {step}: no batch was seen at the previous step")
        return kept[0]

    return Fault(name="stale-batch", steps=WithEves(steps), change_batch=change)


def bad_loss(*, steps: Container[int], value: float = math.nan) -> Fault:
    """The loss is multiplied by `value`, NaN unless told otherwise, and the gradients with it."""
    return Fault(name="bad-loss", steps=steps, change_loss=lambda _, loss: loss * value)


def drifting_loss(*, start: int, per_step: float) -> Fault:
    """From `start` on the loss is `per_step` higher with every step; the gradients stay as they are."""
    return Fault(
        name="drifting-loss",
        steps=since(start),
        change_loss=lambda step, loss: loss + per_step * (step - start + 1),
    )


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
        raise UnsupportedError(f"bits can be flipped in real numbers of 2, 4 or 8 bytes; this is {tensor.dtype}")
    which = size * 8 - 2 if bit is None else bit
    if not 0 <= which < size * 8:
        raise UnsupportedError(f"no bit {which} in a number of {size} bytes")
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
        what = "no nn.ReLU after a layer with biases: set `layer`" if layer is None else f"no biases in {layer!r}"
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
