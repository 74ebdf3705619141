"""A run that has learned nothing, or almost nothing."""

import math

import numpy as np

from steadystep.curves.curve import Curve
from steadystep.curves.reading import Pattern

_FEWEST = 24  # points
_GAIN = 0.02  # of the first loss: less is nothing
_LITTLE = 0.15
_STEADY = 0.7  # slope of the last third over that of the first: a straight line, not a curve that levels off
_ABOUT = 0.015
_VOCABULARIES = (256, 32_000, 32_768, 50_257, 50_304, 65_536, 100_277, 128_256, 151_936)
_UNIGRAM = (0.5, 0.78)  # of ln V: where a language model is that has only learned how frequent tokens are

_NOT = (
    "check that the labels belong to the inputs, that the optimizer holds the model's parameters and that the learning "
    "rate is not 0; try to overfit a single batch; then try a learning rate 10 times higher and one 10 times lower"
)
_LOW = "multiply the learning rate by 3 to 10 and look again; steadystep.find_lr shows the range that works"
_STUCK = (
    "the model knows how frequent tokens are and nothing about context: check attention masks, positions and the "
    "shift of the targets, and try a learning rate 10 times lower and one 10 times higher"
)


def learning(curve: Curve) -> list[Pattern]:
    """At most one."""
    if len(curve) < _FEWEST or curve.signed or curve.start <= 0.0:
        return []
    third = len(curve) // 3
    gain = curve.start - curve.best
    if gain <= max(_GAIN * curve.start, _noise_of_best(curve)) and abs(curve.late - curve.start) < 0.1 * curve.start:
        rate = _rate(curve)
        evidence = (
            f"the {curve.name} began at {curve.start:.4g} and is {curve.late:.4g} after step {int(curve.steps[-1])}"
        )
        return [_pattern("not-learning", 0, curve, f"{evidence}{_guessing(curve)}{rate}", _NOT)]
    unigram = _unigram(curve)
    if unigram:
        return [_pattern("not-learning", third // 2, curve, unigram, _STUCK)]
    slopes = [_slope(curve, i * third, (i + 1) * third) for i in range(3)]
    error = 2.0 * curve.late_noise / math.sqrt(third)
    straight = slopes[2] < 0.0 and slopes[2] <= _STEADY * slopes[0] and -slopes[1] * third > error
    if straight and gain < _LITTLE * curve.start and gain > 2.0 * error and not _rate_decays(curve):
        evidence = (
            f"the {curve.name} comes down in a straight line, from {curve.start:.4g} to {curve.late:.4g} in "
            f"{int(curve.steps[-1] - curve.steps[0])} steps, as steep at the end as at the beginning{_rate(curve)}"
        )
        return [_pattern("learning-rate-too-low", 0, curve, evidence, _LOW)]
    return []


def _pattern(kind: str, at: int, curve: Curve, evidence: str, advice: str) -> Pattern:
    return Pattern(kind=kind, severity="warn", step=int(curve.steps[at]), evidence=evidence, advice=advice)


def _noise_of_best(curve: Curve) -> float:
    return 3.0 * curve.late_noise / math.sqrt(max(1.0, len(curve) / len(curve.levels)))


def _slope(curve: Curve, a: int, b: int) -> float:
    """Per point."""
    part = curve.values[a:b]
    times = np.arange(len(part)) - (len(part) - 1) / 2
    return float(times @ part / (times @ times))


def _guessing(curve: Curve) -> str:
    """What the level would be worth as the cross-entropy of a guess."""
    if curve.name != "loss" or not 0.6 < curve.late < 12.5:
        return ""
    classes = round(math.exp(curve.late))
    if classes > 20:
        classes = min((100, 1000, *_VOCABULARIES), key=lambda c: abs(math.log(c) - curve.late))
    if abs(curve.late - math.log(classes)) > _ABOUT * math.log(classes):
        return ""
    return f", about ln {classes}: what guessing among {classes} classes costs"


def _unigram(curve: Curve) -> str:
    vocabulary = min(_VOCABULARIES, key=lambda v: abs(math.log(v) - curve.start))
    top = math.log(vocabulary)
    if curve.name != "loss" or abs(curve.start - top) > 0.04 * top:
        return ""
    rest = curve.levels[len(curve.levels) // 4 :]
    low, high = _UNIGRAM
    if not low * top < curve.late < high * top or rest.max() - rest.min() > 0.04 * top:
        return ""
    return (
        f"the loss came down from {curve.start:.4g} (about ln {vocabulary}) to {curve.late:.4g} within the first "
        "quarter and stays there: about what the frequencies of the tokens alone give"
    )


def _rate(curve: Curve) -> str:
    rates = curve.run.lr.values
    rates = rates[np.isfinite(rates)]
    return f"; the learning rate was {float(rates.max()):.3g} at most" if len(rates) else ""


def _rate_decays(curve: Curve) -> bool:
    rates = curve.run.lr.values
    return len(rates) > 2 and bool(rates[-1] < 0.5 * np.nanmax(rates))
