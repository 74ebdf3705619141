"""Incidents as one tells them: what happened again and again in one stretch is one story."""

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, final

import numpy as np

from steadystep._utils.numbers import from_json
from steadystep._utils.text import NOTHING, count, number, text_of
from steadystep.errors import SteadystepError
from steadystep.records import GRAVE, SEVERITIES, Incident, severity_rank
from steadystep.runs import IncidentCost
from steadystep.runs.diagnosis import REPLAY
from steadystep.runs.diagnosis import Headline as Headline
from steadystep.runs.diagnosis import headline as headline
from steadystep.runs.reading import Mark as Mark
from steadystep.runs.run import LayerNorms, Run, Series
from steadystep.tracking.log_format import step_of

_AROUND = 50  # steps before and after that "usual" is taken from
_LARGEST_RECORD = 10_000_000  # bytes
_MOST_UNGUARDED = 2000  # steps


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
class Unguarded:
    """What `steadystep replay --without-guard` found: the same steps with nothing that holds an update back."""

    loss: Series
    norm: Series
    same_batch: bool

    @property
    def said(self) -> str:
        """In a clause."""
        lost = self.loss.steps[~np.isfinite(self.loss.values)]
        came_to = f"not finite from step {lost[0]:,}" if len(lost) else number(float(self.loss.values[-1]))
        on = ", each with the batch of the incident" if self.same_batch else ""
        return f"loss {came_to} after {count(len(self.loss), 'step')}{on}"


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
    unguarded: Unguarded | None = None
    """The same steps without the guard, where somebody has asked for them."""
    samples: tuple[int, ...] = ()
    """Indices in the dataset of the samples in the refused batch, where the bundle has them."""
    mover: str = ""
    """The layer whose gradient norm left its own level first, where one did before the others."""
    cost: str = ""
    """Updates lost, updates replayed and seconds, in words; empty where it cost nothing."""

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
    def ranks(self) -> tuple[int, ...]:
        """The ranks it was found on."""
        return tuple(sorted({rank for incident in self.incidents for rank in incident.ranks}))

    @property
    def acted(self) -> bool:
        """Whether it called for more than to watch."""
        return any(incident.calls_for_action for incident in self.incidents)


def incident_groups(run: Run) -> tuple[IncidentGroup, ...]:
    """All of a run, in order."""
    costs = run.effective().incidents
    return tuple(_episode(run, group, costs) for group in run.episodes())


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


def _episode(run: Run, group: Sequence[Incident], costs: Sequence[IncidentCost]) -> IncidentGroup:
    first, last = group[0].step, group[-1].step
    refused = {"learning rate": next((i.refused_lr for i in group if i.refused_lr is not None), None)}
    rows = (("loss", run.loss), ("gradient norm", run.grad_norm), ("learning rate", run.lr))
    return IncidentGroup(
        first=first,
        last=last,
        cause=_head(group).cause,
        severity=gravest(group),
        incidents=tuple(group),
        changes=tuple(_change(name, series, first, last, refused.get(name)) for name, series in rows if len(series)),
        mover=first_mover(run.layers, first, last) if gravest(group) in GRAVE else "",
        samples=next((found for i in group if i.bundle and (found := _samples(i.bundle, str(run.path)))), ()),
        unguarded=next((tried for i in group if i.bundle and (tried := _unguarded(i.bundle, str(run.path)))), None),
        replay=next((REPLAY.format(shlex.quote(i.bundle)) for i in group if i.bundle), ""),
        cost=_cost([cost for cost in costs if first <= cost.step <= last]),
    )


def _cost(costs: Sequence[IncidentCost]) -> str:
    if not costs:
        return ""
    lost, replayed = sum(cost.lost for cost in costs), sum(cost.replayed for cost in costs)
    seconds = [cost.seconds for cost in costs if cost.seconds is not None]
    told = [f"{count(lost, 'update')} lost"] + ([f"{replayed:,} replayed"] if replayed else [])
    return ", ".join([*told, f"{sum(seconds):.3g} s"] if len(seconds) == len(costs) else told)


@cache  # a bundle does not change
def _samples(bundle: str, folder: str) -> tuple[int, ...]:
    found = _record(bundle, "incident.json", folder).get("samples", ())
    return tuple(found) if isinstance(found, list) and all(type(one) is int for one in found) else ()


def _unguarded(bundle: str, folder: str) -> Unguarded | None:
    told = _record(bundle, "without_guard.json", folder)
    try:
        first, losses = step_of(told["step"]), [from_json(value) for value in told["loss"][:_MOST_UNGUARDED]]
        norms = [from_json(value) for value in told["norm"][: len(losses)]]
        steps = np.arange(first, first + len(losses))
        both = [Series(steps, np.array(values, dtype=np.float64)) for values in (losses, norms)]
        return Unguarded(loss=both[0], norm=both[1], same_batch=bool(told.get("same_batch"))) if losses else None
    except (LookupError, TypeError, ValueError, OverflowError):
        return None


def _record(bundle: str, name: str, folder: str) -> dict[str, Any]:
    """A file of a bundle inside the folder of the run; nothing from anywhere else."""
    try:
        file = (Path(bundle) / name).resolve()
        if not file.is_relative_to(Path(folder).resolve()) or not file.is_file():
            return {}
        found = json.loads(text_of(file, largest=_LARGEST_RECORD))
        return found if isinstance(found, dict) else {}
    except (OSError, ValueError, RecursionError, SteadystepError):
        return {}


_LEVEL_ROWS, _LEAD = 20, 5  # logged rows that a level is taken from; steps before an incident that are all logged
_MOVED = 4.0  # times its level
_TOGETHER = 0.5  # of the layers at the same step: none of them was first


@np.errstate(all="ignore")
def first_mover(layers: LayerNorms | None, first: int, last: int) -> str:
    """Return the layer whose norm exceeded four times its median before the others; nothing if most did at once."""
    if layers is None or not len(layers.steps):
        return ""
    a, b = np.searchsorted(layers.steps, (first - _LEAD, last + 1))
    norms = np.atleast_2d(layers.norms)
    before, around = norms[max(a - _LEVEL_ROWS, 0) : a], norms[a:b]
    if len(before) < 3 or not len(around):
        return ""
    known = np.isfinite(before).any(axis=0)
    level = np.median(np.where(np.isfinite(before), before, 0.0), axis=0)
    times = np.where(np.isfinite(around), around / np.maximum(level, 1e-30), np.inf) * known
    moved = times > _MOVED
    when = np.where(moved.any(axis=0), moved.argmax(axis=0), len(around))
    leading = np.flatnonzero(when == when.min())
    if when.min() == len(around) or len(leading) > max(1, _TOGETHER * known.sum()):
        return ""
    return layers.names[int(leading[np.argmax(times[when.min(), leading])])]


def _change(name: str, series: Series, first: int, last: int, refused: float | None) -> Change:
    at = _worst(series, first, last)
    return Change(
        name=name,
        before=_level(series, first - _AROUND, first - 1),
        at=at if refused is None else f"{number(refused)} refused, {at} used",
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
