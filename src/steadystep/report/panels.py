"""Which charts a run gets, and what is drawn in them."""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from steadystep.report.thinning import thin, typical
from steadystep.track.run import Run, Series

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
