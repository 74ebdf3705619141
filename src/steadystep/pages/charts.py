"""Gradient norms of all layers over time, as a picture: the logarithm, because layers differ by orders of magnitude."""

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from steadystep.runs.run import LayerNorms, Run, Series

_COLUMNS, _ROWS = 240, 64
_FEW = 8  # rows of a picture that hides more than it shows


def heat(layers: LayerNorms | None, *, troubled: Collection[int] = ()) -> dict[str, Any] | None:
    """Rows of log10 norms on an even grid of steps; a cell keeps the largest norm of its stretch.

    A cell in which nothing was written down shows what came before it. "bad" marks cells with infinity, and with NaN at
    one of the `troubled` steps: elsewhere NaN means that there was no such layer.
    """
    if layers is None or not len(layers.steps) or not layers.names:
        return None
    names, norms = _together(layers.names, np.atleast_2d(layers.norms))
    first, last = int(layers.steps[0]), int(layers.steps[-1])
    columns = int(min(_COLUMNS, len(np.unique(layers.steps)) * 3, last - first + 1))
    place = (layers.steps - first) / max(last - first, 1) * columns
    column = np.minimum(place.astype(np.int64), columns - 1)
    cells = np.full((columns, len(names)), np.nan)
    bad = np.zeros((columns, len(names)), dtype=bool)
    for at in np.unique(column):
        rows = norms[column == at]
        worse = np.isin(layers.steps[column == at], list(troubled))
        bad[at] = np.isinf(rows).any(axis=0) | np.isnan(rows[worse]).any(axis=0)
        cells[at] = np.where(np.isfinite(rows), rows, -np.inf).max(axis=0)
    cells[~np.isfinite(cells)] = np.nan
    with np.errstate(divide="ignore"):
        cells = np.log10(np.maximum(cells, 0.0))
    cells[np.isneginf(cells)] = np.nan
    cells = _carried(cells, np.unique(column))
    return {
        "first": first,
        "last": last,
        "names": list(names),
        "rows": [[None if np.isnan(v) else round(float(v), 2) for v in row] for row in cells.T],
        "bad": [[int(c), int(r)] for c, r in np.argwhere(bad)][:4000],
    }


def _carried(cells: NDArray[np.float64], written: NDArray[np.int64]) -> NDArray[np.float64]:
    source = np.searchsorted(written, np.arange(len(cells)), side="right") - 1
    return cells[written[np.maximum(source, 0)]]


def _together(names: tuple[str, ...], norms: NDArray[np.float64]) -> tuple[tuple[str, ...], NDArray[np.float64]]:
    """Tensors of one module as one row, going up the names until there are few enough; neighbours where that fails."""
    while len(names) > _ROWS:
        short = [re.sub(r"\.?[^.]+$", "", name) or name for name in names]
        groups = list(dict.fromkeys(short))
        if short == list(names) or len(groups) < _FEW:
            short = _neighbours(names)
            groups = list(dict.fromkeys(short))
        place = {name: at for at, name in enumerate(groups)}
        where = np.array([place[name] for name in short])
        names, norms = tuple(groups), np.stack([_norm(norms[:, where == g]) for g in range(len(groups))], axis=1)
    return names, norms


