"""NaN and infinity: when, how often, and whether the run came back from it."""

import numpy as np

from steadystep.runs.curve import Curve
from steadystep.runs.levels import blocks
from steadystep.runs.reading import Pattern
from steadystep.runs.spikes import norm_before

_ADVICE = (
    "roll back to a checkpoint from before step {step}; check for log(0), 0/0 or weights that have grown too "
    "large, lower the learning rate; clip the gradient (max_grad_norm: 1.0); if the run uses fp16, use bf16"
)
_ONCE = "skip such updates: steadystep.Guard does; if the run uses fp16, its loss scaler does too"
_WATCHED = "skip such updates: the modes careful and autopilot do, observe only records"


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
        stayed = f" and never recovers ({len(bad)} points)" if len(bad) > 1 else ", where the log ends"
        evidence = told + stayed + (f"; {sign}" if sign else "")
        return [
            Pattern(
                kind="non-finite", severity="critical", step=first, evidence=evidence, advice=_ADVICE.format(step=first)
            )
        ]
    until = int(series.steps[bad[-1]])
    evidence = (
        f"{told}; {len(bad)} of {len(series)} points non-finite, the last at step {until}; the run continued after that"
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
    evidence = f"the gradient norm is non-finite at {count} of {len(norms)} points, first at step {first}"
    if share < 0.02 and not bad[-3:].all():
        advice = "skip such updates; if the run uses fp16 with a loss scaler, this is routine: the scaler skips them"
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
        evidence = f"the gradient norm is {top:.4g} at all {len(values)} points: it was not measured at each step"
        advice = "log the norm that clip_grad_norm_ returns, at the step it belongs to"
        return [_note("stale-gradient-norm", first, evidence, advice)]
    at_top = values >= top * (1.0 - 1e-3)
    if at_top.mean() >= _CLIPPED:
        evidence = f"{at_top.mean():.0%} of the gradient norms are {top:.4g}: it was logged after clipping"
        advice = "log the norm before clipping (what clip_grad_norm_ returns): spikes are invisible after it"
        return [_note("clipped-gradient-norm", first, evidence, advice)]
    longest, begin = _longest_run(values)
    if longest >= max(_FEWEST, 0.2 * len(values)):
        evidence = (
            f"the gradient norm is {values[begin]:.4g} for {longest} points in a row from step {int(steps[begin])} on"
        )
        return [_note("stale-gradient-norm", int(steps[begin]), evidence, "the logger repeats an old value")]
    levels = blocks(values, 16)
    late, low = float(np.median(levels[-2:])), float(levels[2:].min())
    if late > _GREW * low > 0.0 and int(np.argmin(levels)) < 12:
        at = int(steps[int(np.argmin(levels) * len(values) / 16)])
        evidence = f"the gradient norm has grown from {low:.3g} around step {at} to {late:.3g}"
        return [
            _note(
                "growing-gradient-norm",
                at,
                evidence,
                "watch it; if it continues, clip the gradient or lower the learning rate",
            )
        ]
    return []


def _longest_run(values: "np.ndarray[tuple[int], np.dtype[np.float64]]") -> tuple[int, int]:
    changes = np.flatnonzero(np.diff(values, prepend=np.nan, append=np.nan) != 0.0)
    lengths = np.diff(changes)
    at = int(np.argmax(lengths))
    return int(lengths[at]), int(changes[at])


def _note(kind: str, step: int, evidence: str, advice: str) -> Pattern:
    return Pattern(kind=kind, severity="info", step=step, evidence=evidence, advice=advice)
