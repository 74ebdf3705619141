"""Batches that are not what they should be."""

import copy
import math
from collections.abc import Container
from typing import Any

import torch
from torch import Tensor

from steadystep.errors import MisuseError
from steadystep.faults.fault import Fault, WithEves, draw, permutation, put, replaced, since


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
            raise MisuseError("labels can be shuffled where they are a part of their own, this batch is one tensor")
        return replaced(batch, part, lambda labels: change(step, labels))

    return Fault(name="shuffled-labels", steps=steps, change_batch=change_batch)


def _real(values: Tensor) -> Tensor:
    if not values.is_floating_point():
        raise MisuseError(
            f"only a tensor of real numbers can be scaled or go bad, this part of the batch is {values.dtype}"
        )
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
            raise MisuseError(f"stale-batch at step {step}: no batch was seen at the step before")
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
