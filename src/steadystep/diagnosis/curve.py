"""Reading a loss curve: where it began, where it is, how noisy it is, whether anything was learned."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Self, final

_BLOCKS = 8
_FEWEST = 32  # points
# Above ten the logarithms lie so close together that any level would be near one.
_MOST_CLASSES = 10
_COMMON_CLASSES = (100, 1000)
_DIFFERENCE_SIGMA = 0.954  # the median |difference| of neighbours in a normal sequence, in sigma


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """A loss curve in a few numbers. Levels are medians of eighths of the run."""

    start: float
    """The first loss or the median of the first few, whichever is lower: a run may explode within a few steps."""
    best: float
    late: float
    """The last eighth."""
    noise: float
    """Sigma between neighbouring points of the second half; a trend does not widen it."""
    settled: bool
    """The second half shows no trend."""
    lowest: float
    highest: float

    @classmethod
    def read(cls, first: Sequence[float], losses: Sequence[float]) -> Self | None:
        """None for a curve too short to say anything."""
        if len(losses) < _FEWEST:
            return None
        size = len(losses) / _BLOCKS
        levels = [median(losses[round(i * size) : round((i + 1) * size)]) for i in range(_BLOCKS)]
        half = losses[len(losses) // 2 :]
        noise = median(abs(b - a) for a, b in pairwise(half)) / _DIFFERENCE_SIGMA
        middle, late = sum(levels[4:6]) / 2, sum(levels[6:]) / 2
        return cls(
            start=min(first[0], median(first)),
            best=min(levels),
            late=levels[-1],
            noise=noise,
            settled=abs(late - middle) <= max(3.0 * noise / math.sqrt(size), 0.005 * abs(late)),
            lowest=min(losses),
            highest=max(losses),
        )

    @property
    def learned(self) -> bool:
        """It has been lower than at the start by more than half its noise, and by more than one per cent."""
        return self.start - self.best > max(0.5 * self.noise, 0.01 * abs(self.start))

    @property
    def near_best(self) -> bool:
        """It is about as low as it has ever been."""
        return self.late - self.best <= max(2.0 * self.noise, 0.05 * abs(self.best), 0.05 * (self.start - self.best))

    @property
    def rose(self) -> bool:
        """It is well above where it began."""
        return self.late - self.start > max(3.0 * self.noise, 0.1 * abs(self.start))


def guessing(level: float, *, precision: float) -> int | None:
    """The number of classes, up to ten or a common one, whose guessing costs about `level` nats."""
    if not 0.5 < level < 8.0:
        return None
    classes = round(math.exp(level))
    if classes > _MOST_CLASSES:
        classes = min(_COMMON_CLASSES, key=lambda common: abs(level - math.log(common)))
    excess = level - math.log(classes)
    return classes if classes >= 2 and -precision <= excess <= 0.006 * level + precision else None
