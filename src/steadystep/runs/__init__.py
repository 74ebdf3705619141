"""Reads any run, ours or another tool's, and diagnoses its curves. No torch needed."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from steadystep._utils import lazy_names
from steadystep.records import Incident

if TYPE_CHECKING:
    from steadystep.runs.comparison import Comparison, compare
    from steadystep.runs.diagnosis import diagnose
    from steadystep.runs.open import find_runs, open_run, open_runs
    from steadystep.runs.reading import Pattern, PlannedAction, Reading

__all__ = [
    "Comparison",
    "Pattern",
    "PlannedAction",
    "Reading",
    "compare",
    "diagnose",
    "find_runs",
    "open_run",
    "open_runs",
]

__getattr__ = lazy_names(
    __name__,
    {
        "comparison": ("Comparison", "compare"),
        "diagnosis": ("diagnose",),
        "open": ("find_runs", "open_run", "open_runs"),
        "reading": ("Pattern", "PlannedAction", "Reading"),
    },
)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class IncidentCost:
    """What one incident cost."""

    step: int
    """The optimizer step."""
    cause: str
    """Value of a `steadystep.diagnosis.Cause`."""
    lost: int
    """Updates that are not in the weights because of it."""
    replayed: int
    """Updates that were computed a second time."""
    quarantined: tuple[int, ...]
    """Steps whose batches were left out."""
    seconds: float | None
    """What that took; None where the log has no times."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class EffectiveTime:
    """Useful work and the whole of it."""

    steps: int
    """Optimizer steps, refused ones included."""
    updates: int
    """Contained in the final weights."""
    replayed: int
    """Updates that were computed a second time after a rollback."""
    step_seconds: float | None
    """Mean time of a step; None while the run goes on, or where the log has no times."""
    incidents: tuple[IncidentCost, ...]
    """Those that cost something, in order."""

    @property
    def share(self) -> float | None:
        """Part of the work that is in the final weights, 0 to 1; None without a step."""
        return self.updates / (self.steps + self.replayed) if self.steps else None

    @property
    def seconds_lost(self) -> float | None:
        """What all incidents cost together; None where the log has no times."""
        known = [cost.seconds for cost in self.incidents if cost.seconds is not None]
        return sum(known) if len(known) == len(self.incidents) and self.step_seconds is not None else None

    def numbers(self) -> dict[str, Any]:
        """Return what every view of a run shows, by name."""
        return {"updates": self.updates, "effective_share": self.share, "seconds_lost": self.seconds_lost}

    def as_dict(self) -> dict[str, Any]:
        """Return everything, ready for JSON."""
        return asdict(self) | self.numbers()


def effective_time(
    incidents: Sequence[Incident], steps: int, *, seconds: float | None = None, since: int = 0
) -> EffectiveTime:
    """Return how much of a run is in its final weights.

    Args:
        incidents: those of the run, in order.
        steps: optimizer steps of the run.
        seconds: duration of its last process.
        since: the first step of that process.
    """
    costs, updates, last = [], 0, 0
    each = _step_seconds(incidents, steps - since, seconds, since)
    for incident in _once(incidents):
        updates, last = updates + incident.step - last, incident.step + 1
        after = updates + incident.stepped if incident.restored is None else incident.restored
        lost, updates = max(0, updates + 1 - after), after
        if lost or incident.replayed:
            costs.append(_cost(incident, lost, each))
    replayed = sum(cost.replayed for cost in costs)
    updates += max(0, steps - last)
    return EffectiveTime(steps=steps, updates=updates, replayed=replayed, step_seconds=each, incidents=tuple(costs))


def _once(incidents: Iterable[Incident]) -> list[Incident]:
    """By step, the last line of each."""
    found = {incident.step: incident for incident in incidents}
    return [found[step] for step in sorted(found)]


def _cost(incident: Incident, lost: int, each: float | None) -> IncidentCost:
    seconds = None
    if each is not None:
        spent = 0.0 if incident.seconds is None else max(0.0, incident.seconds - each)
        seconds = lost * each + (spent if incident.restored is not None else 0.0)
    left_out = tuple(batch.step for batch in incident.quarantined)
    return IncidentCost(
        step=incident.step,
        cause=incident.cause,
        lost=lost,
        replayed=incident.replayed,
        quarantined=left_out,
        seconds=seconds,
    )


def _step_seconds(incidents: Sequence[Incident], steps: int, seconds: float | None, since: int) -> float | None:
    """The mean of steps without a rollback; of the whole where there are hardly any others."""
    if seconds is None or steps <= 0:
        return None
    slow = [i.seconds for i in incidents if i.step >= since and i.restored is not None and i.seconds is not None]
    rest = steps - len(slow)
    return max(0.0, seconds - sum(slow)) / rest if rest > 0 else seconds / steps


def duration(start: Mapping[str, Any], end: Mapping[str, Any] | None) -> float | None:
    """Return the seconds between the first and the last line of a process; None without both."""
    began, ended = ((line or {}).get("time") for line in (start, end))
    if not isinstance(began, int | float) or not isinstance(ended, int | float) or not began <= ended < math.inf:
        return None
    return float(ended - began)


def changed_at(path: Path) -> float:
    """Return when a log was last written; 0 where it is gone."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
