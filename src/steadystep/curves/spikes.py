"""Jumps and ramps of the loss: those that healed are notes, those that did not are what the reading is for."""

from steadystep.curves.curve import Curve
from steadystep.curves.excursions import Excursion
from steadystep.curves.first_sign import early_norm, norm_before
from steadystep.curves.reading import Pattern
from steadystep.records import Severity

_LONG = 4  # points: more than a hard batch
_BRIEF = 32  # points
_DEEP = 0.5  # of the way the loss had come
_RAMP_DEPTH = 0.2  # of the level or of the way: less is a swing, no divergence
_WILD_NORM = 10.0  # times the usual: healthy runs stay under 8
_SWINGS = 1.5
_TOLD = 3  # of the healed ones

_HEALED = "nothing: one-step jumps are common in healthy runs and this one healed"
_SLOW = (
    "a rollback to a checkpoint from before step {step} would have been quicker; clip the gradient, and watch its norm"
)
_SPIKE = (
    "go back to a checkpoint from before step {step}, skip the batches around it, and go on with a lower learning "
    "rate; clip the gradient (max_grad_norm: 1.0)"
)
_DIVERGED = (
    "go back to a checkpoint well before step {step} and go on with a learning rate 2 to 10 times lower; more warm-up, "
    "clipping (max_grad_norm: 1.0) or a smaller beta2 (0.95) keep it from coming back"
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
    if one.is_ramp and deep:
        return _divergence(curve, one, step, told)
    norm = early_norm(curve, int(curve.steps[one.first]))
    wild = norm is not None and norm[1] >= _WILD_NORM
    slight = one.height < min(_DEEP * way, abs(one.base)) and not wild
    if one.end is None and one.length < 3 and one.height < abs(one.base) and not wild:
        return None
    if one.end is None:
        ends = "the log ends there" if one.length < 3 else "has not come back"
        return _pattern("spike-unhealed", "act", step, None, f"{told}, {ends}", _SPIKE)
    if one.length < _LONG and slight:
        return None
    back = int(curve.steps[one.end])
    grave = one.length >= _LONG or (wild and deep)
    advice = _SLOW if one.length >= _LONG else _HEALED
    evidence = f"{told} and was back at step {back}, {_points(one.length)} later"
    return _pattern("spike-healed", "warn" if grave else "info", step, back, evidence, advice)


def _divergence(curve: Curve, one: Excursion, step: int, told: str) -> Pattern:
    if one.end is None:
        return _pattern(
            "divergence", "act", step, None, f"{told} over {_points(one.peak - one.onset + 1)}, and stays up", _DIVERGED
        )
    back = int(curve.steps[one.end])
    evidence = f"{told} over {_points(one.peak - one.onset + 1)}; it was back at step {back}"
    return _pattern("divergence", "act" if one.length >= _LONG else "warn", step, back, evidence, _DIVERGED)


def _transient(curve: Curve, one: Excursion) -> Pattern:
    assert one.end is not None
    step, back = int(curve.steps[one.onset]), int(curve.steps[one.end])
    evidence = f"early on the {curve.name} rose from {one.base:.4g} to {one.top:.4g} and was back at step {back}"
    return _pattern("warm-up-transient", "info", step, back, evidence, "nothing: the first steps are like that")


def _summary(curve: Curve, small: list[Excursion]) -> list[Pattern]:
    if not small:
        return []
    highest = sorted(small, key=lambda one: -one.height)[:_TOLD]
    told = ", ".join(f"{one.base:.4g} to {one.top:.4g} at step {int(curve.steps[one.first])}" for one in highest)
    count = "one jump" if len(small) == 1 else f"{len(small)} jumps"
    evidence = f"{count} of the {curve.name}, healed within {_points(max(one.length for one in small))}: {told}"
    last = small[-1].last
    advice = "nothing: batches differ, and each jump healed by itself"
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
