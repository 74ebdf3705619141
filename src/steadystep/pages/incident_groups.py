"""Incidents as one tells them: what happened again and again in one stretch is one story."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import numpy as np

from steadystep._utils.text import NOTHING, number
from steadystep.records import SEVERITIES, Incident, severity_rank
from steadystep.runs.diagnosis import REPLAY
from steadystep.runs.diagnosis import headline as headline
from steadystep.runs.reading import Headline as Headline
from steadystep.runs.reading import Mark as Mark
from steadystep.runs.run import Run, Series

_AROUND = 50  # steps before and after that "usual" is taken from


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One number before, at and after an episode."""

    name: str
    before: str
    at: str
    after: str


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class IncidentGroup:
    """One or more incidents close to each other, of the same cause or one out of the other."""

    first: int
    last: int
    cause: str
    severity: str
    incidents: tuple[Incident, ...]
    changes: tuple[Change, ...] = ()
    replay: str = ""
    """The command that runs it again, where a bundle was written."""

    @property
    def head(self) -> Incident:
        """The incident that says most."""
        return _head(self.incidents)

    @property
    def rank(self) -> int:
        """How grave, from 0."""
        return severity_rank(self.severity)

    @property
    def when(self) -> str:
        """The steps, in words."""
        return f"step {self.first:,}" if self.first == self.last else f"steps {self.first:,} to {self.last:,}"

    @property
    def acted(self) -> bool:
        """Whether it called for more than to watch."""
        return any(incident.calls_for_action for incident in self.incidents)


def episodes(run: Run) -> tuple[IncidentGroup, ...]:
    """All of a run, in order."""
    return tuple(_episode(run, group) for group in run.episodes())


def interventions(run: Run, told: Sequence[IncidentGroup]) -> tuple[IncidentGroup, ...]:
    """Those in which the guard did more than to watch; in observe mode, none."""
    return () if run.settings.get("mode") == "observe" else tuple(e for e in told if e.acted)


def gravest(incidents: Sequence[Incident]) -> str:
    """The highest severity, or nothing; what is no severity counts as info."""
    known = (i.severity if i.severity in SEVERITIES else "info" for i in incidents)
    return max(known, key=severity_rank, default="")


def _head(incidents: Sequence[Incident]) -> Incident:
    """The gravest, a rollback before others, and the first of those."""
    return max(incidents, key=lambda i: (i.restored is not None, severity_rank(i.severity)))


def _episode(run: Run, group: Sequence[Incident]) -> IncidentGroup:
    first, last = group[0].step, group[-1].step
    rows = (("loss", run.loss), ("gradient norm", run.grad_norm), ("learning rate", run.lr))
    return IncidentGroup(
        first=first,
        last=last,
        cause=_head(group).cause,
        severity=gravest(group),
        incidents=tuple(group),
        changes=tuple(_change(name, series, first, last) for name, series in rows if len(series)),
        replay=next((REPLAY.format(shlex.quote(i.bundle)) for i in group if i.bundle), ""),
    )


def _change(name: str, series: Series, first: int, last: int) -> Change:
    return Change(
        name=name,
        before=_level(series, first - _AROUND, first - 1),
        at=_worst(series, first, last),
        after=_level(series, last + 1, last + _AROUND),
    )


def _between(series: Series, first: int, last: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    a, b = np.searchsorted(series.steps, (first, last + 1))
    return series.values[a:b]


def _level(series: Series, first: int, last: int) -> str:
    values = _between(series, first, last)
    values = values[np.isfinite(values)]
    return number(float(np.median(values))) if len(values) else NOTHING


def _worst(series: Series, first: int, last: int) -> str:
    values = _between(series, first, last)
    if not len(values):
        return NOTHING
    bad = values[~np.isfinite(values)]
    return number(float(bad[0]) if len(bad) else float(np.max(values)))
