"""SpikeDetection (Lightning): the loss at three times the mean of the last ten, or not finite; then it raises."""

import math
from collections import deque
from typing import final

from steadystep.lab.bench.rules.rule import FINE, Sample, Verdict


@final
class SpikeDetection:
    """Sees the loss after the update is done, so what it raises for has already landed."""

    def __init__(self, *, window: int = 10, relative: float = 2.0) -> None:
        self._losses: deque[float] = deque(maxlen=window)
        self._relative = relative

    def update(self, seen: Sample) -> Verdict:
        """A loss that improves is never a spike."""
        if self._is_spike(seen.loss):
            return Verdict(alarm=True, stop=True)
        self._losses.append(seen.loss)
        return FINE

    def _is_spike(self, loss: float) -> bool:
        if not math.isfinite(loss):
            return True
        if not self._losses or loss <= self._losses[-1]:
            return False
        mean = sum(self._losses) / len(self._losses)
        return abs(loss - mean) >= self._relative * abs(mean)
