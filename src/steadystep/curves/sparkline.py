"""A curve in one line of text: the highest point of each part, so that spikes stay visible."""

from itertools import pairwise

import numpy as np

from steadystep.curves.curve import Curve
from steadystep.track.run import Run

_BARS = "▁▂▃▄▅▆▇█"
_NO_NUMBER = "×"  # noqa: RUF001 - it stands for itself
_MOST = 0.95  # of the parts fit; higher ones are cut off
_WIDE = 50.0  # from smallest to largest: beyond that in logarithms


def sparkline(run: Run, *, width: int = 60) -> str:
    """Empty for a run without points."""
    curve = Curve.of(run)
    series = curve.raw
    if len(series) < 2:
        return ""
    bounds = np.linspace(0, len(series), min(width, len(series)) + 1).astype(int)
    tops = np.array([_top(series.values[a:b]) for a, b in pairwise(bounds)])
    good = np.isfinite(tops)
    if not good.any():
        return f"{curve.name} {_NO_NUMBER * len(tops)}"
    low, high = float(tops[good].min()), float(np.quantile(tops[good], _MOST))  # the first losses dwarf all others
    if low > 0.0 and high / low > _WIDE:
        tops, low, high = np.log(tops), float(np.log(low)), float(np.log(high))
    with np.errstate(invalid="ignore", over="ignore"):
        places = (tops / 2 - low / 2) / max(high / 2 - low / 2, 1e-300) * (len(_BARS) - 1)  # halves cannot overflow
        places = np.clip(places, 0, len(_BARS) - 1)
    bars = "".join(_BARS[round(float(p))] if g else _NO_NUMBER for p, g in zip(places, good, strict=True))
    first, last = (f"{value:.4g}" for value in (series.values[0], series.values[-1]))
    return f"{curve.name} {first} {bars} {last}"


def _top(part: "np.ndarray[tuple[int], np.dtype[np.float64]]") -> float:
    """NaN where the part holds more of what is no number than of numbers."""
    finite = part[np.isfinite(part)]
    return float(finite.max()) if 2 * len(finite) > len(part) else float("nan")
