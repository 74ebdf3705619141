"""NaN and infinity: when, how often, and whether the run came back from it."""

import numpy as np

from steadystep.curves.curve import Curve
from steadystep.curves.first_sign import norm_before
from steadystep.curves.reading import Pattern

_ADVICE = (
    "go back to a checkpoint from before step {step}; look for log(0), 0/0 or weights that have grown too large, lower "
    "the learning rate, clip the gradient, and use bf16 instead of fp16"
)
_ONCE = "such updates must be skipped: steadystep.Guard does, and an fp16 loss scaler does too"
_WATCHED = "such updates must be skipped: the modes careful and autopilot do, observe only looks"


def non_finite(curve: Curve) -> list[Pattern]:
    """A loss that is no number; gradient norms that are none while the loss is."""
    return [*_loss(curve), *_norm(curve)]


def _loss(curve: Curve) -> list[Pattern]:
    series = curve.raw
    bad = np.flatnonzero(~np.isfinite(series.values))
    if not len(bad):
        return []
    first = int(series.steps[bad[0]])
    word = "NaN" if np.isnan(series.values[bad[0]]) else "infinite"
    if len(bad) == len(series):
        evidence = f"all {len(bad)} values of the {curve.name} are NaN or infinite"
        return [
            Pattern(
                kind="non-finite", severity="critical", step=first, evidence=evidence, advice=_ADVICE.format(step=first)
            )
        ]
    good_after = np.flatnonzero(np.isfinite(series.values[bad[-1] :]))
    before = series.values[: bad[0]][np.isfinite(series.values[: bad[0]])]
    was = f", from {before[-1]:.4g} at step {int(series.steps[bad[0] - 1])}" if len(before) else ""
    told = f"the {curve.name} is {word} at step {first}{was}"
    sign = norm_before(curve, first)
    if not len(good_after):
        stayed = f" and never comes back ({len(bad)} points)" if len(bad) > 1 else ", where the log ends"
        evidence = told + stayed + (f"; {sign}" if sign else "")
        return [
            Pattern(
                kind="non-finite", severity="critical", step=first, evidence=evidence, advice=_ADVICE.format(step=first)
            )
        ]
    until = int(series.steps[bad[-1]])
    evidence = (
        f"{told}; {len(bad)} of {len(series)} points are no numbers, the last at step {until}; it went on after that"
    )
    return [
        Pattern(kind="non-finite", severity="warn", step=first, until=until, evidence=evidence, advice=_once(curve))
    ]


def _once(curve: Curve) -> str:
    if curve.run.source != "steadystep":
        return _ONCE
    return _WATCHED if curve.run.settings.get("mode") == "observe" else ""


def _norm(curve: Curve) -> list[Pattern]:
    norms = curve.run.grad_norm
    bad = ~np.isfinite(norms.values)
    if not bad.any() or (curve.run.loss.values == 0.0).any():
        return []  # beside losses of exactly 0 it is another story: a hidden NaN
    count, first = int(bad.sum()), int(norms.steps[bad][0])
    share = count / len(norms)
    evidence = f"the gradient norm is no number at {count} of {len(norms)} points, first at step {first}"
    if share < 0.02 and not bad[-3:].all():
        advice = "routine for fp16 with a loss scaler, which skips such updates; without a scaler they must be skipped"
        until = int(norms.steps[bad][-1])
        return [
            Pattern(
                kind="non-finite-gradient", severity="info", step=first, until=until, evidence=evidence, advice=advice
            )
        ]
    return [
        Pattern(
            kind="non-finite-gradient",
            severity="warn",
            step=first,
            evidence=evidence,
            advice=_ADVICE.format(step=first),
        )
    ]
