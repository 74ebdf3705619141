"""Gradient norms of all layers over time, as a picture: the logarithm, because layers differ by orders of magnitude."""

import re
from collections.abc import Collection
from typing import Any

import numpy as np
from numpy.typing import NDArray

from steadystep.track.run import LayerNorms

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
