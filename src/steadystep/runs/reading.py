"""What a doctor says about a curve: patterns with their steps and numbers, and what a guard would have done."""

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, final

from steadystep.records import Record, Severity, severity_rank
from steadystep.runs.curve import Curve

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


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Headline:
    """The verdict on a run in one sentence, and the findings it rests on; the same in every view."""

    said: str
    healthy: bool | None
    """None: nothing is wrong, and the log cannot show whether the run learns."""
    signs: tuple[Mark, ...] = ()
    cause: str = ""
    """The likeliest cause: of the guard's diagnosis, else the first finding; empty for a healthy run."""


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


class Verdict(NamedTuple):
    """The result as a word and as a sentence."""

    outcome: Judged
    said: str


def verdict(
    curve: Curve, patterns: tuple[Pattern, ...], plans: tuple[PlannedAction, ...], *, short: str, unjudged: str
) -> Verdict:
    """Faults first. Healthy is said only of a run whose loss fell; `short` and `unjudged` say why it is not judged."""
    troubles = [pattern for pattern in patterns if pattern.is_trouble]
    end = curve.raw.level  # as in every other view
    way = f"{curve.name} {curve.start:.4g} to {end:.4g} in {len(curve.raw)} points" if len(curve) else ""
    if troubles and troubles[0].kind == "not-learning":
        return Verdict("not-learning", _sentence(f"Not learning, cause unknown: {way}"))
    if troubles:
        said = list(dict.fromkeys(_SAY.get(p.kind, p.kind).format(step=p.step) for p in troubles))
        return Verdict("fault", _sentence(f"Problem: {'; '.join(said[:3])}"))
    grave = [plan for plan in plans if changes_course(plan)]
    if grave:
        did = f"a guard would have intervened at step {grave[0].step} ({grave[0].action})"
        return Verdict("fault", _sentence(f"Problem: {did}"))
    if short:
        return Verdict("too-short", _sentence(f"Too short to tell: {short}"))
    said = [_NOTES[p.kind].format(step=p.step) for p in patterns if p.kind in _NOTES]
    if plans:
        said.append(f"a guard would have scaled down {len(plans)} gradient{'s' * (len(plans) > 1)}")
    told = "; ".join((way, *said))
    if unjudged:
        return Verdict("not-judged", _sentence(f"No sign of trouble, learning not judged: {unjudged}; {told}"))
    return Verdict("healthy", _sentence(f"Healthy: {told}"))


def changes_course(plan: PlannedAction) -> bool:
    """More than holding back one gradient that stood out: that costs nothing and healthy runs have such steps too."""
    return plan.action != "rescale"


def _sentence(text: str) -> str:
    return text + "."
