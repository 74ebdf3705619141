"""Layers over time as a picture, in logarithms as they differ by orders of magnitude; several runs over each other."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from steadystep.pages.charts import Thinned, is_wide, thin, typical
from steadystep.pages.incident_groups import IncidentGroup
from steadystep.runs.comparison import Comparison, differing, labels
from steadystep.runs.run import LayerNorms, Run, Series

_COLUMNS, _ROWS = 240, 64
_FEWEST_COLUMNS, _CELLS = 120, 20_000  # of all pictures of a page
_FEW = 8  # rows of a picture that hides more than it shows
_LEVELS = 36 * 36 - 1  # two digits of base 36
_DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"
_KINDS = (
    ("norm", "Gradient norm", "gradient norm", "layers"),
    ("update", "Update / weight", "size of the update relative to the weights", "updates"),
    ("logit", "Attention logits", "upper bound of the attention logits", "logits"),
)


def heats(
    run: Run, told: Sequence[IncidentGroup], *, first: int | None = None, last: int | None = None
) -> list[dict[str, Any]]:
    """Every picture that the log has the numbers for, packed for a page."""
    troubled = {incident.step for incident in run.incidents}
    movers = {e.first: e.mover for e in told if e.mover}
    made = []
    shown = [norms for _, _, _, field in _KINDS if (norms := getattr(run, field)) is not None and norms.names]
    rows = sum(len(_together_names(norms.names)[1]) for norms in shown)
    columns = min(max(_CELLS // max(rows, 1), _FEWEST_COLUMNS), _COLUMNS)
    for key, title, about, field in _KINDS:
        picture = heat(_within(getattr(run, field), first, last), troubled=troubled, columns=columns)
        if picture is not None:
            at = _places(movers, run.layers, picture["names"]) if key == "norm" else []
            made.append({"key": key, "title": title, "about": about, **_packed(picture), "movers": at})
    return made


def heat(
    layers: LayerNorms | None, *, troubled: Collection[int] = (), columns: int = _COLUMNS
) -> dict[str, Any] | None:
    """Rows of log10 norms; a column is one logged step, or several neighbors and their largest norms.

    A column lasts until the next one begins, at "x". "bad" marks cells with infinity, and with NaN at one of the
    `troubled` steps: elsewhere NaN means that there was no such layer.
    """
    if layers is None or not len(layers.steps) or not layers.names:
        return None
    names, norms = _together(layers.names, np.atleast_2d(layers.norms))
    many = len(layers.steps)
    # why by rows and not by steps: every step around an incident is logged, and keeps a column of its own
    starts = np.unique(np.linspace(0, many, min(many, columns), endpoint=False).astype(np.int64))
    finite = np.isfinite(norms)
    cells = np.maximum.reduceat(np.where(finite, norms, -np.inf), starts, axis=0)
    worse = np.isin(layers.steps, list(troubled))[:, None]
    bad = np.logical_or.reduceat(np.isinf(norms) | (np.isnan(norms) & worse), starts, axis=0)
    with np.errstate(divide="ignore"):
        cells = np.log10(np.maximum(cells, 0.0))
    cells[np.isneginf(cells)] = np.nan
    last, apart = int(layers.steps[-1]), np.diff(layers.steps)
    return {
        "x": [int(step) for step in layers.steps[starts]],
        "last": last + int(apart.max(initial=1)),
        "names": list(names),
        "rows": [[None if np.isnan(v) else round(float(v), 3) for v in row] for row in cells.T],
        "bad": [[int(c), int(r)] for c, r in np.argwhere(bad)][:4000],
    }


def _within(layers: LayerNorms | None, first: int | None, last: int | None) -> LayerNorms | None:
    """The rows of these steps, and one before: it lasts until the first of them."""
    if layers is None or (first is None and last is None):
        return layers
    a = 0 if first is None else max(int(np.searchsorted(layers.steps, first, side="right")) - 1, 0)
    b = len(layers.steps) if last is None else int(np.searchsorted(layers.steps, last, side="right"))
    return LayerNorms(steps=layers.steps[a:b], names=layers.names, norms=np.atleast_2d(layers.norms)[a:b])


def _packed(picture: dict[str, Any]) -> dict[str, Any]:
    """Rows as text, two digits of base 36 for a cell between "low" and "high", so that a page stays small."""
    known = [v for row in picture["rows"] for v in row if v is not None]
    low, high = (min(known), max(known)) if known else (0.0, 1.0)
    step = (high - low) / _LEVELS or 1.0

    def digits(value: float | None) -> str:
        if value is None:
            return "  "
        level = round((value - low) / step)
        return _DIGITS[level // 36] + _DIGITS[level % 36]

    return {**picture, "low": low, "high": high, "rows": ["".join(map(digits, row)) for row in picture["rows"]]}


def _places(movers: Mapping[int, str], layers: LayerNorms | None, rows: Sequence[str]) -> list[list[int]]:
    """Step and row of each."""
    if layers is None:
        return []
    named, _ = _together_names(layers.names)
    place = dict(zip(layers.names, named, strict=True))
    at = {name: row for row, name in enumerate(rows)}
    return [[step, at[place[name]]] for step, name in movers.items() if place.get(name) in at]


def _together(names: tuple[str, ...], norms: NDArray[np.float64]) -> tuple[tuple[str, ...], NDArray[np.float64]]:
    named, groups = _together_names(names)
    if len(groups) == len(names):
        return names, norms
    place = {name: at for at, name in enumerate(groups)}
    where = np.array([place[name] for name in named])
    return groups, np.stack([_norm(norms[:, where == g]) for g in range(len(groups))], axis=1)


def _together_names(names: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Names cut to as many parts as give few enough rows, the same for all; neighbors where that hides too much."""
    named, groups = names, names
    for parts in range(max(name.count(".") for name in names), 0, -1):
        if len(groups) <= _ROWS:
            break
        shorter = tuple(".".join(name.split(".")[:parts]) for name in names)
        fewer = tuple(dict.fromkeys(shorter))
        if len(fewer) < _FEW:
            break
        named, groups = shorter, fewer
    if len(groups) > _ROWS:
        short = dict(zip(groups, _neighbors(groups), strict=True))
        named = tuple(short[name] for name in named)
        groups = tuple(dict.fromkeys(named))
    return named, groups


def _neighbors(names: tuple[str, ...]) -> list[str]:
    """Names of stretches that are as long as they must be: no layer is left out of the picture."""
    size = -(-len(names) // _ROWS)
    parts = [names[at : at + size] for at in range(0, len(names), size)]
    return [part[0] if len(part) == 1 else f"{part[0]} to {part[-1]}" for part in parts for _ in part]


def _norm(norms: NDArray[np.float64]) -> NDArray[np.float64]:
    with np.errstate(over="ignore", invalid="ignore"):
        return np.asarray(np.sqrt(np.sum(norms**2, axis=1)))


HUES, DASHES = 12, 5
_POINTS = 18_000  # of all curves in one chart
_FEW_RUNS = 8  # runs whose noise is drawn behind their lines
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
        noisy = len(runs) <= _FEW_RUNS
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
