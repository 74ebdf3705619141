"""A learning rate that was too high from the first update on: the loss leaves its first value upwards."""

import numpy as np

from steadystep.runs.curve import Curve
from steadystep.runs.levels import spread
from steadystep.runs.reading import Pattern

_ABOVE, _MOSTLY_ABOVE = 1.15, 0.985  # times the first loss; of the points
_FAR_ABOVE, _OFTEN_ABOVE = 3.0, 0.9
_APART = 1.5  # sigma of the second half
_ENDS_ABOVE, _ENDS_APART = 1.25, 2.0  # times the first losses; sigma
_LEAP, _LEAP_SIGMAS = 3.0, 10.0  # times the first loss; sigma
_SOON = 5  # a leap in the first fifth
_TENTH = (
    "divide the learning rate by 10, or warm it up from 0 over some hundred steps; clip the gradient (max_grad_norm: "
    "1.0); steadystep.find_lr shows the usable range"
)


def from_the_start(curve: Curve) -> list[Pattern]:
    """At most one: a loss that left its first value upwards and never came back below it."""
    count = len(curve)
    first = float(min(curve.values[0], np.median(curve.values[:3])))
    if first <= 0.0 or curve.signed:
        return []
    half = curve.values[count // 2 :]
    above = float((curve.values[max(3, count // 50) :] > first).mean())
    noise = spread(half, float(np.median(half)))
    apart = curve.late - first > _APART * noise
    steadily = curve.late > _ABOVE * first and above >= _MOSTLY_ABOVE and apart
    widely = curve.late > _FAR_ABOVE * first and above >= _OFTEN_ABOVE
    rate = _rate_in_use(curve)
    if steadily or widely:
        evidence = (
            f"the {curve.name} began at {first:.4g} and is {curve.late:.4g} at the end, above its first value at "
            f"{above:.0%} of the points{rate}"
        )
        return [_at_start(curve, evidence)]
    early = curve.values[: max(_SOON, count // _SOON)]
    top = float(early.max())
    if top > max(_LEAP * first, first + _LEAP_SIGMAS * curve.late_noise) and curve.late > 0.98 * first:
        peak = int(curve.steps[int(np.argmax(early))])
        evidence = (
            f"the {curve.name} jumped from {first:.4g} to {top:.4g} at step {peak} and is {curve.late:.4g} at the end, "
            f"no better than at the start{rate}"
        )
        return [_at_start(curve, evidence)]
    return []


def ends_above(curve: Curve) -> list[Pattern]:
    """At most one: a loss that is higher at the end than at the start, whatever it was in between."""
    half = curve.values[len(curve) // 2 :]
    rise = curve.late - curve.start
    noise = spread(half, float(np.median(half)))
    if curve.start <= 0.0 or rise <= max((_ENDS_ABOVE - 1.0) * curve.start, _ENDS_APART * noise):
        return []
    evidence = (
        f"the {curve.name} began at {curve.start:.4g}, was {curve.best:.4g} at best and is {curve.late:.4g} at the end"
        f"{_rate_in_use(curve)}"
    )
    step = int(curve.steps[int(np.argmin(curve.values))])
    return [Pattern(kind="learning-rate-too-high", severity="warn", step=step, evidence=evidence, advice=_TENTH)]


def _at_start(curve: Curve, evidence: str) -> Pattern:
    step = int(curve.steps[0])
    return Pattern(kind="learning-rate-too-high", severity="act", step=step, evidence=evidence, advice=_TENTH)


def _rate_in_use(curve: Curve) -> str:
    rates = curve.run.lr.values[np.isfinite(curve.run.lr.values)]
    return f"; the learning rate was up to {float(rates.max()):.3g}" if len(rates) else ""
