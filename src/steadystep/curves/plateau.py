"""A loss that came down and then stood still. A note, unless it stopped early and far up."""

import math
from dataclasses import dataclass
from typing import final

import numpy as np

from steadystep.curves.curve import Curve
from steadystep.curves.levels import Floats, blocks
from steadystep.curves.reading import Pattern
from steadystep.records import Severity

_FEWEST = 40  # points
_FLAT = 0.004  # of the way: less is no progress
_FADING = 0.02  # of the way: the rest of an approach that has run out
_FADED = 0.4  # of what the stretch before gained; a power law, as healthy runs follow, keeps half or more
_VISIBLE = 0.09  # of the way: progress of this size must be visible above the noise, or nothing can be said
_CERTAIN, _SURE = 2.5, 3.0  # standard errors
_EARLY = 0.6  # of the run
_POOR, _HARDLY = 0.5, 0.9  # of the first loss
_STRETCHES = ((0.2, 0.4), (0.45, 0.65), (0.75, 1.0))  # of the run

_WAIT = (
    "the steps since were for nothing: stop there, or lower the learning rate (a decay often takes the loss further)"
)
_SMALL = (
    "training and validation stop at the same level: the model is too small, the learning rate unfit or regularisation "
    "too strong; try a larger model, another learning rate and less weight decay or dropout"
)


@final
@dataclass(frozen=True, slots=True)
class Flat:
    """Since which point, and at which level."""

    since: int
    level: float


def plateau(curve: Curve) -> list[Pattern]:
    """At most one, with `underfitting` instead where validation stands at the same level."""
    flat = stands_still(curve.values)
    if flat is None or curve.signed:
        return []
    step = int(curve.steps[flat.since])
    share = 1.0 - flat.since / len(curve)
    evidence = (
        f"the {curve.name} came down from {curve.start:.4g} to {flat.level:.4g} by step {step} and has not improved "
        f"in the {share:.0%} of the run since"
    )
    poor = curve.start > 0.0 and flat.level > _POOR * curve.start
    severity: Severity = "warn" if curve.start > 0.0 and flat.level > _HARDLY * curve.start else "info"
    found = [_pattern("plateau", severity, step, evidence, _WAIT)]
    held_out = curve.run.validation.get("val_loss")
    if poor and curve.name == "loss" and held_out is not None and len(held_out) >= 4:
        last = float(np.median(held_out.values[-max(2, len(held_out) // 8) :]))
        if abs(last - flat.level) < 0.1 * abs(flat.level):
            told = f"training stays at {flat.level:.4g} and validation at {last:.4g}, having begun at {curve.start:.4g}"
            found.insert(0, _pattern("underfitting", severity, step, told, _SMALL))
    return found


def stands_still(values: Floats) -> Flat | None:
    """None for a curve that moves, and for one so noisy or short that nobody can tell."""
    count = len(values)
    if count < _FEWEST:
        return None
    first_part, early, late = (_tame(values[int(a * count) : int(b * count)]) for a, b in _STRETCHES)
    level = float(np.median(late))
    first = float(max(values[0], np.median(values[:3])))
    way = first - level
    error = math.hypot(_error(early), _error(late))
    gained = float(np.mean(early) - np.mean(late))
    if way <= 0.0 or _CERTAIN * error > _VISIBLE * way:
        return None
    still = abs(gained) <= max(_SURE * error, _FLAT * way)
    before = float(np.mean(first_part) - np.mean(early))
    if not still and not 0.0 < gained <= min(_FADING * way, _FADED * before):
        return None
    parts = blocks(values, min(100, count // 4))
    near = level + max(0.03 * way, _CERTAIN * error)
    since = int(np.argmax(parts <= near))
    if since > _EARLY * len(parts):
        return None
    return Flat(min(count - 1, int(since * count / len(parts))), level)


def _tame(part: Floats) -> Floats:
    """Single jumps are brought down to four sigma: a mean of a few points would feel them."""
    middle = float(np.median(part))
    reach = 4.0 * 1.4826 * float(np.median(np.abs(part - middle)))
    return np.clip(part, middle - reach, middle + reach) if reach > 0.0 else part


def _error(part: Floats) -> float:
    """Standard error of the mean; noise that hangs together from point to point counts for more."""
    times = np.arange(len(part)) - (len(part) - 1) / 2
    slope = float(times @ part) / max(float(times @ times), 1.0)
    rest = part - part.mean() - slope * times
    power = float(rest @ rest)
    if power <= 0.0:
        return 0.0
    joined = min(max(float(rest[1:] @ rest[:-1]) / power, 0.0), 0.95)
    return math.sqrt(power * (1.0 + joined) / (1.0 - joined)) / len(part)


def _pattern(kind: str, severity: Severity, step: int, evidence: str, advice: str) -> Pattern:
    return Pattern(kind=kind, severity=severity, step=step, evidence=evidence, advice=advice)
