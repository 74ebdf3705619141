"""AdaGC (Wang et al. 2025, arXiv:2502.11034): each tensor against a moving average of its own clipped norms."""

import math
from typing import final

from steadystep.lab.bench.rules.fixed_clip import clip_factor
from steadystep.lab.bench.rules.rule import Sample, Verdict


@final
class AdaGC:
    """100 steps of a fixed clip teach each tensor its smallest norm; then 1.05 times its average is the limit."""

    def __init__(
        self, *, relative: float = 1.05, beta: float = 0.98, warmup_steps: int = 100, max_norm: float = 1.0
    ) -> None:
        self._relative, self._beta, self._warmup_steps, self._max_norm = relative, beta, warmup_steps, max_norm
        self._levels: list[float] = []
        self._seen = 0

    def update(self, seen: Sample) -> Verdict:
        """An alarm is a tensor that was clipped after the warm-up."""
        self._seen += 1
        if not self._levels:
            self._levels = [math.inf] * len(seen.norms)
        if self._seen <= self._warmup_steps:
            scale = clip_factor(seen.norm, self._max_norm)
            self._levels = [min(level, scale * x) for level, x in zip(self._levels, seen.norms, strict=True)]
            return Verdict(scale=scale)
        limits = [self._relative * level for level in self._levels]
        scales = [1.0 if x <= limit or x == 0.0 else limit / x for x, limit in zip(seen.norms, limits, strict=True)]
        self._levels = [
            self._beta * level + (1 - self._beta) * s * x
            for level, s, x in zip(self._levels, scales, seen.norms, strict=True)
        ]
        return Verdict(alarm=any(s < 1.0 for s in scales), scales=tuple(scales))
