"""Jumps and ramps of the loss: those that healed are notes, those that did not are what the reading is for.

A learning rate that was too high from the first update on is seen here too: the loss leaves its first value upwards.
"""

import math

import numpy as np

from steadystep.records import Severity
from steadystep.runs.curve import Curve
from steadystep.runs.levels import Excursion, spread
from steadystep.runs.reading import Pattern


def restarts(curve: Curve) -> list[Pattern]:
    """One note for all of them."""
    found = curve.run.restarts
    if not found:
        return []
    places = ", ".join(map(str, found[:5])) + (", ..." if len(found) > 5 else "")
    evidence = f"the run was resumed at step {places}{_jump(curve, found[0])}"
    advice = (
        "no change needed; if the loss is higher after a restart, the optimizer's state or the schedule was "
        "not restored"
    )
    return [Pattern(kind="restart", severity="info", step=found[0], until=found[-1], evidence=evidence, advice=advice)]


def _jump(curve: Curve, step: int) -> str:
    at = int(np.searchsorted(curve.steps, step))
    if not 3 <= at <= len(curve) - 3:
        return ""
    before, after = np.median(curve.values[max(0, at - 8) : at]), np.median(curve.values[at : at + 8])
    return f" ({curve.name} {before:.4g} before, {after:.4g} after)"


_BACK = 64  # points before the loss
_FEWEST_BEFORE = 16  # norms to know their level by
_FACTOR = 3.0
_SIGMAS = 6.0


