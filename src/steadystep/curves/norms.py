"""What the gradient norms themselves show: clipped before they were logged, never logged, or growing."""

import numpy as np

from steadystep.curves.curve import Curve
from steadystep.curves.levels import blocks
from steadystep.curves.reading import Pattern

_FEWEST = 32
_CLIPPED = 0.3  # of the points at one ceiling
_GREW = 10.0


def norms(curve: Curve) -> list[Pattern]:
    """At most one."""
    series = curve.run.grad_norm
    good = np.isfinite(series.values)
    values, steps = series.values[good], series.steps[good]
    if len(values) < _FEWEST:
        return []
    first = int(steps[0])
    top = float(values.max())
    if float(values.min()) == top:
        evidence = (
            f"the gradient norm is {top:.4g} at all {len(values)} points: it was not measured, or not after each step"
        )
        advice = "log the norm that clip_grad_norm_ returns, at the step it belongs to"
        return [_note("stale-gradient-norm", first, evidence, advice)]
    at_top = values >= top * (1.0 - 1e-3)
    if at_top.mean() >= _CLIPPED:
        evidence = f"{at_top.mean():.0%} of the gradient norms are {top:.4g}: they were logged after clipping"
        advice = "log the norm before clipping (what clip_grad_norm_ returns): a spike cannot be seen in these"
        return [_note("clipped-gradient-norm", first, evidence, advice)]
    longest, begin = _longest_run(values)
    if longest >= max(_FEWEST, 0.2 * len(values)):
        evidence = (
            f"the gradient norm is {values[begin]:.4g} for {longest} points in a row from step {int(steps[begin])} on"
        )
        return [_note("stale-gradient-norm", int(steps[begin]), evidence, "the logger writes an old value again")]
    levels = blocks(values, 16)
    late, low = float(np.median(levels[-2:])), float(levels[2:].min())
    if late > _GREW * low > 0.0 and int(np.argmin(levels)) < 12:
        at = int(steps[int(np.argmin(levels) * len(values) / 16)])
        evidence = f"the gradient norm has grown from {low:.3g} about step {at} to {late:.3g}"
        return [_note("growing-gradient-norm", at, evidence, "watch it: clip the gradient, or lower the learning rate")]
    return []


def _longest_run(values: "np.ndarray[tuple[int], np.dtype[np.float64]]") -> tuple[int, int]:
    changes = np.flatnonzero(np.diff(values, prepend=np.nan, append=np.nan) != 0.0)
    lengths = np.diff(changes)
    at = int(np.argmax(lengths))
    return int(lengths[at]), int(changes[at])


def _note(kind: str, step: int, evidence: str, advice: str) -> Pattern:
    return Pattern(kind=kind, severity="info", step=step, evidence=evidence, advice=advice)
