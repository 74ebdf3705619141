"""What a policy earned at each look, its best level, and how far it has fallen from there."""

import math
from collections.abc import Sequence
from itertools import pairwise
from statistics import fmean, stdev
from typing import final

from steadystep.rl import noise_of

_FEWEST = 6  # looks
SUSPECTED = 0.15
"""Of what was gained: a fall that is looked at more closely."""
_REST = 8  # looks at the best level, after which a policy has come to rest
_RISE = 10  # steps before a fall was certain: it may have begun by then
_DEEPER = 1.5  # times the deepest dip from which the policy came back


@final
class EarnedSeries:
    """What the policy earned at each look, and how far it has fallen from its best level.

    >>> series = EarnedSeries([[5 * i, min(0.1 * i, 0.8)] for i in range(12)])
    >>> series.best, round(series.gained, 2), series.best_step
    (0.8, 0.8, 45)
    """

    def __init__(self, looks: list[list[float]]) -> None:
        self.looks = looks
        """Step and score."""

    def _levels(self) -> list[tuple[float, float]]:
        """Means of two neighbours, one of which may be lucky, and the step of the second."""
        return [(0.5 * (a[1] + b[1]), b[0]) for a, b in pairwise(self.looks)]

    @property
    def best(self) -> float:
        """The best level."""
        return max(self._levels())[0]

    @property
    def best_step(self) -> int:
        """When it was reached first."""
        best = self.best
        return int(next(step for level, step in self._levels() if level == best))

    @property
    def gained(self) -> float:
        """From the first look to the best level."""
        return self.best - self.looks[0][1]

    @property
    def noise(self) -> float:
        """Of one look, from the differences of neighbours."""
        return noise_of([b[1] - a[1] for a, b in pairwise(self.looks)])

    @property
    def known(self) -> bool:
        """Whether enough was learned to lose some of it."""
        return len(self.looks) >= _FEWEST and self.gained > max(4.0 * self.noise, 1e-9 * abs(self.best))

    def fall(self, scores: Sequence[float], share: float) -> float:
        """In standard errors, where rollouts with these scores have lost that share of the gain; otherwise 0."""
        lost, error = self.best - fmean(scores), stdev(scores) / math.sqrt(len(scores))
        doubt = max(math.hypot(math.sqrt(0.5) * self.noise, error), 1e-12 * abs(self.best))
        return lost / doubt if lost > share * self.gained and doubt > 0.0 else 0.0

    def rest(self, since: int) -> int:
        """Looks in a row before `since` at the best level, but for one that may be unlucky."""
        floor = self.best - max(SUSPECTED * self.gained, 2.0 * self.noise)
        count, low = 0, 0
        for score in (score for at, score in reversed(self.looks) if at <= since - _RISE):
            low += score < floor
            if low > 1:
                break
            count += 1
        return count

    def patience(self, since: int) -> int:
        """Steps that a fall since `since` has to last: none from rest, and otherwise as many as came before it."""
        return 0 if self.rest(since) >= _REST else since - int(self.looks[0][0])

    def usual_dip(self, since: int) -> float:
        """What the policy may lose by itself: half as much again as in its deepest dip before `since`."""
        best, deepest = -math.inf, 0.0
        for level, at in self._levels():
            if at <= since - _RISE:
                best = max(best, level)
                deepest = max(deepest, best - level)
        return _DEEPER * deepest

    def level_at(self, step: int) -> float | None:
        """The mean of the looks next to `step`; None where there is none within ten steps."""
        near = [score for at, score in self.looks if abs(at - step) <= 6]
        return fmean(near) if near else None
