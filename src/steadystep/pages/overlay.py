"""Several runs over each other: their curves, and what was set differently against what came of it."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from steadystep.pages.charts import Thinned, is_wide, thin, typical
from steadystep.runs.comparison import Comparison, differing, labels
from steadystep.runs.run import Run, Series

HUES, DASHES = 12, 5
_POINTS = 18_000  # of all curves in one chart
_FEW = 8  # runs whose noise is drawn behind their lines
_MOST_AXES = 12
_LOG_FROM = 50.0  # largest over smallest value
_SHOWN = 5  # digits
Settings = Sequence[tuple[str, tuple[str, ...]]]


def look(at: int) -> str:
    """Classes of the line of one run: twelve hues, and a dash pattern for each further dozen.

    >>> look(0), look(13)
    ('c0 d0', 'c1 d1')
    """
    return f"c{at % HUES} d{at // HUES % DASHES}"


def overlay(runs: Sequence[Run], *, buckets: int = 500) -> dict[str, Any]:
    """Loss, held-out loss, gradient norm and learning rate of all, for the charts."""
    wanted: tuple[tuple[str, str, Callable[[Run], Series], bool], ...] = (
        ("loss", "Loss", lambda run: run.loss, False),
        ("val", "Validation loss", lambda run: run.validation.get("val_loss", Series()), False),
        ("norm", "Gradient norm", lambda run: run.grad_norm, True),
        ("lr", "Learning rate", lambda run: run.lr, False),
    )
    names = labels(runs)
    buckets = min(buckets, _POINTS // (6 * max(len(runs), 1)))
    made = []
    for key, title, pick, log in wanted:
        curves = [(i, name, pick(run)) for i, (name, run) in enumerate(zip(names, runs, strict=True))]
        noisy = len(runs) <= _FEW
        lines = [line for i, name, series in curves for line in _lines(i, name, series, buckets, noisy=noisy)]
        lines.sort(key=lambda line: "raw" not in line["role"])  # the lines through the noise on top of it
        wide = log or any(is_wide(series) for _, _, series in curves)
        if lines:
            axis = "L2 norm before clipping" if key == "norm" else title.lower()
            made.append({"key": key, "title": title, "axis": axis, "lines": lines, "log": wide, "rug": []})
    named = [{"name": name, "look": look(i)} for i, name in enumerate(names)]
    units = {run.step_unit for run in runs}
    unit = units.pop() if len(units) == 1 else "step"
    return {"panels": made, "marks": [], "signs": [], "restarts": [], "heats": [], "unit": unit, "runs": named}


def _lines(at: int, name: str, series: Series, buckets: int, *, noisy: bool) -> list[dict[str, Any]]:
    if not len(series):
        return []
    middle = typical(series, buckets=min(160, buckets))
    if len(series) < 400 or not len(middle.steps):
        return [{"name": name, "role": look(at), **_short(thin(series, buckets=buckets))}]
    line = {"name": name, "role": look(at), **_short(middle)}
    if not noisy:
        bad = ~np.isfinite(series.values)
        lost = Thinned(series.steps[bad][:1], series.values[bad][:1]).for_json()["bad"]
        return [{**line, "bad": lost}]
    return [{"name": "", "of": name, "role": f"{look(at)} raw", **_short(thin(series, buckets=buckets))}, line]


def _short(curve: Thinned) -> dict[str, Any]:
    told = curve.for_json()
    return {**told, "y": [None if v is None else float(f"{v:.{_SHOWN}g}") for v in told["y"]]}


def differences(runs: Sequence[Run], compared: Comparison) -> Settings:
    """Settings and logged hyperparameters in which the runs differ: a name, and a value for each run."""
    logged = differing([run.hparams for run in runs])
    known = {name for name, _ in logged}
    return (*logged, *((name, values) for name, values in compared.settings if name not in known))


def parallel(compared: Comparison, settings: Settings) -> list[dict[str, Any]] | None:
    """The axes of parallel coordinates, the loss that the runs are ranked by last; None without a setting to show."""
    found = (_axis(name, values) for name, values in settings)
    axes = [axis for axis in found if axis is not None][: _MOST_AXES - 1]
    scores = [one.score if one.score is not None and np.isfinite(one.score) else None for one in compared.runs]
    if not axes or not any(score is not None for score in scores):
        return None
    return [*axes, {"name": compared.judged_by, "kind": "number", "values": scores}]


def _axis(name: str, values: Sequence[str]) -> dict[str, Any] | None:
    numbers = [_number(value) for value in values]
    known = [number for number in numbers if number is not None]
    if len(known) < 0.5 * len(values):
        few = len(set(values)) <= max(12, len(values) // 4)
        return {"name": name, "kind": "word", "values": list(values)} if few else None
    log = min(known) > 0 and max(known) > _LOG_FROM * min(known)
    return {"name": name, "kind": "log" if log else "number", "values": numbers}


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if np.isfinite(value) else None
