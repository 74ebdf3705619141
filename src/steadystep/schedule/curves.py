"""The shapes a learning rate follows; each starts at its own step 0, stays in [0, 1] and holds its last value.

A step before 0 counts as 0. What is called `floor` is the lowest multiplier: 0.1 is a tenth of the base rate.
"""

import math
from collections.abc import Callable

from steadystep._utils.numbers import real, whole
from steadystep.errors import ConfigError

Schedule = Callable[[int], float]
"""A function from the number of updates, from 0, to a multiplier of the base learning rate."""


def constant(value: float = 1.0) -> Schedule:
    """Return the same multiplier at every step.

    Args:
        value: the multiplier.

    >>> constant()(10_000)
    1.0
    """
    held = checked_share("schedule.constant: value", value)
    return lambda step: held


def warmup(steps: int, start: float = 0.0) -> Schedule:
    """Rise from `start` to 1 along a straight line.

    Args:
        steps: step at which 1 is reached; 0 is no warmup.
        start: multiplier at step 0. With 0 the first update has a learning rate of zero, as in transformers.

    >>> [warmup(4)(step) for step in (0, 1, 4, 9)]
    [0.0, 0.25, 1.0, 1.0]
    """
    total = whole("schedule.warmup: steps", steps, least=0)
    low = checked_share("schedule.warmup: start", start)
    return (lambda step: _from(low, _done(step, total))) if total else constant()


def linear(total: int, floor: float = 0.0) -> Schedule:
    """Decay from 1 to `floor` along a straight line.

    Args:
        total: step at which `floor` is reached.
        floor: the lowest multiplier.

    >>> [linear(4)(step) for step in (0, 1, 4, 9)]
    [1.0, 0.75, 0.0, 0.0]
    """
    end, low = _checked("linear", total, floor)
    return lambda step: _from(low, 1.0 - _done(step, end))


def cosine(total: int, floor: float = 0.0) -> Schedule:
    """Decay from 1 to `floor` along half a cosine (Loshchilov & Hutter 2017, one cycle).

    Args:
        total: step at which `floor` is reached.
        floor: the lowest multiplier.

    >>> [round(cosine(4)(step), 3) for step in (0, 1, 2, 4, 9)]
    [1.0, 0.854, 0.5, 0.0, 0.0]
    """
    end, low = _checked("cosine", total, floor)
    return lambda step: _from(low, half_cosine(_done(step, end)))


def cosine_restarts(period: int, mult: int = 1, floor: float = 0.0) -> Schedule:
    """Repeat half a cosine, each cycle `mult` times as long as the one before (SGDR, Loshchilov & Hutter 2017).

    Continues forever, as torch's CosineAnnealingWarmRestarts does; join it with `then` to end it.

    Args:
        period: length of the first cycle.
        mult: factor from the length of one cycle to the next.
        floor: the lowest multiplier.

    >>> [round(cosine_restarts(2, mult=2)(step), 3) for step in range(7)]
    [1.0, 0.5, 1.0, 0.854, 0.5, 0.146, 1.0]
    """
    first, low = _checked("cosine_restarts", period, floor, key="period")
    growth = whole("schedule.cosine_restarts: mult", mult, least=1)

    def at(step: int) -> float:
        passed, length = max(step, 0), first
        if growth == 1:
            passed %= length
        while passed >= length:
            passed, length = passed - length, length * growth
        return _from(low, half_cosine(passed / length))

    return at


def inverse_sqrt(timescale: int = 10_000, floor: float = 0.0) -> Schedule:
    """Decay as sqrt(timescale / (timescale + step)) (Vaswani et al. 2017).

    Args:
        timescale: the warmup's length gives the paper's curve, after a warmup.
        floor: the lowest multiplier.

    >>> [inverse_sqrt(100)(step) for step in (0, 300)]
    [1.0, 0.5]
    """
    scale, low = _checked("inverse_sqrt", timescale, floor, key="timescale")
    return lambda step: max(low, math.sqrt(scale / (scale + max(step, 0))))


def polynomial(total: int, power: float = 1.0, floor: float = 0.0) -> Schedule:
    """Decay from 1 to `floor` as (1 - step / total) ** power.

    Args:
        total: step at which `floor` is reached.
        power: 1 is `linear`.
        floor: the lowest multiplier.

    >>> [polynomial(4, power=2.0)(step) for step in (0, 2, 4)]
    [1.0, 0.25, 0.0]
    """
    end, low = _checked("polynomial", total, floor)
    exponent = real("schedule.polynomial: power", power, above=0.0)
    return lambda step: _from(low, (1.0 - _done(step, end)) ** exponent)


