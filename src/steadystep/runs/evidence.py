"""What a curve is evidence of: whether it is long enough, whether its level means anything, and whether it fell."""

import math

import numpy as np

from steadystep.runs.curve import Curve
from steadystep.runs.levels import Floats, spread
from steadystep.runs.run import Run
from steadystep.runs.table import is_loss, words

FEWEST_POINTS = 12
FEWEST_EPOCHS = 5  # one value per epoch is an average already
_FEWEST_STEPS = 40
_LATE_START = 20  # logging intervals
_COLD = 0.05  # of the highest learning rate: the log begins with the warmup
_GAIN = 0.02  # of the first loss: less is nothing
_SIGMAS = 4.0  # standard errors of the difference of two means
_PERHAPS_SIGMAS, _HIDDEN_SIGMAS = 2.0, 3.0
_POINT_SIGMAS = 6.0  # of single points
_VISIBLE = 0.05  # of the first loss: a fall of this size must be visible, or nothing can be said
_SHORTEST_PART = 3  # points

_POLICY = {"reward", "rew", "policy", "actor", "advantage", "advantages", "pg", "qf"}
_EPISODES = {"ep", "episode", "episodes", "episodic", "eval", "mean", "avg"}
_GENERATOR, _DISCRIMINATOR = {"g", "gen", "generator", "netg"}, {"d", "disc", "discriminator", "netd", "critic"}


def is_enough(curve: Curve) -> bool:
    """Whether there are points enough for any diagnosis; a NaN is reported before that."""
    return len(curve.raw) >= (FEWEST_EPOCHS if curve.run.step_unit == "epoch" else FEWEST_POINTS)


def too_short(curve: Curve) -> str:
    """The length of a log that is too short for a verdict on learning; empty for one that is long enough."""
    count = len(curve.raw)
    if not is_enough(curve):
        return f"{count} points" if count != 1 else "one point"
    steps = int(curve.raw.steps[-1] - curve.raw.steps[0]) + 1
    return f"{steps} steps" if curve.run.step_unit != "epoch" and steps < _FEWEST_STEPS else ""


def is_resumed(curve: Curve) -> bool:
    """Whether the log begins far into a run: nothing can be said about how that run began."""
    steps = curve.raw.steps
    if len(steps) < 2 or curve.run.step_unit != "step":
        return False
    every = max(1.0, float(np.median(np.diff(steps))))
    rates = curve.run.lr.values[np.isfinite(curve.run.lr.values)]
    cold = len(rates) > 2 and float(rates[0]) < _COLD * float(rates.max()) and int(np.argmax(rates)) > 0
    return int(steps[0]) > _LATE_START * every and not cold


def unjudged_objective(run: Run) -> str:
    """The kind of objective, when the level of its loss does not show progress; empty for any other."""
    names = [set(words(name)) for name in (*run.metrics, *run.validation, *run.columns.values())]
    if any(found & _POLICY or {"approx", "kl"} <= found or _is_return(found) for found in names):
        return "reinforcement learning"
    losses = [found for found in names if found & {"err", "error"} or is_loss(" ".join(found))]
    if any(found & _GENERATOR for found in losses) and any(found & _DISCRIMINATOR for found in losses):
        return "a GAN"
    return ""


def _is_return(found: set[str]) -> bool:
    return bool(found & {"return", "returns"} and found & _EPISODES)


def fell(curve: Curve) -> bool | None:
    """Whether the loss fell by more than its noise and 2 % of its first value; None when its noise hides that."""
    count = len(curve)
    late = tame(curve.values[-max(_SHORTEST_PART, count // 4) :])
    level, late_error = float(np.mean(late)), standard_error(late)
    least = _GAIN * abs(curve.start)
    fall = curve.start - curve.late
    if fall > max(least, _POINT_SIGMAS * curve.late_noise) and float(np.median(curve.values[:3])) > curve.late:
        return True
    perhaps = False
    for share in (4, 8, 16, 32):  # a fast fall shows in the first points only, a slow one in many
        part = curve.values[: max(_SHORTEST_PART, count // share)]
        own = max(standard_error(tame(part)), curve.late_noise / math.sqrt(len(part)))
        gained = float(np.mean(tame(part))) - level
        error = math.hypot(own, late_error)
        if gained > max(least, _SIGMAS * error):
            return True
        perhaps = perhaps or gained > max(least, _PERHAPS_SIGMAS * error)
    error = math.hypot(standard_error(tame(curve.values[: max(_SHORTEST_PART, count // 4)])), late_error)
    return None if perhaps or _HIDDEN_SIGMAS * error > _VISIBLE * abs(curve.start) else False


def standard_error(part: Floats) -> float:
    """Standard error of the mean; noise that hangs together from point to point counts for more."""
    times = np.arange(len(part)) - (len(part) - 1) / 2
    slope = float(times @ part) / max(float(times @ times), 1.0)
    rest = part - part.mean() - slope * times
    power = float(rest @ rest)
    if power <= 0.0:
        return 0.0
    joined = min(max(float(rest[1:] @ rest[:-1]) / power, 0.0), 0.95)
    return math.sqrt(power * (1.0 + joined) / (1.0 - joined)) / len(part)


def tame(part: Floats) -> Floats:
    """Single jumps are brought down to four sigma: a mean of a few points would feel them."""
    middle = float(np.median(part))
    reach = 4.0 * spread(part, middle)
    return np.clip(part, middle - reach, middle + reach) if reach > 0.0 else part
