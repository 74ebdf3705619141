"""A run, or several over each other, made ready for a page.

Every number is in words here or in the chart data, and nothing is computed later.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import numpy as np

from steadystep._utils.checklist import ChecklistItem
from steadystep._utils.text import NOTHING, count, number, share, short
from steadystep.pages.charts import heat, is_wide, left_out, panels, thin, typical
from steadystep.pages.incident_groups import Headline, IncidentGroup, episodes, headline
from steadystep.pages.site import self_contained
from steadystep.runs.checklist import checklist
from steadystep.runs.comparison import Comparison, compare, labels
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
    notes = (*run.notes, f"{extra} more metrics are in the log but not on this page") if extra else run.notes
    return View(
        name=run.name,
        source=run.source,
        verdict=verdict,
        facts=tuple(_facts(run)),
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


def _facts(run: Run) -> Iterator[tuple[str, str, str]]:
    yield "steps", f"{run.steps:,}", count(len(run.restarts), "restart") if run.restarts else ""
    yield "final loss", number(run.final_loss), "median of the last tenth"
    if run.best_validation is not None:
        yield "best validation", number(run.best_validation), f"at step {run.best_validation_step:,}"
    if run.source == "steadystep":
        acted, watched = run.num_interventions, run.num_incidents - run.num_interventions
        yield "interventions", str(acted), count(watched, "observation") if watched else ""
        yield "updates skipped", str(run.num_skipped), count(run.num_rollbacks, "rollback")
    if len(run.grad_norm):
        finite = run.grad_norm.values[np.isfinite(run.grad_norm.values)]
        yield "gradient norm", number(float(np.median(finite)) if len(finite) else None), "median"
    if len(run.clipped):
        yield "clipped", share(len(run.clipped), max(len(run.loss), 1)), "of the steps"
    if len(run.lr):
        yield "learning rate", number(last_finite(run.lr)), "final"
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
    """Return an HTML page about one run that needs no other file.

    Args:
        run: the run.
        verdict: what to show first. Default: the diagnosis of its curves.
    """
    return self_contained("report.html", view=view(run, verdict or headline(run)), when=None)


_COLOURS = 8
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
    return self_contained("compare.html", compared=compared, rows=rows(compared), charts=overlay(runs))


def rows(compared: Comparison) -> tuple[tuple[str, tuple[float | None, ...]], ...]:
    """The table: a name and a value for each run; rows in which no run has anything are left out."""
    made = [(said, tuple(getattr(one, key) for one in compared.runs)) for key, said in _ROWS]
    made[0] = (f"compared: {compared.judged_by}", made[0][1])
    return tuple((said, values) for said, values in made if any(value is not None for value in values))


def overlay(runs: Sequence[Run], *, buckets: int = 500) -> dict[str, Any]:
    """Loss, held-out loss, gradient norm and learning rate of all, for the charts."""
    wanted: tuple[tuple[str, str, Callable[[Run], Series], bool], ...] = (
        ("loss", "Loss", lambda run: run.loss, False),
        ("val", "Validation loss", lambda run: run.validation.get("val_loss", Series()), False),
        ("norm", "Gradient norm", lambda run: run.grad_norm, True),
        ("lr", "Learning rate", lambda run: run.lr, False),
    )
    names = labels(runs)
    made = []
    for key, title, pick, log in wanted:
        curves = [(i, name, pick(run)) for i, (name, run) in enumerate(zip(names, runs, strict=True))]
        lines = [line for i, name, series in curves for line in _lines(i, name, series, buckets)]
        lines.sort(key=lambda line: "raw" not in line["role"])  # the lines through the noise on top of it
        wide = log or any(is_wide(series) for _, _, series in curves)
        if lines:
            made.append({"key": key, "title": title, "lines": lines, "log": wide, "rug": []})
    return {"panels": made, "marks": [], "signs": [], "restarts": [], "heat": None}


def _lines(at: int, name: str, series: Series, buckets: int) -> list[dict[str, Any]]:
    colour = f"c{at % _COLOURS}"
    if not len(series):
        return []
    middle = typical(series, buckets=160)
    if len(series) < 400 or not len(middle.steps):
        return [{"name": name, "role": colour, **thin(series, buckets=buckets).for_json()}]
    raw = {"name": "", "role": f"{colour} raw", **thin(series, buckets=buckets).for_json()}
    return [raw, {"name": name, "role": colour, **middle.for_json()}]
