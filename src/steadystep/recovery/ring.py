"""Which of a few remembered states to give up for the next one, so that their ages stay spread."""

import math
from collections.abc import Sequence


def to_replace(steps: Sequence[int], *, now: int, interval: int) -> int:
    """Position in `steps` (oldest first) of the state to overwrite at step `now`.

    Wanted ages are 1, 4, 16, … intervals: a young state loses little, an old one lies before the first sign of
    trouble. The newest is kept: it is on its way to being trusted. A single slot is always replaced.

    >>> to_replace([0, 100, 120], now=140, interval=20)
    1
    """
    if len(steps) == 1:
        return 0

    def misfit(without: int) -> float:
        ages = [now - step for i, step in enumerate(steps) if i != without]
        return sum(abs(math.log(max(age, 1) / (interval * 4.0**i))) for i, age in enumerate(reversed(ages)))

    return min(range(len(steps) - 1), key=misfit)
