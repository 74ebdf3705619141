"""Schedules made of schedules."""

from collections.abc import Callable

from steadystep.schedule.checks import whole
from steadystep.schedule.curves import Schedule, constant, cosine, warmup


def then(first: Schedule, boundary: int, second: Schedule) -> Schedule:
    """Play `first` before step `boundary`, and from there `second` from its own step 0.

    >>> schedule = then(warmup(2), 2, cosine(4))
    >>> [round(schedule(step), 3) for step in range(7)]
    [0.0, 0.5, 1.0, 0.854, 0.5, 0.146, 0.0]
    """
    start = whole("schedule.then", "boundary", boundary, least=0)
    return lambda step: first(step) if step < start else second(step - start)


def wsd(
    warmup_steps: int,
    stable_steps: int,
    decay_steps: int,
    floor: float = 0.0,
    *,
    start: float = 0.0,
    curve: Callable[[int, float], Schedule] = cosine,
) -> Schedule:
    """Warm up, stay, decay (Hu et al. 2024, MiniCPM): training can be prolonged by moving the decay.

    Args:
        warmup_steps: steps from `start` up to 1.
        stable_steps: steps at 1.
        decay_steps: steps from 1 down to `floor`, where it stays.
        floor: the lowest multiplier of the decay.
        start: the multiplier at step 0. transformers starts its WSD at the floor: `start=floor` does the same.
        curve: the shape of the decay: `cosine`, `linear`, `one_minus_sqrt`, or a function of (steps, floor).

    >>> schedule = wsd(2, 3, 4)
    >>> [round(schedule(step), 3) for step in range(10)]
    [0.0, 0.5, 1.0, 1.0, 1.0, 1.0, 0.854, 0.5, 0.146, 0.0]
    """
    rise = whole("schedule.wsd", "warmup_steps", warmup_steps, least=0)
    flat = whole("schedule.wsd", "stable_steps", stable_steps, least=0)
    fall = whole("schedule.wsd", "decay_steps", decay_steps, least=1)
    return then(warmup(rise, start), rise, then(constant(), flat, curve(fall, floor)))
