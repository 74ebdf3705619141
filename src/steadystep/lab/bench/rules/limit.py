"""Rules that look into tensors, as alarms: a measured ratio above a number. What they do is in the files beside."""

from collections.abc import Callable
from typing import final

from steadystep.lab.bench.rules.rule import FINE, Sample, Verdict


@final
class Above:
    """An alarm wherever `measure` exceeds `limit`; it is then that the rule acts."""

    def __init__(self, measure: Callable[[Sample], float], limit: float) -> None:
        self._measure, self._limit = measure, limit

    def update(self, seen: Sample) -> Verdict:
        """Learns nothing."""
        return Verdict(alarm=True) if self._measure(seen) > self._limit else FINE
