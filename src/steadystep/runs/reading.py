"""What a doctor says about a curve: patterns with their steps and numbers, and what a guard would have done.

And what a curve is evidence of: whether it is long enough, whether its level means anything, and whether it fell.
"""

import math
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, final

import numpy as np

from steadystep.records import Record, Severity, severity_rank
from steadystep.runs.curve import Curve
from steadystep.runs.levels import Floats, spread
from steadystep.runs.run import Run
from steadystep.runs.table import is_loss, name_words

Judged = Literal["healthy", "fault", "not-learning", "too-short", "not-judged"]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Pattern(Record):
    """One finding in the curves of a run."""

    kind: str
    """Name of the pattern, such as "overfitting" or "non-finite"."""
    severity: Severity
    """`info` is a note; from `warn` on it is a fault."""
    step: int
    """First step."""
    until: int | None = None
    """Last step; None if it lasted to the end of the log."""
    evidence: str
    """The steps and numbers that show it."""
    advice: str = ""
    """What to change."""

    @property
    def is_trouble(self) -> bool:
        """Whether it is more than a note."""
        return self.severity != "info"


class PlannedAction(NamedTuple):
    """What a guard would have done at one logged step."""

    step: int
    """The logged step."""
    action: str
    """Names of the actions, joined with "+": "rollback+cut-lr"."""
    reason: str
    """Why it would have."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Reading(Record):
    """Diagnosis of a run from its curves."""

    name: str
    """Name of the run."""
    verdict: str
    """The result as a sentence."""
    healthy: bool | None
    """True: the loss fell, and there are only notes. False: a fault was found, or it does not learn. None: no fault was
    found, and the log cannot show whether the run learns."""
    outcome: Judged = "healthy"
    """What the verdict says, as one word: "too-short" and "not-judged" go with `healthy=None`."""
    findings: tuple[Pattern, ...] = ()
    """The findings, the most severe first."""
    plans: tuple[PlannedAction, ...] = ()
    """What a guard would have done, in the order of the steps."""
    points: int = 0
    """Number of logged losses."""
    notes: tuple[str, ...] = ()
    """What had to be skipped or guessed."""
    read: str = ""
    """Which rows and columns were used; empty for our own log."""

    @property
    def troubles(self) -> tuple[Pattern, ...]:
        """The findings that are more than notes."""
        return tuple(pattern for pattern in self.findings if pattern.is_trouble)

    def as_dict(self) -> dict[str, Any]:
        """Return a dictionary for JSON, with named fields in plans."""
        return {
            "name": self.name,
            "verdict": self.verdict,
            "healthy": self.healthy,
            "outcome": self.outcome,
            "read": self.read,
            "findings": [
                {
                    "kind": p.kind,
                    "severity": p.severity,
                    "step": p.step,
                    "until": p.until,
                    "evidence": p.evidence,
                    "advice": p.advice,
                }
                for p in self.findings
            ],
            "plans": [plan._asdict() for plan in self.plans],
            "points": self.points,
            "notes": list(self.notes),
        }


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """One thing the curves show."""

    kind: str
    severity: str
    step: int
    until: int | None
    """None: it was still so at the end."""
    evidence: str
    advice: str


def ranked(patterns: "list[Pattern]") -> tuple[Pattern, ...]:
    """The gravest first; among equals in the order they were given."""
    return tuple(sorted(patterns, key=lambda pattern: -severity_rank(pattern.severity)))


_SAY = {
    "non-finite": "the loss became NaN or infinite at step {step}",
    "non-finite-gradient": "gradient norms are non-finite from step {step}",
    "hidden-nan": "the loss became NaN at step {step}, and the log shows it as 0",
    "suspicious-perfection": "a loss of exactly 0 from step {step} is suspicious",
    "divergence": "the run diverged from step {step}",
    "spike-unhealed": "no recovery from a spike at step {step}",
    "spike-healed": "slow recovery from a spike at step {step}",
    "learning-rate-too-high": "the learning rate is too high: the loss was best around step {step} and has been "
    "worse since",
    "learning-rate-too-low": "the learning rate is too low",
    "not-learning": "not learning, cause unknown",
    "overfitting": "the model overfits from step {step}",
    "underfitting": "the model underfits: training and validation plateau at a poor level",
    "oscillation": "the loss oscillates instead of falling",
    "plateau": "the loss stopped improving at step {step} after learning little",
}
_NOTES = {
    "oscillation": "the loss oscillates",
    "plateau": "the loss stopped improving at step {step}",
    "generalisation-gap": "validation lags behind training but does not rise",
    "spikes-healed": "the loss recovered from all spikes",
    "warm-up-transient": "the rise at the start is a warmup transient",
}


class ReadingResult(NamedTuple):
    """The result as a word and as a sentence."""

    outcome: Judged
    said: str


def verdict(
    curve: Curve, patterns: tuple[Pattern, ...], plans: tuple[PlannedAction, ...], *, short: str, unjudged: str
) -> ReadingResult:
    """Faults first. Healthy is said only of a run whose loss fell; `short` and `unjudged` say why it is not judged."""
    troubles = [pattern for pattern in patterns if pattern.is_trouble]
    end = curve.raw.level  # as in every other view
    way = f"{curve.name} {curve.start:.4g} to {end:.4g} in {len(curve.raw)} points" if len(curve) else ""
    if troubles and troubles[0].kind == "not-learning":
        return ReadingResult("not-learning", _sentence(f"Not learning, cause unknown: {way}"))
    if troubles:
        said = list(dict.fromkeys(_SAY.get(p.kind, p.kind).format(step=p.step) for p in troubles))
        return ReadingResult("fault", _sentence(f"Problem: {'; '.join(said[:3])}"))
    grave = [plan for plan in plans if changes_course(plan)]
    if grave:
        did = f"a guard would have intervened at step {grave[0].step} ({grave[0].action})"
        return ReadingResult("fault", _sentence(f"Problem: {did}"))
    if short:
        return ReadingResult("too-short", _sentence(f"Too short to tell: {short}"))
    said = [_NOTES[p.kind].format(step=p.step) for p in patterns if p.kind in _NOTES]
    if plans:
        said.append(f"a guard would have scaled down {len(plans)} gradient{'s' * (len(plans) > 1)}")
    told = "; ".join((way, *said))
    if unjudged:
        return ReadingResult("not-judged", _sentence(f"No sign of trouble, learning not judged: {unjudged}; {told}"))
    return ReadingResult("healthy", _sentence(f"Healthy: {told}"))


def changes_course(plan: PlannedAction) -> bool:
    """More than holding back one gradient that stood out: that costs nothing and healthy runs have such steps too."""
    return plan.action != "rescale"


def _sentence(text: str) -> str:
    return text + "."


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
    names = [set(name_words(name)) for name in (*run.metrics, *run.validation, *run.columns.values())]
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
    level, late_error = float(np.mean(late)), correlated_standard_error(late)
    least = _GAIN * abs(curve.start)
    fall = curve.start - curve.late
    if fall > max(least, _POINT_SIGMAS * curve.late_noise) and float(np.median(curve.values[:3])) > curve.late:
        return True
    perhaps = False
    for share in (4, 8, 16, 32):  # a fast fall shows in the first points only, a slow one in many
        part = curve.values[: max(_SHORTEST_PART, count // share)]
        own = max(correlated_standard_error(tame(part)), curve.late_noise / math.sqrt(len(part)))
        gained = float(np.mean(tame(part))) - level
        error = math.hypot(own, late_error)
        if gained > max(least, _SIGMAS * error):
            return True
        perhaps = perhaps or gained > max(least, _PERHAPS_SIGMAS * error)
    error = math.hypot(correlated_standard_error(tame(curve.values[: max(_SHORTEST_PART, count // 4)])), late_error)
    return None if perhaps or _HIDDEN_SIGMAS * error > _VISIBLE * abs(curve.start) else False


def correlated_standard_error(part: Floats) -> float:
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