def _neighbours(names: tuple[str, ...]) -> list[str]:
    """Names of stretches that are as long as they must be: no layer is left out of the picture."""
    size = -(-len(names) // _ROWS)
    parts = [names[at : at + size] for at in range(0, len(names), size)]
    return [part[0] if len(part) == 1 else f"{part[0]} to {part[-1]}" for part in parts for _ in part]


def _norm(norms: NDArray[np.float64]) -> NDArray[np.float64]:
    with np.errstate(over="ignore", invalid="ignore"):
        return np.asarray(np.sqrt(np.sum(norms**2, axis=1)))


DIGITS = 6  # of a number in a page; a chart shows three
_LARGEST = 1e300  # the difference of two values must still be a number where they are drawn


@final
@dataclass(frozen=True, slots=True)
class Thinned:
    """A curve reduced for drawing. A non-finite value breaks the line at its step."""

    steps: NDArray[np.int64]
    """The steps that are drawn."""
    values: NDArray[np.float64]
    """Their values."""

    def for_json(self) -> dict[str, Any]:
        """Return steps, values with None for gaps, and the value of each gap."""
        finite = np.isfinite(self.values)
        drawn = np.clip(self.values, -_LARGEST, _LARGEST)
        values = [float(f"{v:.{DIGITS}g}") if ok else None for v, ok in zip(drawn, finite, strict=True)]
        bad = [[int(s), _name(v)] for s, v in zip(self.steps[~finite], self.values[~finite], strict=True)]
        return {"x": [int(step) for step in self.steps], "y": values, "bad": bad}


def thin(series: Series, *, buckets: int, first: int | None = None, last: int | None = None) -> Thinned:
    """Reduce a curve to at most three points for each of `buckets` equal stretches of steps, and its two ends.

    Args:
        series: the curve.
        buckets: number of pixels to draw it in.
        first: where the picture begins; one point before it stays, so that the line enters from the edge.
        last: where it ends, with one point after it.
    """
    steps, values = _window(series, first, last)
    if len(steps) <= 2 * buckets:
        return Thinned(steps, values)
    place = steps.astype(np.float64)
    place = (place - place[0]) / max(place[-1] - place[0], 1.0) * buckets
    bucket = np.minimum(place.astype(np.int64), buckets - 1)
    finite = np.isfinite(values)
    good, bad = np.flatnonzero(finite), np.flatnonzero(~finite)
    keep = [np.array([0, len(steps) - 1]), _first_of_each(bucket[bad], bad)]
    if len(good):
        keep += [_extreme(values[good], bucket[good], good, np.minimum)]
        keep += [_extreme(values[good], bucket[good], good, np.maximum)]
    chosen = np.unique(np.concatenate(keep))
    return Thinned(steps[chosen], values[chosen])


@np.errstate(all="ignore")
def typical(series: Series, *, buckets: int) -> Thinned:
    """The median of each stretch: the line an eye would draw through a noisy curve."""
    finite = np.isfinite(series.values)
    steps, values = series.steps[finite], series.values[finite]
    if len(steps) < 4 * buckets:
        buckets = len(steps) // 4
    if buckets < 3:
        return Thinned(np.empty(0, dtype=np.int64), np.empty(0))
    cuts = np.linspace(0, len(steps), buckets + 1).astype(np.int64)
    middle = [int(np.median(steps[a:b])) for a, b in pairwise(cuts)]
    level = [float(np.median(values[a:b])) for a, b in pairwise(cuts)]
    return Thinned(np.array(middle, dtype=np.int64), np.array(level))


def _window(series: Series, first: int | None, last: int | None) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    start = 0 if first is None else max(int(np.searchsorted(series.steps, first, side="left")) - 1, 0)
    stop = len(series) if last is None else int(np.searchsorted(series.steps, last, side="right")) + 1
    return series.steps[start:stop], series.values[start:stop]


def _first_of_each(bucket: NDArray[np.int64], index: NDArray[np.int64]) -> NDArray[np.int64]:
    return index[np.unique(bucket, return_index=True)[1]]


def _extreme(
    values: NDArray[np.float64], bucket: NDArray[np.int64], index: NDArray[np.int64], pick: np.ufunc
) -> NDArray[np.int64]:
    starts = np.flatnonzero(np.diff(bucket, prepend=-1))
    best: NDArray[np.float64] = pick.reduceat(values, starts)
    sizes = np.diff(np.append(starts, len(values)))
    at_best = np.flatnonzero(values == np.repeat(best, sizes))
    return _first_of_each(bucket[at_best], index[at_best])


def _name(value: float) -> str:
    return "NaN" if np.isnan(value) else ("inf" if value > 0 else "-inf")


_MOST_METRICS = 24
_TYPICAL = 160  # points of the line through the noise
_SPREAD = 25.0  # times the median at which a linear axis shows nothing but the peak


def panels(
    run: Run, *, buckets: int = 1200, first: int | None = None, last: int | None = None
) -> tuple[dict[str, Any], ...]:
    """Loss and held-out loss together, then gradient norm, learning rate and every metric by itself."""

    def line(name: str, role: str, series: Series) -> dict[str, Any]:
        return {"name": name, "role": role, **thin(series, buckets=buckets, first=first, last=last).for_json()}

    held_out = {name: series for name, series in run.validation.items() if len(series)}
    metrics = {name: series for name, series in run.metrics.items() if len(series)}
    made = []
    if len(run.loss) or "val_loss" in held_out:
        lines = [line("loss", "train", run.loss), *_typical("train", run.loss)] if len(run.loss) else []
        if "val_loss" in held_out:
            lines.append(line("validation", "held-out", held_out["val_loss"]))
        made.append(_panel("loss", "Loss", lines, log=is_wide(run.loss)))
    if len(run.grad_norm):
        clipped = thin(Series(run.clipped, np.ones(len(run.clipped))), buckets=200, first=first, last=last).steps
        rug = [int(step) for step in clipped]
        lines = [line("norm", "norm", run.grad_norm), *_typical("norm", run.grad_norm)]
        made.append(_panel("norm", "Gradient norm", lines, log=True, rug=rug))
    if len(run.lr):
        made.append(_panel("lr", "Learning rate", [line("rate", "lr", run.lr)], log=False))
    if len(run.scale):
        made.append(_panel("scale", "Loss scale", [line("scale", "lr", run.scale)], log=True))
    for name, together in _by_name(metrics, held_out).items():
        lines = [line(label, role, series) for label, role, series in together]
        made.append(_panel(f"m-{name}", name, lines, log=any(is_wide(s) for _, _, s in together)))
    return tuple(made)


def left_out(run: Run) -> int:
    """Metrics beyond what a page can hold."""
    return max(0, len({*run.metrics, *run.validation} - {"val_loss"}) - _MOST_METRICS)


def _typical(role: str, series: Series) -> list[dict[str, Any]]:
    if len(series) <= 8 * _TYPICAL:
        return []
    return [{"name": "typical", "role": f"{role} typical", **typical(series, buckets=_TYPICAL).for_json()}]


def _panel(key: str, title: str, lines: list[dict[str, Any]], *, log: bool, rug: Iterable[int] = ()) -> dict[str, Any]:
    return {"key": key, "title": title, "lines": lines, "log": log, "rug": list(rug)}


def _by_name(metrics: Mapping[str, Series], held_out: Mapping[str, Series]) -> dict[str, list[tuple[str, str, Series]]]:
    names = [name for name in dict.fromkeys((*held_out, *metrics)) if name != "val_loss"][:_MOST_METRICS]
    both = ((metrics, "training", "train"), (held_out, "validation", "held-out"))
    return {n: [(label, role, source[n]) for source, label, role in both if n in source] for n in names}


def is_wide(series: Series) -> bool:
    """Whether a linear axis would show nothing but the peak."""
    values = series.values[np.isfinite(series.values)]
    if not len(values) or values.min() <= 0:
        return False
    return bool(values.max() / _SPREAD > np.median(values))
