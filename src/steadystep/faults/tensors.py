"""Batches, losses and weights that are not what they should be: bad data, a failing memory cell or link."""

import copy
import math
from collections.abc import Container, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from steadystep.errors import MisuseError
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
    trained,
)
from steadystep.faults.options import layer_of, own_biases, relu_biases


def scaled_data(*, steps: Container[int], factor: float, part: int | str = 0) -> Fault:
    """Multiply one part of the batch by `factor`.

    Args:
        steps: the steps it happens at.
        factor: factor on the values.
        part: position or key of the part: inputs are mostly 0 and targets 1.
    """

    def scale(values: Tensor) -> Tensor:
        return _real(values) * factor

    return Fault(name="scaled-data", steps=steps, change_batch=lambda _, batch: replaced(batch, part, scale))


def constant_data(*, steps: Container[int], value: float = 0.0, part: int | str = 0) -> Fault:
    """Set every number in one part of the batch to `value`, like a camera with its cap on.

    Args:
        steps: the steps it happens at.
        value: the constant.
        part: position or key of the part.
    """

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
    """Set one number in one part of the batch to `value`.

    Args:
        steps: the steps it happens at.
        value: NaN by default.
        part: position or key of the part.
        element: position in the part; None draws it from `seed` and the step.
        seed: seed of the draws.
    """

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
    """Permute the rows of one part of the batch, so that inputs and labels no longer match.

    Args:
        steps: the steps it happens at.
        part: position or key of the part.
        seed: seed of the permutation.

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
    """Return the batch of the step before the fault again, for as long as it lasts.

    Call `fault.batch` at every step: a copy of the last batch before the fault is kept.

    Args:
        steps: the steps it happens at.

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


def bad_weight(
    model: nn.Module,
    *,
    steps: Container[int],
    value: float = math.nan,
    parameter: str | int | None = None,
    element: int | None = None,
    seed: int = 0,
) -> Fault:
    """Set one weight to `value` before the step; it stays.

    Args:
        model: the model.
        steps: the steps it happens at.
        value: NaN by default.
        parameter: name or position; None draws it from `seed` and the step.
        element: position in the parameter; None draws it.
        seed: seed of the draws.
    """
    place = Element(model, parameter=parameter, element=element, seed=seed)

    @contextmanager
    def spoilt(step: int) -> Iterator[None]:
        target, number = place.at(step)
        put(target, number, value)
        yield

    return Fault(name="bad-weight", steps=steps, around=spoilt)


def frozen_layer(model: nn.Module, *, steps: Container[int], layer: str | int | None = 0, seed: int = 0) -> Fault:
    """Stop a layer from learning: its gradients are zero, and its weights are restored after the update.

    Momentum and weight decay do not move it either.

    Args:
        model: the model.
        steps: the steps it happens at.
        layer: name or position; None draws it from `seed`.
        seed: seed of the draw.
    """
    target = layer_of(model, layer, seed)

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
    """Set all weights of a layer to zero before the step; training continues from there.

    Args:
        model: the model.
        steps: the steps it happens at.
        layer: name or position; None draws it from `seed`.
        seed: seed of the draw.
    """
    target = layer_of(model, layer, seed)

    @contextmanager
    def around(step: int) -> Iterator[None]:
        with torch.no_grad():
            for weight in trained(target):
                weight.zero_()
        yield

    return Fault(name="zeroed-layer", steps=steps, around=around)


def dead_relus(model: nn.Module, *, steps: Container[int], bias: float = -1e3, layer: str | None = None) -> Fault:
    """Set the biases before each `nn.ReLU` to `bias` before the step: no unit fires and none has a gradient.

    Args:
        model: the model.
        steps: the steps it happens at.
        bias: the new bias.
        layer: name of a module whose biases are set, for models that call ReLU as a function.
    """
    biases = relu_biases(model) if layer is None else own_biases(pick_layer(model, layer))
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
