"""What a person wants to know of a run at a glance, kept small however long it runs."""

import math
from collections import Counter, deque
from collections.abc import Mapping
from typing import final

from steadystep.track.run import Incident
from steadystep.track.sink import StepRow

_WINDOW_S = 30.0  # over which the speed is measured
_POINTS = 64


@final
class Trail:
    """A whole curve in at most 64 points: each time it is full, neighbours become one, and the higher one stays."""

    def __init__(self) -> None:
        self.values: list[float] = []
        self._each = 1
        self._seen = 0

    def add(self, value: float) -> None:
        """One more."""
        if not math.isfinite(value):
            return
        if self._seen % self._each == 0:
            self.values.append(value)
        else:
            self.values[-1] = max(self.values[-1], value)
        self._seen += 1
        if len(self.values) > _POINTS:
            pairs = zip(self.values[::2], [*self.values[1::2], -math.inf], strict=False)
            self.values = [max(pair) for pair in pairs]
            self._each *= 2
            self._seen = len(self.values) * self._each


@final
class Progress:
    """Numbers of now, trails of then."""

    def __init__(self, total: int | None = None) -> None:
        self.total = total
        self.row: StepRow | None = None
        self.loss, self.norm, self.lr = Trail(), Trail(), Trail()
        self.validation: float | None = None
        self.best: tuple[float, int] | None = None
        self.incidents: Counter[str] = Counter()
        self.last: Incident | None = None
        self._times: deque[tuple[float, int]] = deque()

    def step(self, row: StepRow, now: float) -> None:
        """One more step, at that time."""
        self.row = row
        self.loss.add(row.loss)
        self.norm.add(row.grad_norm)
        self.lr.add(row.lr)
        self._times.append((now, row.step))
        while len(self._times) > 2 and self._times[1][0] < now - _WINDOW_S:
            self._times.popleft()

    def validated(self, step: int, metrics: Mapping[str, float]) -> None:
        """How it went."""
        self.validation = metrics.get("val_loss")
        if self.validation is not None and (self.best is None or self.validation < self.best[0]):
            self.best = (self.validation, step)

    def noticed(self, incident: Incident) -> None:
        """Counted by cause, unless it is routine."""
        if incident.severity != "info":
            self.incidents[incident.cause] += 1
            self.last = incident

    @property
    def done(self) -> int:
        """Steps so far, those before a resume too."""
        return 0 if self.row is None else self.row.step + 1

    @property
    def speed(self) -> float | None:
        """Steps per second lately."""
        if len(self._times) < 2 or self._times[-1][0] <= self._times[0][0]:
            return None
        (then, first), (now, last) = self._times[0], self._times[-1]
        return max(0.0, (last - first) / (now - then))

    @property
    def seconds_left(self) -> float | None:
        """Where the end is known."""
        speed = self.speed
        return None if self.total is None or not speed else max(0, self.total - self.done) / speed
