"""ZClip (Kumar et al. 2025, arXiv:2504.02507): a z-score on the gradient norm.

z = (norm - mu) / sigma;  z > 2.5:  clipped to mu + 2.5 sigma / (z / 2.5);  mu and sigma² are moving averages of that
"""

import math
from typing import final

from steadystep.lab.bench.rules.fixed_clip import clip_factor
from steadystep.lab.bench.rules.rule import Sample, Verdict


@final
class ZClip:
    """25 steps only teach it; from then on it learns every value, a NaN too. Above `max_norm` it clips in any case."""

    def __init__(
        self, *, z_limit: float = 2.5, alpha: float = 0.97, warmup_steps: int = 25, max_norm: float = 1.0
    ) -> None:
        self._z_limit, self._alpha, self._warmup_steps, self._max_norm = z_limit, alpha, warmup_steps, max_norm
        self._first: list[float] = []
        self._mean = self._variance = 0.0

    def update(self, seen: Sample) -> Verdict:
        """An alarm is a z-score above the limit; the fixed limit clips without one."""
        if len(self._first) < self._warmup_steps:
            self._first.append(seen.norm)
            if len(self._first) == self._warmup_steps:
                self._mean = sum(self._first) / self._warmup_steps
                self._variance = sum((x - self._mean) ** 2 for x in self._first) / self._warmup_steps
            return Verdict(scale=clip_factor(seen.norm, self._max_norm))
        sigma = math.sqrt(self._variance) if self._variance == self._variance else math.nan
        z = (seen.norm - self._mean) / (sigma + 1e-6)
        alarm = z > self._z_limit
        kept = self._mean + self._z_limit * sigma / (z / self._z_limit) if alarm else seen.norm
        self._mean = self._alpha * self._mean + (1 - self._alpha) * kept
        self._variance = self._alpha * self._variance + (1 - self._alpha) * (kept - self._mean) ** 2
        limit = min(kept, self._max_norm) if alarm else self._max_norm
        return Verdict(alarm=alarm, scale=clip_factor(seen.norm, limit))
