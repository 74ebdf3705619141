"""A loss that was better once: it crept up, or fell back to a plateau. Seen on medians of parts of the run."""

import numpy as np

from steadystep.runs.curve import Curve, cycle, error_of
from steadystep.runs.levels import Floats, bend_noise, blocks, means, noise
from steadystep.runs.reading import Pattern
from steadystep.runs.run import Series
from steadystep.runs.table import higher_is_better

_DRIFT_FEWEST = 48  # points
_DRIFT_PARTS = 32
_DRIFT_SIGMAS = 6.0
_LOST = 0.05  # of the way it had come
_SHARE = 0.03  # of the level
_COLLAPSED = 0.35  # of the way it had come
_RECENT = 0.9  # of the run: a best level after this is the present one

_TOO_HIGH = (
    "divide the learning rate by 3 to 10, or warm it up over more steps; use the checkpoint of step {step}, the "
    "best of this run"
)
_DIVERGED = "roll back to a checkpoint from about step {step} and lower the learning rate; a guard warns earlier"


def drift(curve: Curve) -> list[Pattern]:
    """At most one: the level of the end against the best level of the run."""
    count = len(curve)
    if count < _DRIFT_FEWEST or curve.signed:
        return []
    levels = blocks(curve.values, min(_DRIFT_PARTS, count // 6))
    best = int(np.argmin(levels))
    late = float(np.median(levels[-max(2, len(levels) // 10) :]))
    rise = late - float(levels[best])
    way = max(curve.start - float(levels[best]), 0.0)
    margin = max(_DRIFT_SIGMAS * _block_noise(curve.values, levels), _LOST * way, _SHARE * abs(float(levels[best])))
    if best > _RECENT * len(levels) or rise <= margin or not _stays_up(levels, best, rise):
        return []
    onset = _onset(curve, best, len(levels), float(levels[best]), rise)
    step = int(curve.steps[onset])
    flat = _is_flat(levels, best, rise)
    told = f"the {curve.name} was {levels[best]:.4g} around step {step} and is {late:.4g} at the end"
    if flat and rise >= _COLLAPSED * way:
        evidence = f"{told}: it regressed to a plateau; it began at {curve.start:.4g}"
        return [_drift_pattern("learning-rate-too-high", step, evidence, _TOO_HIGH)]
    if flat:
        return [_drift_pattern("learning-rate-too-high", step, f"{told}: it did not return to its best", _TOO_HIGH)]
    return [_drift_pattern("divergence", step, f"{told}, still rising", _DIVERGED)]


def _drift_pattern(kind: str, step: int, evidence: str, advice: str) -> Pattern:
    return Pattern(kind=kind, severity="warn", step=step, evidence=evidence, advice=advice.format(step=step))


def _block_noise(values: Floats, levels: Floats) -> float:
    """Sigma of one level: what its points give, or what neighbouring levels of the later half show."""
    half = levels[len(levels) // 2 :]
    between = bend_noise(half) if len(half) > 4 else 0.0
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


_FEWEST_VALIDATIONS = 5  # validations
_MANY = 12
_PARTS = 20
_SIGMAS = 4.0
_RISE = 0.02  # of the level
# of the way validation had come
_WIDE = 0.15  # of the validation level

_OVERFITTING = (
    "use the weights of step {step} (early stopping); then more data or augmentation, weight decay or dropout, or a "
    "smaller model"
)
_GAP = "no change needed while validation does not rise; more data or regularization narrows the gap"


def held_out(curve: Curve) -> list[Pattern]:
    """Overfitting of the validation loss, else of another metric; else the gap, if there is one."""
    for name, series in _candidates(curve):
        values, steps = _finite(series)
        if len(values) < _FEWEST_VALIDATIONS:
            continue
        found = _rise(curve, name, values, steps)
        if found is not None:
            return [found]
    for name, series in _candidates(curve):
        found = _gap(curve, name, *_finite(series))
        if found is not None:
            return [found]
    return []


def _candidates(curve: Curve) -> list[tuple[str, Series]]:
    listed = curve.run.validation
    loss = [("val_loss", listed["val_loss"])] if "val_loss" in listed else []
    others = [(name, error_of(name, series)) for name, series in listed.items() if higher_is_better(name)]
    return [*loss, *others]


def _finite(series: Series) -> "tuple[Floats, np.ndarray[tuple[int], np.dtype[np.int64]]]":
    good = np.isfinite(series.values)
    return np.clip(series.values[good], -1e150, 1e150), series.steps[good]


def _rise(
    curve: Curve, name: str, values: Floats, steps: "np.ndarray[tuple[int], np.dtype[np.int64]]"
) -> Pattern | None:
    count = min(_PARTS, len(values))
    levels = _steadied(means(values, count))
    lowest = int(np.argmin(levels))
    late = float(np.mean(levels[-max(1, count // 10) :]))
    best = float(levels[lowest])
    rise = late - best
    margin = max(_SIGMAS * _level_noise(values, levels), _RISE * abs(best), _LOST * max(float(levels[0]) - best, 0.0))
    after = levels[lowest:]
    if lowest >= count - 2 or rise <= margin or not _climbs(after):
        return None
    plain = means(values, count)
    around = max(0, lowest - 1)
    turn = around + int(np.argmin(plain[around : lowest + 2]))
    at = int(steps[min(len(steps) - 1, int((turn + 0.5) * len(values) / count))])
    if not _training_fell(curve, at):
        return None
    worst = float(values[-1])
    word = name if not higher_is_better(name) else f"error of {name}"
    evidence = (
        f"{word} was lowest, {best:.4g}, around step {at} and rose to {late:.4g} by the end (last {worst:.4g}), "
        f"while the training {curve.name} kept falling, to {curve.late:.4g}"
    )
    return Pattern(kind="overfitting", severity="warn", step=at, evidence=evidence, advice=_OVERFITTING.format(step=at))


def _level_noise(values: Floats, levels: Floats) -> float:
    if len(values) < _MANY:  # a handful of points: their differences are mostly the curve itself, its bends less so
        return 0.6 * bend_noise(values)
    within = noise(values) / np.sqrt(len(values) / len(levels))
    return float(max(within, bend_noise(levels[len(levels) // 4 :]) if len(levels) >= 8 else 0.0))


def _steadied(levels: Floats) -> Floats:
    """Each with the median of itself and its neighbours: one lucky validation is no turning point."""
    if len(levels) < 5:
        return levels
    middle = np.median(np.stack([levels[:-2], levels[1:-1], levels[2:]]), axis=0)
    return np.concatenate([levels[:1], middle, [np.median(levels[-2:])]])


def _climbs(after: Floats) -> bool:
    """More pairs of levels rise than fall, by far."""
    upper = np.triu(np.sign(after[None, :] - after[:, None]), k=1)
    pairs = len(after) * (len(after) - 1) / 2
    return bool(upper.sum() / pairs > 0.4)


def _training_fell(curve: Curve, step: int) -> bool:
    """From `step` to the end, or at least it did not rise."""
    at = int(np.searchsorted(curve.steps, step))
    size = max(4, len(curve) // 20)
    if len(curve) < 8 or curve.name in curve.run.validation:
        return True
    then = float(np.median(curve.values[max(0, at - size) : at + size]))
    return curve.late <= then + max(0.02 * abs(then), curve.late_noise)


def _gap(
    curve: Curve, name: str, values: Floats, steps: "np.ndarray[tuple[int], np.dtype[np.int64]]"
) -> Pattern | None:
    comparable = (curve.name == "loss") == (name == "val_loss")
    if len(values) < _FEWEST_VALIDATIONS or len(curve) < 16 or not comparable or curve.name in curve.run.validation:
        return None
    near = _smooth_at(curve, steps)
    part = max(2, len(values) // 5)
    late = float(np.mean((values - near)[-part:]))
    level = float(np.mean(values[-part:]))
    error = 3.0 * float(np.hypot(noise(values), curve.late_noise)) / np.sqrt(part)
    if late < max(_WIDE * abs(level), error):
        return None
    step = int(steps[int(np.argmax((values - near) > 0.5 * late))])
    evidence = (
        f"{name} ends at {level:.4g} and training at {level - late:.4g}, a gap of {late / abs(level):.0%}; validation "
        "has not risen"
    )
    return Pattern(kind="generalisation-gap", severity="info", step=step, evidence=evidence, advice=_GAP)


def _smooth_at(curve: Curve, steps: "np.ndarray[tuple[int], np.dtype[np.int64]]") -> Floats:
    """The training curve at the steps of the validations, averaged around them."""
    size = max(1, len(curve) // 100)
    sums = np.concatenate([[0.0], np.cumsum(curve.values)])
    middle = np.searchsorted(curve.steps, steps)
    low, high = np.clip(middle - size, 0, len(curve) - 1), np.clip(middle + size, 1, len(curve))
    return np.asarray((sums[high] - sums[low]) / (high - low))


_FEWEST_RATES = 48  # rates
_LARGE = 0.12

_ADVICE = "lower the learning rate (try a third) or the momentum, or use larger batches"
_PLANNED = "no change needed if the learning-rate cycles are intended"


def oscillation(curve: Curve) -> list[Pattern]:
    """At most one."""
    found = curve.swing
    if found is None or curve.signed:
        return []
    period, swing = found
    begin = len(curve) // 4
    level = float(np.median(curve.values[begin:]))
    way = curve.progress
    every = max(1, int(np.median(np.diff(curve.steps))))
    step = int(curve.steps[begin])
    evidence = (
        f"from step {step} the {curve.name} oscillates by {swing:.3g} around {level:.4g} with a period of "
        f"{period * every:.3g} steps"
    )
    if _follows_rate(curve, period * every):
        return [_swing_pattern("oscillation", False, step, f"{evidence}, in step with the learning rate", _PLANNED)]
    return [_swing_pattern("oscillation", swing > _LARGE * max(abs(level), 0.5 * way), step, evidence, _ADVICE)]


def _follows_rate(curve: Curve, steps: float) -> bool:
    """The learning rate goes up and down as often."""
    rates = curve.run.lr.values
    rates = rates[np.isfinite(rates)]
    if len(rates) < _FEWEST_RATES or rates.max() < 1.5 * rates.min():
        return False
    found = cycle(rates)
    if found is None:
        return False
    every = max(1, int(np.median(np.diff(curve.run.lr.steps))))
    return 0.7 < found[0] * every / steps < 1.4


def _swing_pattern(kind: str, loud: bool, step: int, evidence: str, advice: str) -> Pattern:
    return Pattern(kind=kind, severity="warn" if loud else "info", step=step, evidence=evidence, advice=advice)
