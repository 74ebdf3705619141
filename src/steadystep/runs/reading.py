"""What a doctor says about a curve: patterns with their steps and numbers, and what a guard would have done."""

from dataclasses import dataclass
from typing import Any, NamedTuple, final

from steadystep.records import Record, Severity, severity_rank
from steadystep.runs.curve import Curve


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
    healthy: bool
    """Whether there are only notes, and a guard would have scaled down single gradients at most."""
    findings: tuple[Pattern, ...] = ()
    """The findings, the most severe first."""
    plans: tuple[PlannedAction, ...] = ()
    """What a guard would have done, in the order of the steps."""
    points: int = 0
    """Number of logged losses."""
    notes: tuple[str, ...] = ()
    """What had to be skipped or guessed."""

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
    "not-learning": "the model has learned almost nothing",
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


def verdict(curve: Curve, patterns: tuple[Pattern, ...], plans: tuple[PlannedAction, ...], *, enough: bool) -> str:
    """Trouble first; a healthy run is called so."""
    troubles = [pattern for pattern in patterns if pattern.is_trouble]
    if troubles:
        said = list(dict.fromkeys(_SAY.get(p.kind, p.kind).format(step=p.step) for p in troubles))
        return _sentence(f"Problem: {'; '.join(said[:3])}")
    grave = [plan for plan in plans if changes_course(plan)]
    if grave:
        return _sentence(f"Problem: a guard would have intervened at step {grave[0].step} ({grave[0].action})")
    if not enough:
        return f"Too few points for a diagnosis: {len(curve.raw)}."
    first, last = curve.start, curve.late
    said = [_NOTES[p.kind].format(step=p.step) for p in patterns if p.kind in _NOTES]
    if plans:
        said.append(f"a guard would have scaled down {len(plans)} gradient{'s' * (len(plans) > 1)}")
    way = f"{curve.name} {first:.4g} to {last:.4g} in {len(curve.raw)} points"
    return _sentence(f"Healthy: {way}" + (f"; {'; '.join(said)}" if said else ""))


def changes_course(plan: PlannedAction) -> bool:
    """More than holding back one gradient that stood out: that costs nothing and healthy runs have such steps too."""
    return plan.action != "rescale"


def _sentence(text: str) -> str:
    return text + "."
