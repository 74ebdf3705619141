"""AutoClip (Seetharaman et al. 2020, arXiv:2007.14469): clip to the tenth percentile of all norms so far."""

import math
from bisect import insort
from typing import final

from steadystep.lab.bench.rules.fixed_clip import clip_factor
from steadystep.lab.bench.rules.rule import Sample, Verdict


@final
class AutoClip:
    """This step's norm belongs to the history; once that holds a NaN, all limits and gradients are NaN."""

    def __init__(self, percentile: float = 10.0) -> None:
        self._share = percentile / 100.0
        self._sorted: list[float] = []
        self._poisoned = False

    def update(self, seen: Sample) -> Verdict:
        """An alarm is a norm that was clipped."""
        if math.isnan(seen.norm):
            self._poisoned = True
        else:
            insort(self._sorted, seen.norm)
        limit = math.nan if self._poisoned else self._percentile()
        return Verdict(alarm=seen.norm > limit, scale=clip_factor(seen.norm, limit))

    def _percentile(self) -> float:
        place = self._share * (len(self._sorted) - 1)
        below, above = self._sorted[math.floor(place)], self._sorted[math.ceil(place)]
        return below if below == above else below + (place - math.floor(place)) * (above - below)
