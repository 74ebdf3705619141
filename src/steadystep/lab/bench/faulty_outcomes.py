"""What the rows say together: which runs were harmed, by how much, and how long before the damage somebody spoke."""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, Literal, final

from steadystep.lab.bench.faulty_run import EVERY, NATS, SCORED, TRIALS
from steadystep.lab.bench.study import Row

AT_LEAST = 1.01
"""Within one per cent is never harm, however little the twins differ."""
SLOW_COST = 0.2
"""Nats that a slow divergence may cost before it is too late."""


@final
class Twins:
    """Runs without a fault, to compare with."""

    def __init__(self, rows: Iterable[Row]) -> None:
        self._clean: dict[Any, Row] = {}
        missing: list[Row] = []
        for row in rows:
            if row["arm"] == "clean":
                self._clean[self._key(row)] = row
            elif row["arm"].startswith("missing"):
                missing.append(row)
        self._limits: dict[str, float] = defaultdict(lambda: AT_LEAST)
        for row in missing:
            ratio = self.ratio(row)
            if ratio == ratio:
                self._limits[row["task"]] = max(self._limits[row["task"]], ratio)

    def has(self, row: Row) -> bool:
        """Whether there is a run without a fault to compare this one with."""
        return self._key(row) in self._clean

    def ratio(self, row: Row) -> float:
        """Its score over that of the same run without the fault; NaN where it has none."""
        clean = self._clean.get(self._key(row))
        return math.nan if clean is None else float(row["score"]) / float(clean["score"])

    def limit(self, task: str) -> float:
        """The worst of the clean twins that miss one batch, of all seeds of the task; 1.01 at least."""
        return self._limits[task]

    def fine(self, row: Row) -> bool:
        """It came through: to its last step, finite, and no worse than a clean run that misses a batch."""
        return self.ratio(row) <= self.limit(row["task"])  # NaN is not

    def fine_but_for_lost(self, row: Row) -> bool:
        """As `fine`, beside what the twin was when it had seen as few updates: the lost steps are all it lacks."""
        clean = self._clean.get(self._key(row))
        if clean is None:
            return False
        last = row["num_steps"] - 1 - row["lost"]
        then = [loss for step, loss in clean["curve"].items() if last - SCORED * EVERY < int(step) <= last]
        if not then:  # before the curve begins
            return False
        baseline: float = max(sum(then) / len(then), float(clean["score"]))
        return float(row["score"]) <= self.limit(row["task"]) * baseline

    def lead(self, row: Row, noticed: int | None, *, than: Literal["best", "twin"]) -> float | None:
        """Steps between a word and 0.2 nats of damage; negative when it came too late, None when there was no damage.

        Damage is how far the held-out loss is above its own best so far, or above the twin's at the same step, which
        also counts what the twin has learned meanwhile.
        """
        clean = self._clean.get(self._key(row))
        if clean is None or row["task"] not in NATS:
            return None
        best = math.inf
        for step, loss in sorted((int(step), loss) for step, loss in row["curve"].items()):
            best = min(best, loss)
            baseline = best if than == "best" else clean["curve"].get(str(step), math.inf)
            if not loss - baseline < SLOW_COST:
                return float(step - (row["num_steps"] if noticed is None else noticed))
        return None

    @staticmethod
    def _key(row: Row) -> tuple[Any, ...]:
        return row["task"], row["seed"], row["num_steps"], row["precision"]


def is_slow(row: Row) -> bool:
    """One of the creeping faults."""
    return bool(row["trial"]) and TRIALS[row["trial"]].slow


def identity(row: Row) -> tuple[Any, ...]:
    """The same broken run in every arm."""
    return row["trial"], row["task"], row["seed"], row["num_steps"]


def median(values: Sequence[float]) -> float:
    """NaN counts as the largest; of nothing it is NaN."""
    ordered = sorted(values, key=lambda value: (value != value, value))
    return ordered[(len(ordered) - 1) // 2] if ordered else math.nan


def worst(values: Sequence[float]) -> float:
    """NaN, if there is one."""
    return max(values, key=lambda value: (value != value, value), default=math.nan)
