"""Curves for drawing: reduced to what a screen can show, one panel for each quantity."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from steadystep.runs.run import Run, Series

DIGITS = 5  # of a number in a page; a chart shows four
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
    sizes = np.diff(cuts)
    ranked = values[np.lexsort((values, np.repeat(np.arange(buckets), sizes)))]  # each stretch in order of its values
    low, high = cuts[:-1] + (sizes - 1) // 2, cuts[:-1] + sizes // 2
    return Thinned((steps[low] + steps[high]) // 2, ranked[low] / 2 + ranked[high] / 2)


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
_GHOSTS = 100  # refused values in a chart
_TYPICAL = 160  # points of the line through the noise
_FEWEST_BUCKETS = 100  # of a metric among many
_SPREAD = 25.0  # times the median at which a linear axis shows nothing but the peak


def panels(
    run: Run, *, buckets: int = 1000, first: int | None = None, last: int | None = None
) -> tuple[dict[str, Any], ...]:
    """Loss and held-out loss together, then gradient norm, learning rate and every metric by itself."""

    def line(name: str, role: str, series: Series, buckets: int = buckets) -> dict[str, Any]:
        return {"name": name, "role": role, **thin(series, buckets=buckets, first=first, last=last).for_json()}

    held_out = {name: series for name, series in run.validation.items() if len(series)}
    metrics = {name: series for name, series in run.metrics.items() if len(series)}
    skipped = {i.step for i in run.incidents if not i.stepped}
    made = []
    if len(run.loss) or "val_loss" in held_out:
        loss, ghosts = _without(run.loss, skipped)
        lines = [line("loss", "train", loss), *_typical("train", loss)] if len(run.loss) else []
        if "val_loss" in held_out:
            lines.append(line("validation", "held-out", held_out["val_loss"]))
        made.append(_panel("loss", "Loss", lines, axis="loss", log=is_wide(loss), ghosts=_points(ghosts, first, last)))
    if len(run.grad_norm):
        norm, ghosts = _without(run.grad_norm, skipped | {i.step for i in run.incidents if i.scaled_to is not None})
        clipped = thin(Series(run.clipped, np.ones(len(run.clipped))), buckets=200, first=first, last=last).steps
        rug = [int(step) for step in clipped]
        lines = [line("norm", "norm", norm), *_typical("norm", norm)]
        axis = "L2 norm before clipping"
        made.append(
            _panel("norm", "Gradient norm", lines, axis=axis, log=True, rug=rug, ghosts=_points(ghosts, first, last))
        )
    if len(run.lr):
        ghosts = _refused_rates(run)
        lines = [line("rate", "lr", run.lr, buckets // 4)]  # smooth, and a jump keeps its point
        made.append(
            _panel("lr", "Learning rate", lines, axis="learning rate", log=False, ghosts=_points(ghosts, first, last))
        )
    if len(run.scale):
        made.append(_panel("scale", "Loss scale", [line("scale", "lr", run.scale)], axis="factor", log=True))
    named = _by_name(metrics, held_out)
    fewer = min(buckets, max(_FEWEST_BUCKETS, buckets // max(sum(map(len, named.values())), 1)))
    for name, together in named.items():
        lines = [one for label, role, s in together for one in (line(label, role, s, fewer), *_typical(role, s))]
        made.append(_panel(f"m-{name}", name, lines, axis=name, log=any(is_wide(s) for _, _, s in together)))
    return tuple(made)


def packed(charts: Mapping[str, Any]) -> dict[str, Any]:
    """The same for a page, which has to be small: in place of the steps of a line, the first and the distances."""
    near = {step: {"panels": list(map(_packed, told["panels"]))} for step, told in charts.get("near", {}).items()}
    return {**charts, "panels": list(map(_packed, charts["panels"])), "near": near}


def _packed(panel: Mapping[str, Any]) -> dict[str, Any]:
    lines = []
    for line in panel["lines"]:
        apart = np.diff(line["x"]).tolist()
        even = len(set(apart)) == 1
        lines.append({**line, "x": {"from": line["x"][0] if line["x"] else 0, "by": apart[0] if even else apart}})
    return {**panel, "lines": lines}


def _refused_rates(run: Run) -> Series:
    found = [(i.step, i.refused_lr) for i in run.incidents if i.refused_lr is not None]
    return Series(np.array([s for s, _ in found], dtype=np.int64), np.array([v for _, v in found], dtype=np.float64))


def _points(series: Series, first: int | None, last: int | None) -> list[list[float]]:
    few = thin(series, buckets=_GHOSTS, first=first, last=last).for_json()
    return [[step, value] for step, value in zip(few["x"], few["y"], strict=True) if value is not None]


def _without(series: Series, steps: Collection[int]) -> tuple[Series, Series]:
    """The curve without the values of refused updates, and those; a NaN stays, as a gap."""
    apart = np.isin(series.steps, list(steps)) & np.isfinite(series.values)
    if not apart.any():
        return series, Series()
    return Series(series.steps[~apart], series.values[~apart]), Series(series.steps[apart], series.values[apart])


def metrics_left_out(run: Run) -> int:
    """Metrics beyond what a page can hold."""
    return max(0, len({*run.metrics, *run.validation} - {"val_loss"}) - _MOST_METRICS)


def _typical(role: str, series: Series) -> list[dict[str, Any]]:
    if len(series) <= 8 * _TYPICAL:
        return []
    return [{"name": "typical", "role": f"{role} typical", **typical(series, buckets=_TYPICAL).for_json()}]


def _panel(
    key: str,
    title: str,
    lines: list[dict[str, Any]],
    *,
    axis: str,
    log: bool,
    rug: Iterable[int] = (),
    ghosts: Sequence[Sequence[float]] = (),
) -> dict[str, Any]:
    """`ghosts` are step and value of what the guard refused."""
    made = {"key": key, "title": title, "axis": axis, "lines": lines, "log": log, "rug": list(rug)}
    return made | {"ghosts": list(ghosts)}


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
