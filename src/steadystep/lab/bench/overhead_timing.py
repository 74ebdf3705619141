"""Interleaved ratios: plain, candidate, plain, again and again, in one process.

Heap trimming is switched off (glibc): without that, whichever loop was built last lies on top of the heap, gives its
gradients back to the system after every step and takes thousands of page faults to get them again. A plain loop built
last is then 1.3 to 1.8 times slower than the same loop built first.
"""

import ctypes
import statistics
import time

from steadystep.lab.bench.overhead_steps import Step

WARM_STEPS = 60
"""Alone: the third copy of the state, at step 40, sets how often one is taken."""


def seconds(step: Step, repeats: int) -> float:
    """By the clock."""
    started = time.perf_counter()
    for _ in range(repeats):
        step()
    return time.perf_counter() - started


def ratios(plain: Step, candidate: Step, plain_again: Step, *, blocks: int, repeats: int) -> list[float]:
    """Of each block: the candidate over the mean of its two plain neighbours."""
    result = []
    for _ in range(blocks):
        before = seconds(plain, repeats)
        middle = seconds(candidate, repeats)
        after = seconds(plain_again, repeats)
        result.append(2 * middle / (before + after))
    return result


def compared(plain: tuple[Step, Step, Step], candidate: Step, *, blocks: int) -> dict[str, float]:
    """Median and quartiles of the ratios, and the noise: the same with a third plain loop for a candidate."""
    first, second, third = plain
    for step in (*plain, candidate):
        seconds(step, WARM_STEPS)
    repeats = max(2, int(0.05 / (seconds(first, 20) / 20)))
    found = ratios(first, candidate, second, blocks=blocks, repeats=repeats)
    noise = ratios(first, third, second, blocks=blocks, repeats=repeats)
    low, middle, high = statistics.quantiles(found, n=4)
    noise_low, noise_middle, noise_high = statistics.quantiles(noise, n=4)
    return {
        "ratio": middle,
        "low": low,
        "high": high,
        "noise": noise_middle,
        "noise_low": noise_low,
        "noise_high": noise_high,
        "plain_us": seconds(first, repeats) / repeats * 1e6,
    }


def never_trim_the_heap() -> bool:
    """M_TRIM_THRESHOLD (-1) and M_MMAP_THRESHOLD (-3) to 1 GiB; False where the C library has no mallopt."""
    try:
        libc = ctypes.CDLL(None)
        libc.mallopt(-1, 1 << 30)
        libc.mallopt(-3, 1 << 30)
    except (OSError, AttributeError):
        return False
    return True
