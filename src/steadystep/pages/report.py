"""A run, or several over each other, made ready for a page.

Every number is in words here or in the chart data, and nothing is computed later.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import numpy as np

from steadystep._utils.checklist import ChecklistItem
from steadystep._utils.text import NOTHING, count, number, share, short
from steadystep.pages import self_contained
from steadystep.pages.charts import metrics_left_out, panels, thin
from steadystep.pages.heat_and_overlay import differences, heats, look, overlay, parallel
from steadystep.pages.incident_groups import Headline, IncidentGroup, Mark, Unguarded, headline, incident_groups
from steadystep.runs.checklist import checklist
from steadystep.runs.comparison import Comparison, compare
from steadystep.runs.run import Run, Series

_MOST_EPISODES = 80
_MOST_MARKS = 300
_MOST_NEAR = 20


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """What templates and charts get."""

    name: str
    source: str
    verdict: Headline
    facts: tuple[tuple[str, str, str], ...]
    """Name, value, a word about it."""
    signs: tuple[tuple[Mark, tuple[int, ...]], ...]
    """What the curves show: one of each kind, and the steps of the others."""
    episodes: tuple[IncidentGroup, ...]
    more_episodes: int
    checklist: tuple[ChecklistItem, ...]
    settings: tuple[tuple[str, tuple[tuple[str, str], ...]], ...]
    notes: tuple[str, ...]
    error: str
    """How it ended, where that was not well."""
    charts: Mapping[str, Any]


@np.errstate(all="ignore")  # why: a log may hold any number, and the mean of two of them may be none
def view(run: Run, verdict: Headline, *, buckets: int = 1000, near: bool = True) -> View:
    """Everything about one run; `near` adds every step around its incidents."""
    told = incident_groups(run)
    shown = told[-_MOST_EPISODES:]
    extra = metrics_left_out(run)
    notes = (*run.notes, f"{extra} more metrics are in the log but not on this page") if extra else run.notes
    return View(
        name=run.name,
        source=run.source,
        verdict=verdict,
        facts=tuple(_facts(run)),
        signs=_alike(verdict.signs),
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
        {
            "step": e.first,
            "until": e.last,
            "cause": e.cause,
            "severity": e.severity,
            "times": len(e.incidents),
            "ranks": e.ranks,
        }
        for e in ranked[:_MOST_MARKS]
    ]
    # why none of a recovered run: its incidents are marked, and the first and the last NaN may be far apart
    shaded = () if verdict.healthy else verdict.signs
    signs = [{"kind": s.kind, "severity": s.severity, "step": s.step, "until": s.until} for s in shaded]
    return {
        "panels": panels(run, buckets=buckets, first=first, last=last),
        "marks": sorted(marks, key=lambda mark: mark["step"]),
        "signs": signs,
        "restarts": list(run.restarts),
        "unit": run.step_unit,
        "heats": heats(run, told, first=first, last=last),
        "unguarded": {e.first: _unguarded(e.unguarded) for e in told if e.unguarded is not None},
    }


def _unguarded(found: Unguarded) -> dict[str, Any]:
    """Lines for the charts of one incident, by panel."""
    pairs = (("loss", found.loss), ("norm", found.norm))
    return {
        key: {"name": "without the guard", "role": "without", **thin(series, buckets=200).for_json()}
        for key, series in pairs
    }


def _alike(signs: Sequence[Mark]) -> tuple[tuple[Mark, tuple[int, ...]], ...]:
    groups: dict[tuple[str, str, str], list[Mark]] = {}
    for sign in signs:
        groups.setdefault((sign.kind, sign.severity, sign.advice), []).append(sign)
    return tuple((first, tuple(sign.step for sign in rest)) for first, *rest in groups.values())


def _near(run: Run, told: tuple[IncidentGroup, ...], buckets: int) -> dict[int, Any]:
    """Every step around the episodes, where the page as a whole has fewer points than steps."""
    if len(run.loss) <= 2 * buckets:
        return {}
    told = tuple(sorted(told, key=lambda e: e.acted, reverse=True))[:_MOST_NEAR]
    return {e.first: {"panels": panels(_part(run, **_around(e)), buckets=200)} for e in told}


def _part(run: Run, first: int, last: int) -> Run:
    """Loss, gradient norm and, where one was refused, learning rate of some steps."""

    def cut(series: Series) -> Series:
        a, b = np.searchsorted(series.steps, (first, last + 1))
        return Series(series.steps[a:b], series.values[a:b])

    inside = tuple(i for i in run.incidents if first <= i.step <= last)
    lr = cut(run.lr) if any(i.refused_lr is not None for i in inside) else Series()
    clipped = run.clipped[(run.clipped >= first) & (run.clipped <= last)]
    plain = replace(run, metrics={}, validation={}, scale=Series(), incidents=inside, clipped=clipped, lr=lr)
    return replace(plain, loss=cut(run.loss), grad_norm=cut(run.grad_norm))


def _around(episode: IncidentGroup) -> dict[str, int]:
    margin = max(40, (episode.last - episode.first) // 2)
    return {"first": max(episode.first - margin, 0), "last": episode.last + margin}


def last_finite(series: Series) -> float | None:
    """The last value that is a number."""
    finite = np.flatnonzero(np.isfinite(series.values))
    return float(series.values[finite[-1]]) if len(finite) else None


def _facts(run: Run) -> Iterator[tuple[str, str, str]]:
    notes = [count(len(run.restarts), "restart")] if run.restarts else []
    notes += [f"{short(run.parameters)} parameters"] if run.parameters else []
    yield "steps", f"{run.steps:,}", ", ".join(notes)
    yield "final loss", number(run.final_loss), "median of the last tenth"
    if run.best_validation is not None:
        yield "best validation", number(run.best_validation), f"at step {run.best_validation_step:,}"
    if run.source == "steadystep":
        acted, watched = run.num_interventions, run.num_incidents - run.num_interventions
        yield "interventions", str(acted), count(watched, "observation") if watched else ""
        yield "updates skipped", str(run.num_skipped), count(run.num_rollbacks, "rollback")
        yield from _effective(run)
    if len(run.grad_norm):
        finite = run.grad_norm.values[np.isfinite(run.grad_norm.values)]
        yield "gradient norm", number(float(np.median(finite)) if len(finite) else None), "median"
    if len(run.clipped):
        yield "clipped", share(len(run.clipped), max(len(run.loss), 1)), "of the steps"
    if len(run.lr):
        yield "learning rate", number(last_finite(run.lr)), "final"


def _effective(run: Run) -> Iterator[tuple[str, str, str]]:
    effective = run.effective()
    if effective.share is None or not effective.incidents:
        return
    lost, seconds = run.steps - effective.updates, effective.seconds_lost
    costs = [f"{effective.replayed:,} replayed"] if effective.replayed else []
    costs += ["" if seconds is None else f"{seconds:.3g} s"]
    yield (
        "effective training",
        f"{100 * effective.share:.2f} %",
        ", ".join([f"{lost:,} updates lost", *filter(None, costs)]),
    )


def _settings(settings: Mapping[str, Any]) -> Iterator[tuple[str, tuple[tuple[str, str], ...]]]:
    top = tuple((str(k), as_yaml(v)) for k, v in settings.items() if not isinstance(v, Mapping))
    if top:
        yield "", top
    for name, section in settings.items():
        if isinstance(section, Mapping) and section:
            yield str(name), tuple((str(k), as_yaml(v)) for k, v in section.items())


def as_yaml(value: object) -> str:
    """A setting as it would stand in the YAML."""
    if value is None:
        return NOTHING
    if isinstance(value, float):
        return f"{value:g}"
    return value if isinstance(value, str) else json.dumps(value, default=str)


def report_page(run: Run, verdict: Headline | None = None) -> str:
    """Return an HTML page about one run that needs no other file.

    Args:
        run: the run.
        verdict: what to show first. Default: the diagnosis of its curves.
    """
    return self_contained("report.html", view=view(run, verdict or headline(run)), when=None)


_ROWS: tuple[tuple[str, str], ...] = (
    ("score", "compared"),
    ("steps", "steps"),
    ("val_loss", "final held-out loss"),
    ("best_val_loss", "best held-out loss"),
    ("loss", "final training loss"),
    ("noise", "noise (one standard error)"),
    ("incidents", "incidents"),
    ("interventions", "interventions"),
    ("refused", "updates skipped"),
    ("rollbacks", "rollbacks"),
    ("effective_share", "effective training (share)"),
    ("seconds_lost", "seconds lost to incidents"),
    ("grad_norm", "gradient norm, median"),
    ("peak_lr", "highest learning rate"),
)


def compare_page(runs: Sequence[Run], compared: Comparison | None = None) -> str:
    """Return an HTML page that compares runs and needs no other file.

    Args:
        runs: the runs.
        compared: their comparison. Default: `steadystep.runs.compare(runs)`.
    """
    compared = compared or compare(runs)
    return self_contained("compare.html", **compare_parts(runs, compared))


def compare_parts(runs: Sequence[Run], compared: Comparison) -> dict[str, Any]:
    """What the template of a comparison takes."""
    settings = differences(runs, compared)
    charts = overlay(runs) | {"parallel": parallel(compared, settings)}
    looks = [look(at) for at in range(len(runs))]
    return {
        "compared": compared,
        "rows": comparison_rows(compared),
        "settings": settings,
        "looks": looks,
        "charts": charts,
    }


def comparison_rows(compared: Comparison) -> tuple[tuple[str, tuple[float | None, ...]], ...]:
    """The table: a name and a value for each run; rows in which no run has anything are left out."""
    made = [(said, tuple(getattr(one, key) for one in compared.runs)) for key, said in _ROWS]
    made[0] = (f"compared: {compared.judged_by}", made[0][1])
    return tuple((said, values) for said, values in made if any(value is not None for value in values))
