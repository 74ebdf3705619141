"""Learning rates as people write them into `group["lr"]`: from step to a multiple of the optimizer's own."""

import math
from collections.abc import Callable


def warmup_cosine(step: int) -> float:
    """100 steps up from zero, then a cosine to zero at 1,000: nanoGPT's get_lr."""
    if step < 100:
        return (step + 1) / 101
    return 0.5 * (1.0 + math.cos(math.pi * min((step - 100) / 900, 1.0)))


def warmup(step: int) -> float:
    return min((step + 1) / 200, 1.0)


def steps(step: int) -> float:
    """A third of it every 300 steps."""
    return 3.0 ** -(step // 300)


def triangular(step: int) -> float:
    """Up and down between 0.1 and 1 every 200 steps (Smith 2015)."""
    return 0.1 + 0.9 * abs((step % 200) / 100 - 1.0)


def restarts(step: int) -> float:
    """A cosine from 1 to 0.01 that begins again every 250 steps (SGDR)."""
    return 0.01 + 0.99 * 0.5 * (1.0 + math.cos(math.pi * (step % 250) / 250))


def one_cycle(step: int) -> float:
    """From 1/25 up over 30 % of 1,000 steps, then down to almost nothing."""
    if step < 300:
        return 0.04 + 0.96 * 0.5 * (1.0 - math.cos(math.pi * step / 300))
    return 1e-4 + 0.5 * (1.0 + math.cos(math.pi * min((step - 300) / 700, 1.0)))


BY_HAND: dict[str, Callable[[int], float]] = {
    "warmup": warmup,
    "warmup-cosine": warmup_cosine,
    "steps": steps,
    "triangular": triangular,
    "restarts": restarts,
    "one-cycle": one_cycle,
}
