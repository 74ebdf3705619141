"""SkipStep (OLMo-core 3.0): an update is multiplied by zero when loss or norm is six deviations above the last 128."""

import math
from collections import deque
from collections.abc import Sequence
from typing import final

from steadystep.lab.bench.rules.rule import FINE, Sample, Verdict


@final
class SkipStep:
    """What it judges enters the window of the steps after it, a NaN too: then nothing passes until that has left."""

    def __init__(self, *, window: int = 128, sigmas: float = 6.0) -> None:
        self._losses: deque[float] = deque(maxlen=window)
        self._norms: deque[float] = deque(maxlen=window)
        self._needed, self._sigmas = window // 2, sigmas

    def update(self, seen: Sample) -> Verdict:
        """Silent until half a window is known, this step included."""
        known = len(self._losses) + 1 >= self._needed
        usual = not known or (self._usual(seen.loss, self._losses) and self._usual(seen.norm, self._norms))
        self._losses.append(seen.loss)
        self._norms.append(seen.norm)
        return FINE if usual else Verdict(alarm=True, scale=0.0)

    def _usual(self, value: float, past: Sequence[float]) -> bool:
        mean = sum(past) / len(past)
        deviation = math.sqrt(sum((x - mean) ** 2 for x in past) / (len(past) - 1)) if mean - mean == 0 else math.nan
        # why: asked in this way NaN is never usual, as in the original
        return value - mean <= self._sigmas * deviation
