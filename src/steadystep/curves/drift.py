"""A loss that was better once: it crept up, or fell back to a plateau. Seen on medians of parts of the run."""

import numpy as np

from steadystep.curves.curve import Curve
from steadystep.curves.levels import Floats, blocks, means, noise
from steadystep.curves.reading import Pattern

_FEWEST = 48  # points
_PARTS = 32
_SIGMAS = 6.0
_LOST = 0.05  # of the way it had come
_SHARE = 0.03  # of the level
_COLLAPSED = 0.35  # of the way it had come
_RECENT = 0.9  # of the run: a best level after this is the present one

_TOO_HIGH = (
    "divide the learning rate by 3 to 10, or warm it up over more steps; take the checkpoint of step {step}, the best "
    "this run has been"
)
_DIVERGED = (
    "go back to a checkpoint from about step {step} and lower the learning rate; a guard would have spoken early"
)


def drift(curve: Curve) -> list[Pattern]:
    """At most one: the level of the end against the best level of the run."""
    count = len(curve)
    if count < _FEWEST or curve.signed:
        return []
    levels = blocks(curve.values, min(_PARTS, count // 6))
    best = int(np.argmin(levels))
    late = float(np.median(levels[-max(2, len(levels) // 10) :]))
    rise = late - float(levels[best])
    way = max(curve.start - float(levels[best]), 0.0)
    margin = max(_SIGMAS * _block_noise(curve.values, levels), _LOST * way, _SHARE * abs(float(levels[best])))
    if best > _RECENT * len(levels) or rise <= margin or not _stays_up(levels, best, rise):
        return []
    onset = _onset(curve, best, len(levels), float(levels[best]), rise)
    step = int(curve.steps[onset])
    flat = _is_flat(levels, best, rise)
    told = f"the {curve.name} was {levels[best]:.4g} about step {step} and is {late:.4g} at the end"
    if flat and rise >= _COLLAPSED * way:
        evidence = f"{told}: it fell back to a plateau, having begun at {curve.start:.4g}"
        return [_pattern("learning-rate-too-high", step, evidence, _TOO_HIGH)]
    if flat:
        return [_pattern("learning-rate-too-high", step, f"{told}: worse than its own best for good", _TOO_HIGH)]
    return [_pattern("divergence", step, f"{told}, still rising", _DIVERGED)]


def _pattern(kind: str, step: int, evidence: str, advice: str) -> Pattern:
    return Pattern(kind=kind, severity="warn", step=step, evidence=evidence, advice=advice.format(step=step))


def _block_noise(values: Floats, levels: Floats) -> float:
    """Sigma of one level: what its points give, or what neighbouring levels of the later half show."""
    half = levels[len(levels) // 2 :]
    between = float(np.median(np.abs(np.diff(half, n=2)))) / (0.6745 * np.sqrt(6.0)) if len(half) > 4 else 0.0
    within = 1.25 * noise(values) / np.sqrt(len(values) / len(levels))
    return max(between, float(within))


def _stays_up(levels: Floats, best: int, rise: float) -> bool:
    tail = levels[-max(2, (len(levels) - best) // 4) :]
    return bool((tail > levels[best] + 0.5 * rise).all())


def _is_flat(levels: Floats, best: int, rise: float) -> bool:
    """The later half of what follows the best level shows no rise any more."""
    after = levels[best:]
    half = after[len(after) // 2 :]
    if len(half) < 4:
        return False
    middle = len(half) // 2
    return bool(np.median(half[middle:]) - np.median(half[:middle]) < 0.1 * rise)


def _onset(curve: Curve, best: int, parts: int, level: float, rise: float) -> int:
    """The last point at which short means were still near the best level."""
    size = max(1, min(16, len(curve) // 64))
    short = means(curve.values, len(curve) // size)
    close = 2.5 * noise(curve.values) / np.sqrt(size)
    near = np.flatnonzero(short <= level + min(0.15 * rise, max(0.05 * rise, close)))
    begin = int(best * len(short) / parts)
    later = near[near >= begin]
    # why not simply the last: a lucky batch late in the run is no return; the first long absence counts
    if not len(later):
        return int(begin * len(curve) / len(short))
    breaks = np.flatnonzero(np.diff(later) > max(3, len(short) // 64))
    last = int(later[breaks[0]]) if len(breaks) else int(later[-1])
    return min(int((last + 1) * len(curve) / len(short)), len(curve) - 1)
