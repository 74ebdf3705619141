"""A run that has learned nothing, or almost nothing."""

import math
from dataclasses import dataclass
from typing import final

import numpy as np

from steadystep.records import Severity
from steadystep.runs.curve import Curve
from steadystep.runs.levels import Floats, blocks
from steadystep.runs.reading import Pattern, correlated_standard_error, fell, tame

_LEARNING_FEWEST = 24  # points
_NO_RATE = 1e-12
_USUAL = (2, 3, 4, 5, 10, 100, 1000)  # classes
_EXACTLY = 0.004  # of ln C
_NEAR = 1.3  # times a guess: how much more a fresh model may begin with
_LITTLE = 0.15
_STEADY = 0.7  # slope of the last third over that of the first: a straight line, not a curve that levels off
_ABOUT = 0.015
_VOCABULARIES = (256, 32_000, 32_768, 50_257, 50_304, 65_536, 100_277, 128_256, 151_936)
_UNIGRAM = (0.5, 0.78)  # of ln V: where a language model is that has only learned how frequent tokens are

_NOT = (
    "check that the labels match the inputs, that the optimizer holds the model's parameters and that the learning "
    "rate is not 0; try to overfit a single batch; then try a learning rate 10 times higher and one 10 times lower"
)
_TINY_RATE = 1e-6  # for models that are trained from nothing; fine-tuning begins near 1e-5
_TINY = "multiply the learning rate by 100 first: it is far below what nearly any model is trained with"
_ZERO = (
    "the optimizer does not move the weights: check the schedule and the parameter groups, then set the learning rate"
)
_LOW = "multiply the learning rate by 3 to 10 and compare; steadystep.find_lr shows the usable range"
_STUCK = (
    "the model has learned token frequencies and nothing about context: check attention masks, positions and the "
    "shift of the targets, and try a learning rate 10 times lower and one 10 times higher"
)


