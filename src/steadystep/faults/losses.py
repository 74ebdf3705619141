"""Losses that are not what they should be."""

import math
from collections.abc import Container

from steadystep.faults.fault import Fault
from steadystep.faults.since import since


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