def one_minus_sqrt(total: int, floor: float = 0.0) -> Schedule:
    """Decay from 1 to `floor` as 1 - sqrt(step / total): the best cooldown in Hägele et al. 2024.

    Args:
        total: step at which `floor` is reached.
        floor: the lowest multiplier.

    >>> [one_minus_sqrt(4)(step) for step in (0, 1, 4)]
    [1.0, 0.5, 0.0]
    """
    end, low = _checked("one_minus_sqrt", total, floor)
    return lambda step: _from(low, 1.0 - math.sqrt(_done(step, end)))


def step_decay(every: int, gamma: float = 0.1, floor: float = 0.0) -> Schedule:
    """Multiply by `gamma` after each `every` steps, like torch's StepLR.

    Args:
        every: steps between two cuts, in updates: for "every 30 epochs" pass `30 * updates_per_epoch`.
        gamma: factor of each cut.
        floor: the lowest multiplier.

    >>> [step_decay(2, gamma=0.5)(step) for step in range(5)]
    [1.0, 1.0, 0.5, 0.5, 0.25]
    """
    length, low = _checked("step_decay", every, floor, key="every")
    factor = shrink("schedule.step_decay: gamma", gamma)
    return lambda step: max(low, factor ** (max(step, 0) // length))


def exponential(gamma: float, floor: float = 0.0) -> Schedule:
    """Decay as `gamma` ** step, like torch's ExponentialLR. Steps are updates, not epochs.

    Args:
        gamma: factor per update.
        floor: the lowest multiplier.

    >>> [exponential(0.5)(step) for step in range(3)]
    [1.0, 0.5, 0.25]
    """
    factor = shrink("schedule.exponential: gamma", gamma)
    low = checked_share("schedule.exponential: floor", floor)
    return lambda step: max(low, factor ** max(step, 0))


def half_cosine(done: float) -> float:
    """From 1 at `done` = 0 to 0 at `done` = 1."""
    return 0.5 * (1.0 + math.cos(math.pi * done))


def _checked(name: str, total: object, floor: object, *, key: str = "total") -> tuple[int, float]:
    where = f"schedule.{name}"
    return whole(f"{where}: {key}", total, least=1), checked_share(f"{where}: floor", floor)


def _done(step: int, total: int) -> float:
    return min(max(step / total, 0.0), 1.0)


def _from(low: float, height: float) -> float:
    return low + (1.0 - low) * height


def then(first: Schedule, boundary: int, second: Schedule) -> Schedule:
    """Use `first` before step `boundary`, and from there `second`, counted from its own step 0.

    Args:
        first: schedule before the boundary.
        boundary: first step of `second`.
        second: schedule from the boundary on.

    >>> schedule = then(warmup(2), 2, cosine(4))
    >>> [round(schedule(step), 3) for step in range(7)]
    [0.0, 0.5, 1.0, 0.854, 0.5, 0.146, 0.0]
    """
    start = whole("schedule.then: boundary", boundary, least=0)
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
    """Warm up, stay at 1, decay (Hu et al. 2024, MiniCPM). Training can be extended by moving the decay.

    Args:
        warmup_steps: steps from `start` up to 1.
        stable_steps: steps at 1.
        decay_steps: steps from 1 down to `floor`.
        floor: the lowest multiplier of the decay.
        start: multiplier at step 0. transformers starts its WSD at the floor: `start=floor` does the same.
        curve: shape of the decay: `cosine`, `linear`, `one_minus_sqrt`, or a function of (steps, floor).

    >>> schedule = wsd(2, 3, 4)
    >>> [round(schedule(step), 3) for step in range(10)]
    [0.0, 0.5, 1.0, 1.0, 1.0, 1.0, 0.854, 0.5, 0.146, 0.0]
    """
    rise = whole("schedule.wsd: warmup_steps", warmup_steps, least=0)
    flat = whole("schedule.wsd: stable_steps", stable_steps, least=0)
    fall = whole("schedule.wsd: decay_steps", decay_steps, least=1)
    return then(warmup(rise, start), rise, then(constant(), flat, curve(fall, floor)))


def checked_share(key: str, value: object) -> float:
    """A fraction of the base learning rate, 0 and 1 included."""
    number = real(key, value)
    if not 0.0 <= number <= 1.0:
        raise ConfigError(
            f"{key} = {value!r}: must be from 0 to 1; it is a fraction of the base learning rate, not a learning rate"
        )
    return number


def shrink(key: str, value: object) -> float:
    """A factor that makes smaller or leaves alone."""
    number = real(key, value, above=0.0)
    if number > 1.0:
        raise ConfigError(f"{key} = {value!r}: must be at most 1, a schedule does not exceed its base learning rate")
    return number
