"""A run made ready for a page: every number is in words here or in the chart data, and nothing is computed later."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, final

import numpy as np

from steadystep._utils.checklist import ChecklistItem
from steadystep._utils.text import NOTHING, count, number, share, short
from steadystep.pages.charts import heat, left_out, panels
from steadystep.pages.episodes import Headline, IncidentGroup, episodes, headline, interventions
from steadystep.pages.site import self_contained
from steadystep.runs.checklist import checklist
from steadystep.runs.run import Run, Series

_MOST_EPISODES = 80
_MOST_MARKS = 300
_MOST_NEAR = 40


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """What templates and charts get."""

    name: str
    source: str
    verdict: Headline
    facts: tuple[tuple[str, str, str], ...]
    """Name, value, a word about it."""
    episodes: tuple[IncidentGroup, ...]
    more_episodes: int
    checklist: tuple[ChecklistItem, ...]
    settings: tuple[tuple[str, tuple[tuple[str, str], ...]], ...]
    notes: tuple[str, ...]
    error: str
    """How it ended, where that was not well."""
    charts: Mapping[str, Any]


@np.errstate(all="ignore")  # why: a log may hold any number, and the mean of two of them may be none
def view(run: Run, verdict: Headline, *, buckets: int = 1200, near: bool = True) -> View:
    """Everything about one run; `near` adds every step around its incidents."""
    told = episodes(run)
    shown = told[-_MOST_EPISODES:]
    extra = left_out(run)
    notes = (*run.notes, f"{extra} more metrics are in the log and not on this page") if extra else run.notes
    return View(
        name=run.name,
        source=run.source,
        verdict=verdict,
        facts=tuple(_facts(run, told)),
        episodes=shown,
        more_episodes=len(told) - len(shown),
        checklist=checklist(run),
        settings=tuple(_settings(run.settings)),
        notes=notes,
        error=run.error,
        charts={
            **charts(run, told, verdict, buckets=buckets),
            "near": _near(run, shown, buckets) if near else {},
        },
    )


@np.errstate(all="ignore")
def charts(
    run: Run,
    told: tuple[IncidentGroup, ...],
    verdict: Headline,
    *,
    buckets: int,
    first: int | None = None,
    last: int | None = None,
) -> dict[str, Any]:
    """The data of the charts, for JSON."""
    ranked = sorted(told, key=lambda e: e.rank, reverse=True)
    marks = [
        {"step": e.first, "until": e.last, "cause": e.cause, "severity": e.severity, "times": len(e.incidents)}
        for e in ranked[:_MOST_MARKS]
    ]
    signs = [{"kind": s.kind, "severity": s.severity, "step": s.step, "until": s.until} for s in verdict.signs]
    return {
        "panels": panels(run, buckets=buckets, first=first, last=last),
        "marks": sorted(marks, key=lambda mark: mark["step"]),
        "signs": signs,
        "restarts": list(run.restarts),
        "heat": heat(run.layers, troubled={i.step for i in run.incidents}),
    }


def _near(run: Run, told: tuple[IncidentGroup, ...], buckets: int) -> dict[int, Any]:
    """Every step around the episodes, where the page as a whole has fewer points than steps."""
    if len(run.loss) <= 2 * buckets:
        return {}
    told = tuple(sorted(told, key=lambda e: e.acted, reverse=True))[:_MOST_NEAR]
    plain = replace(run, metrics={}, validation={}, lr=Series())
    return {e.first: {"panels": panels(plain, buckets=200, **_around(e))} for e in told}


def _around(episode: IncidentGroup) -> dict[str, int]:
    margin = max(40, (episode.last - episode.first) // 2)
    return {"first": max(episode.first - margin, 0), "last": episode.last + margin}


def last_finite(series: Series) -> float | None:
    """The last value that is a number."""
    finite = np.flatnonzero(np.isfinite(series.values))
    return float(series.values[finite[-1]]) if len(finite) else None


def _facts(run: Run, told: tuple[IncidentGroup, ...]) -> Iterator[tuple[str, str, str]]:
    steps = int(run.loss.steps[-1]) + 1 if len(run.loss) else 0
    yield "steps", f"{steps:,}", count(len(run.restarts), "restart") if run.restarts else ""
    tail = run.loss.values[-max(1, min(len(run.loss) // 20, 500)) :]
    tail = tail[np.isfinite(tail)]
    yield (
        "loss at the end",
        number(float(np.median(tail)) if len(tail) else last_finite(run.loss)),
        "tail median",
    )
    held_out = run.validation.get("val_loss", Series())
    if np.isfinite(held_out.values).any():
        best = int(np.nanargmin(np.where(np.isfinite(held_out.values), held_out.values, np.nan)))
        at = f"at step {int(held_out.steps[best]):,}"
        yield "best validation", number(float(held_out.values[best])), at
    if run.source == "steadystep":
        acted = len(interventions(run, told))
        refused = sum(not i.stepped for i in run.incidents)
        back = sum(i.restored is not None for i in run.incidents)
        yield "interventions", str(acted), count(len(told) - acted, "observation") if len(told) > acted else ""
        yield "updates refused", str(refused), count(back, "rollback")
    if len(run.grad_norm):
        finite = run.grad_norm.values[np.isfinite(run.grad_norm.values)]
        yield "gradient norm", number(float(np.median(finite)) if len(finite) else None), "median"
    if len(run.clipped):
        yield "clipped", share(len(run.clipped), max(len(run.loss), 1)), "of the steps"
    if len(run.lr):
        yield "learning rate", number(last_finite(run.lr)), "at the end"
    if run.parameters:
        yield "parameters", short(run.parameters), ""


def _settings(settings: Mapping[str, Any]) -> Iterator[tuple[str, tuple[tuple[str, str], ...]]]:
    top = tuple((str(k), words(v)) for k, v in settings.items() if not isinstance(v, Mapping))
    if top:
        yield "", top
    for name, section in settings.items():
        if isinstance(section, Mapping) and section:
            yield str(name), tuple((str(k), words(v)) for k, v in section.items())


def words(value: object) -> str:
    """A setting as it would stand in the YAML."""
    if value is None:
        return NOTHING
    if isinstance(value, float):
        return f"{value:g}"
    return value if isinstance(value, str) else json.dumps(value, default=str)


def report_page(run: Run, verdict: Headline | None = None) -> str:
    """A whole HTML page that needs nothing beside itself.

    Args:
        run: what the log says.
        verdict: what to say first; by default the doctor's reading of the curves.
    """
    return self_contained("report.html", view=view(run, verdict or headline(run)), when=None)