def early_norm(curve: Curve, step: int) -> tuple[int, float] | None:
    """The step at which the gradient norm left its level for good before `step`, or at it, and by what factor."""
    norms = curve.run.grad_norm
    end = int(np.searchsorted(norms.steps, step, side="right"))
    with np.errstate(divide="ignore", invalid="ignore"):
        logs = np.log(norms.values[max(0, end - 5 * _BACK) : end])
    steps = norms.steps[max(0, end - 5 * _BACK) : end]
    calm = logs[: max(0, len(logs) - _BACK // 4)]
    calm = calm[np.isfinite(calm)]
    if len(calm) < _FEWEST_BEFORE:
        return None
    baseline = float(np.median(calm[-2 * _BACK :]))
    sigma = spread(calm[-2 * _BACK :], baseline)
    limit = baseline + max(math.log(_FACTOR), _SIGMAS * sigma)
    tail = slice(max(0, len(logs) - _BACK // 4), len(logs))
    high = np.flatnonzero(~(logs[tail] <= limit))
    if not len(high):
        return None
    at = int(high[0])
    top = float(np.max(np.nan_to_num(logs[tail][at:], nan=math.inf, posinf=math.inf)))
    return int(steps[tail][at]), math.exp(min(top - baseline, 700.0))


def norm_before(curve: Curve, step: int) -> str:
    """As a clause; empty when the gradient norm said nothing before."""
    found = early_norm(curve, step)
    if found is None:
        return ""
    at, factor = found
    if factor > _NO_NUMBER:
        return (
            "the gradient norm is not finite at the same step"
            if at == step
            else (f"the gradient norm came first: not finite from step {at} on")
        )
    size = f"{factor:.3g} times its level" if factor < 1e6 else "far above its level"
    if at == step:
        return f"the gradient norm rose to {size} at the same step"
    return f"the gradient norm came first: {size} from step {at} on"


_NO_NUMBER = 1e300  # times the level: so the place of NaN and infinity is written
_LONG = 4  # points: more than a hard batch
_BRIEF = 32  # points
_DEEP = 0.5  # of the way the loss had come
_RAMP_DEPTH = 0.2  # of the level or of the way: less is a swing, no divergence
_WILD_NORM = 10.0  # times the usual: healthy runs stay under 8
_SWINGS = 1.5
_TOLD = 3  # of the healed ones

_HEALED = "no change needed: one-step jumps are common in healthy runs, and the loss recovered"
_SLOW = (
    "a rollback to a checkpoint from before step {step} would have been faster; clip the gradient, and monitor its norm"
)
_SPIKE = (
    "roll back to a checkpoint from before step {step}, skip the batches around it, and continue with a lower "
    "learning rate; clip the gradient (max_grad_norm: 1.0)"
)
_DIVERGED = (
    "roll back to a checkpoint well before step {step} and continue with a learning rate 2 to 10 times lower; a "
    "longer warmup, clipping (max_grad_norm: 1.0) or a smaller beta2 (0.95) help against a recurrence"
)


def spikes(curve: Curve) -> list[Pattern]:
    """One pattern for each that matters, and one for all the small ones that healed."""
    small: list[Excursion] = []
    found: list[Pattern] = []
    for excursion in () if curve.signed else curve.excursions:
        if curve.swing is not None and excursion.height < _SWINGS * curve.swing[1]:
            continue  # told as an oscillation
        pattern = _judged(curve, excursion)
        if pattern is None:
            small.append(excursion)
        else:
            found.append(pattern)
    return [*found[:20], *_summary(curve, small)]


def _judged(curve: Curve, one: Excursion) -> Pattern | None:
    """None for a small one that healed."""
    if _at_restart(curve, one) and one.end is not None:
        return None
    if one.end is not None and one.onset < curve.warm and 1 < one.length <= max(_BRIEF, curve.warm):
        return _transient(curve, one)
    step, peak = int(curve.steps[one.onset]), int(curve.steps[one.highest])
    way = max(curve.start - one.base, 0.0)
    deep = one.height >= _RAMP_DEPTH * min(abs(one.base), way)
    sign = norm_before(curve, int(curve.steps[one.first]))
    told = f"the {curve.name} rose from {one.base:.4g} to {one.top:.4g} (step {peak})" + (f"; {sign}" if sign else "")
    if one.is_ramp and deep and (one.end is None or one.length >= _LONG):
        return _divergence(curve, one, step, told)
    norm = early_norm(curve, int(curve.steps[one.first]))
    wild = norm is not None and norm[1] >= _WILD_NORM
    slight = one.height < min(_DEEP * way, abs(one.base)) and not wild
    if one.end is None and one.length < 3 and one.height < abs(one.base) and not wild:
        return None
    if one.end is None:
        ends = "the log ends there" if one.length < 3 else "has not recovered"
        return _pattern("spike-unhealed", "act", step, None, f"{told}, {ends}", _SPIKE)
    if one.length < _LONG and slight:
        return None
    back = int(curve.steps[one.end])
    grave = one.length >= _LONG or (wild and deep)
    advice = _SLOW if one.length >= _LONG else _HEALED
    evidence = f"{told} and recovered by step {back}, {_points(one.length)} later"
    return _pattern("spike-healed", "warn" if grave else "info", step, back, evidence, advice)


def _divergence(curve: Curve, one: Excursion, step: int, told: str) -> Pattern:
    if one.end is None:
        return _pattern(
            "divergence",
            "act",
            step,
            None,
            f"{told} over {_points(one.peak - one.onset + 1)} and stays high",
            _DIVERGED,
        )
    back = int(curve.steps[one.end])
    evidence = f"{told} over {_points(one.peak - one.onset + 1)}; it recovered by step {back}"
    return _pattern("divergence", "act", step, back, evidence, _DIVERGED)


def _transient(curve: Curve, one: Excursion) -> Pattern:
    assert one.end is not None
    step, back = int(curve.steps[one.onset]), int(curve.steps[one.end])
    evidence = (
        f"early in the run the {curve.name} rose from {one.base:.4g} to {one.top:.4g} and recovered by step {back}"
    )
    return _pattern(
        "warm-up-transient", "info", step, back, evidence, "no change needed: this is common in the first steps"
    )


def _summary(curve: Curve, small: list[Excursion]) -> list[Pattern]:
    if not small:
        return []
    highest = sorted(small, key=lambda one: -one.height)[:_TOLD]
    told = ", ".join(f"{one.base:.4g} to {one.top:.4g} at step {int(curve.steps[one.first])}" for one in highest)
    count = "one jump" if len(small) == 1 else f"{len(small)} jumps"
    evidence = f"{count} of the {curve.name}, recovered within {_points(max(one.length for one in small))}: {told}"
    last = small[-1].last
    advice = "no change needed: batches differ, and the loss recovered each time"
    return [
        _pattern("spikes-healed", "info", int(curve.steps[small[0].onset]), int(curve.steps[last]), evidence, advice)
    ]


def _at_restart(curve: Curve, one: Excursion) -> bool:
    """The first points after another process took over."""
    before = int(curve.steps[max(0, one.onset - 2)])
    return any(before <= restart <= int(curve.steps[one.first]) for restart in curve.run.restarts)


def _points(count: int) -> str:
    return "one point" if count == 1 else f"{count} points"


def _pattern(kind: str, severity: Severity, step: int, until: int | None, evidence: str, advice: str) -> Pattern:
    return Pattern(
        kind=kind, severity=severity, step=step, until=until, evidence=evidence, advice=advice.format(step=step)
    )


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