def learning(curve: Curve) -> list[Pattern]:
    """At most one."""
    if len(curve) < _LEARNING_FEWEST or curve.signed or curve.start <= 0.0:
        return []
    third = len(curve) // 3
    gain = curve.start - curve.best
    guess = _at_a_guess(curve)
    if guess and not _no_rate(curve):
        return [_learning_pattern("not-learning", 0, curve, f"{guess}{_rate(curve)}", _advice(curve))]
    if fell(curve) is False:
        evidence = (
            f"the {curve.name} began at {curve.start:.4g}, was {curve.best:.4g} at best and is {curve.late:.4g} after "
            f"step {int(curve.steps[-1])}: no fall beyond its noise{_guessing(curve)}{_rate(curve)}"
        )
        if _no_rate(curve):
            return [_learning_pattern("learning-rate-too-low", 0, curve, evidence, _ZERO)]
        return [_learning_pattern("not-learning", 0, curve, evidence, _advice(curve))]
    unigram = _unigram(curve)
    if unigram:
        return [_learning_pattern("not-learning", third // 2, curve, unigram, _STUCK)]
    slopes = [_slope(curve, i * third, (i + 1) * third) for i in range(3)]
    error = 2.0 * curve.late_noise / math.sqrt(third)
    straight = slopes[2] < 0.0 and slopes[2] <= _STEADY * slopes[0] and -slopes[1] * third > error
    if straight and gain < _LITTLE * curve.start and gain > 2.0 * error and not _rate_decays(curve):
        evidence = (
            f"the {curve.name} falls linearly from {curve.start:.4g} to {curve.late:.4g} in "
            f"{int(curve.steps[-1] - curve.steps[0])} steps, as steep at the end as at the start{_rate(curve)}"
        )
        return [_learning_pattern("learning-rate-too-low", 0, curve, evidence, _LOW)]
    return []


def _learning_pattern(kind: str, at: int, curve: Curve, evidence: str, advice: str) -> Pattern:
    return Pattern(kind=kind, severity="warn", step=int(curve.steps[at]), evidence=evidence, advice=advice)


def _no_rate(curve: Curve) -> bool:
    """The learning rate was logged, and was 0 or next to it all along."""
    rates = curve.run.lr.values[np.isfinite(curve.run.lr.values)]
    return len(rates) > 2 and float(rates.max()) < _NO_RATE


def _at_a_guess(curve: Curve) -> str:
    """For a loss that stands still, nearly from the start, at what guessing among a usual number of classes gives."""
    classes = min((*_USUAL, *_VOCABULARIES), key=lambda c: abs(math.log(c) - curve.late))
    level = math.log(classes)
    rest = curve.levels[len(curve.levels) // 4 :]
    near = abs(curve.late - level) < _EXACTLY * level and curve.start < _NEAR * curve.late
    if curve.name != "loss" or not near or rest.max() - rest.min() > _ABOUT * level:
        return ""
    return (
        f"the loss began at {curve.start:.4g} and stands still at {curve.late:.4g}, about ln {classes}: the loss of "
        f"guessing among {classes} classes"
    )


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
    return f", about ln {classes}: the loss of guessing among {classes} classes"


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
        f"the loss fell from {curve.start:.4g} (about ln {vocabulary}) to {curve.late:.4g} within the first quarter "
        "and stays there: about what token frequencies alone give"
    )


def _advice(curve: Curve) -> str:
    """A rate that moves next to no model is the first thing to change."""
    highest = max((float(rate) for rate in curve.run.lr.values if np.isfinite(rate)), default=1.0)
    return f"{_TINY}; {_NOT}" if highest <= _TINY_RATE else _NOT


def _rate(curve: Curve) -> str:
    rates = curve.run.lr.values
    rates = rates[np.isfinite(rates)]
    return f"; the learning rate was {float(rates.max()):.3g} at most" if len(rates) else ""


def _rate_decays(curve: Curve) -> bool:
    rates = curve.run.lr.values
    return len(rates) > 2 and bool(rates[-1] < 0.5 * np.nanmax(rates))


_PLATEAU_FEWEST = 40  # points
_FLAT = 0.004  # of the way: less is no progress
_FADING = 0.02  # of the way: the rest of an approach that has run out
_FADED = 0.4  # of what the stretch before gained; a power law, as healthy runs follow, keeps half or more
_VISIBLE = 0.09  # of the way: progress of this size must be visible above the noise, or nothing can be said
_CERTAIN, _SURE = 2.5, 3.0  # standard errors
_EARLY = 0.6  # of the run
_POOR, _HARDLY = 0.5, 0.9  # of the first loss
_STRETCHES = ((0.2, 0.4), (0.45, 0.65), (0.75, 1.0))  # of the run

_WAIT = "stop there, or lower the learning rate: a decay often lowers the loss further"
_SMALL = (
    "training and validation stop at the same level: the model is too small, the learning rate unsuitable or "
    "regularization too strong; try a larger model, another learning rate, and less weight decay or dropout"
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
        f"the {curve.name} fell from {curve.start:.4g} to {flat.level:.4g} by step {step} and has not improved in "
        f"the remaining {share:.0%} of the run"
    )
    poor = curve.start > 0.0 and flat.level > _POOR * curve.start
    severity: Severity = "warn" if curve.start > 0.0 and flat.level > _HARDLY * curve.start else "info"
    found = [_plateau_pattern("plateau", severity, step, evidence, _WAIT)]
    held_out = curve.run.validation.get("val_loss")
    if poor and curve.name == "loss" and held_out is not None and len(held_out) >= 4:
        last = float(np.median(held_out.values[-max(2, len(held_out) // 8) :]))
        if abs(last - flat.level) < 0.1 * abs(flat.level):
            told = (
                f"training stays at {flat.level:.4g} and validation at {last:.4g}; the loss began at {curve.start:.4g}"
            )
            found.insert(0, _plateau_pattern("underfitting", severity, step, told, _SMALL))
    return found


def stands_still(values: Floats) -> Flat | None:
    """None for a curve that moves, and for one so noisy or short that nobody can tell."""
    count = len(values)
    if count < _PLATEAU_FEWEST:
        return None
    first_part, early, late = (tame(values[int(a * count) : int(b * count)]) for a, b in _STRETCHES)
    level = float(np.median(late))
    first = float(max(values[0], np.median(values[:3])))
    way = first - level
    error = math.hypot(correlated_standard_error(early), correlated_standard_error(late))
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


def _plateau_pattern(kind: str, severity: Severity, step: int, evidence: str, advice: str) -> Pattern:
    return Pattern(kind=kind, severity=severity, step=step, evidence=evidence, advice=advice)


_ZEROS_FEWEST = 3
_IN_A_ROW = 16
_REAL = 1e-3  # a loss that was above this was measuring something

_LEAK = (
    "check for the target among the inputs, a mask that hides every target, and a loss that no longer depends on "
    "the prediction"
)
_FILTER = (
    "the Hugging Face Trainer logs 0 for a NaN loss unless logging_nan_inf_filter=False: set that, and treat the "
    "run as NaN from here on: roll back to an earlier checkpoint and lower the learning rate; if the run uses "
    "fp16, use bf16"
)


def perfection(curve: Curve) -> list[Pattern]:
    """Losses of exactly zero."""
    loss = curve.run.loss
    zero = loss.values == 0.0
    if zero.sum() < _ZEROS_FEWEST or curve.name != "loss":
        return []
    first = int(np.argmax(zero))
    step = int(loss.steps[first])
    before = loss.values[:first][np.isfinite(loss.values[:first])]
    was = float(np.median(before[-16:])) if len(before) else 0.0
    norms = curve.run.grad_norm
    beside = norms.values[np.isin(norms.steps, loss.steps[zero])]
    count = int(zero.sum())
    lasting = bool(zero[first:].mean() > 0.9)
    until = None if lasting else int(loss.steps[np.flatnonzero(zero)[-1]])
    told = f"the loss is exactly 0 at {count} points from step {step} on" + (f", after {was:.4g}" if was else "")
    if len(beside) and np.mean(~np.isfinite(beside)) > 0.5:
        evidence = f"{told}, and the gradient norm there is NaN: a log filter replaced NaN with 0"
        return [
            Pattern(kind="hidden-nan", severity="critical", step=step, until=until, evidence=evidence, advice=_FILTER)
        ]
    if was > _REAL and curve.run.source == "transformers" and lasting and before[-1] > _REAL:
        evidence = f"{told}, from one logged point to the next: most likely NaN, for which the Trainer logs 0"
        return [
            Pattern(kind="hidden-nan", severity="critical", step=step, until=until, evidence=evidence, advice=_FILTER)
        ]
    if not lasting or count < _IN_A_ROW:
        return []
    sudden = len(before) and before[-1] > _REAL
    evidence = told + (", from one logged point to the next" if sudden else "")
    return [
        Pattern(kind="suspicious-perfection", severity="warn", step=step, until=until, evidence=evidence, advice=_LEAK)
    ]
