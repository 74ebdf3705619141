"""Slow, obvious twins of the schedules: exact fractions where there are any, a walk from step 0 where there is one.

From the formulas: linear, cosine, restarts (SGDR, Loshchilov & Hutter 2017), inverse square root (Vaswani et al. 2017),
warmup-stable-decay (Hu et al. 2024).
"""

import math
from collections.abc import Callable
from fractions import Fraction

Curve = Callable[[int], float]


def after_warmup(step: int, warmup: int, start: float, curve: Curve) -> float:
    if step >= warmup:
        return curve(step - warmup)
    return float(Fraction(start) + (1 - Fraction(start)) * Fraction(step, warmup))


def lifted(height: float | Fraction, floor: float) -> float:
    return float(Fraction(floor) + (1 - Fraction(floor)) * Fraction(height))


def linear(step: int, total: int, floor: float) -> float:
    return lifted(Fraction(max(total - step, 0), total), floor)


def cosine(step: int, total: int, floor: float) -> float:
    half_angle = math.pi / 2 * (min(step, total) / total)
    return lifted(math.cos(half_angle) ** 2, floor)


def polynomial(step: int, total: int, power: float, floor: float) -> float:
    return lifted(float(Fraction(max(total - step, 0), total)) ** power, floor)


def one_minus_sqrt(step: int, total: int, floor: float) -> float:
    return lifted(1 - math.sqrt(Fraction(min(step, total), total)), floor)


def inverse_sqrt(step: int, timescale: int, floor: float) -> float:
    return max(floor, float(1 + Fraction(step, timescale)) ** -0.5)


def restarts(step: int, period: int, mult: int, floor: float) -> float:
    position, length = 0, period
    for _ in range(step):
        position += 1
        if position == length:
            position, length = 0, length * mult
    return cosine(position, length, floor)


def equal_cycles(step: int, total: int, num_cycles: int, floor: float) -> float:
    """`num_cycles` cosines of the same, not necessarily whole, length in `total` steps."""
    if step >= total:
        return floor
    length, position = Fraction(total, num_cycles), Fraction(step)
    while position >= length:
        position -= length
    return lifted(math.cos(math.pi / 2 * float(position / length)) ** 2, floor)


def step_decay(step: int, every: int, gamma: float, floor: float) -> float:
    rate = 1.0
    for passed in range(1, step + 1):
        if passed % every == 0:
            rate *= gamma
    return max(floor, rate)


def exponential(step: int, gamma: float, floor: float) -> float:
    return step_decay(step, 1, gamma, floor)
