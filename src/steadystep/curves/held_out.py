"""Validation against training: overfitting is a validation that rises for real; a gap alone is a note."""

import numpy as np

from steadystep.curves.curve import Curve, error_of
from steadystep.curves.levels import Floats, means, noise
from steadystep.curves.reading import Pattern
from steadystep.curves.roles import higher_is_better
from steadystep.track.run import Series

_FEWEST = 5  # validations
_MANY = 12
_PARTS = 20
_SIGMAS = 4.0
_RISE = 0.02  # of the level
_LOST = 0.05  # of the way validation had come
_WIDE = 0.15  # of the validation level

_OVERFITTING = (
    "use the weights of step {step} (early stopping); then more data or augmentation, weight decay or dropout, or a "
    "smaller model"
)
_GAP = "nothing needs to change while validation does not rise; more data or regularisation would narrow the gap"


def held_out(curve: Curve) -> list[Pattern]:
    """Overfitting of the validation loss, else of another metric; else the gap, if there is one."""
    for name, series in _candidates(curve):
        values, steps = _finite(series)
        if len(values) < _FEWEST:
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
        f"{word} was lowest, {best:.4g}, about step {at} and has risen to {late:.4g} by the end (last {worst:.4g}) "
        f"while the training {curve.name} went on falling, to {curve.late:.4g}"
    )
    return Pattern(kind="overfitting", severity="warn", step=at, evidence=evidence, advice=_OVERFITTING.format(step=at))


def _level_noise(values: Floats, levels: Floats) -> float:
    if len(values) < _MANY:  # a handful of points: their differences are mostly the curve itself, its bends less so
        return 0.6 * _bends(values)
    within = noise(values) / np.sqrt(len(values) / len(levels))
    return float(max(within, _bends(levels[len(levels) // 4 :]) if len(levels) >= 8 else 0.0))


def _bends(levels: Floats) -> float:
    """Sigma, from second differences: straight stretches add nothing to them."""
    return float(np.median(np.abs(np.diff(levels, n=2))) / (0.6745 * np.sqrt(6.0)))


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
    if len(values) < _FEWEST or len(curve) < 16 or not comparable or curve.name in curve.run.validation:
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
