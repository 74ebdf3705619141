"""What a doctor says about a curve: patterns with their steps and numbers, and what a guard would have done."""

from dataclasses import dataclass
from typing import Any, NamedTuple, final

from steadystep.records import Record, Severity

_RANK = {"critical": 3, "act": 2, "warn": 1, "info": 0}


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Pattern(Record):
    """One thing that the curves show."""

    kind: str
    severity: Severity
    """info is a note; from warn on it is trouble."""
    step: int
    """Where it began."""
    until: int | None = None
    """The last step that shows it; None when it was still so at the end of the log."""
    evidence: str
    """The steps and numbers that show it."""
    advice: str = ""
    """What to change."""

    @property
    def is_trouble(self) -> bool:
        """More than a note."""
        return self.severity != "info"


class PlannedAction(NamedTuple):
    """What a guard would have done at one logged step."""

    step: int
    action: str
    """Names of the actions, joined with "+": "rollback+cut-lr"."""
    reason: str


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Reading(Record):
    """A run as the doctor sees it."""

    name: str
    verdict: str
    """One sentence."""
    healthy: bool
    """Nothing here is more than a note, and a guard would have held back single gradients at most."""
    findings: tuple[Pattern, ...] = ()
    """The gravest first."""
    plans: tuple[PlannedAction, ...] = ()
    """In the order of the steps."""
    points: int = 0
    """Logged losses."""
    notes: tuple[str, ...] = ()
    """What had to be skipped or guessed."""

    @property
    def troubles(self) -> tuple[Pattern, ...]:
        """The findings that are more than notes."""
        return tuple(pattern for pattern in self.findings if pattern.is_trouble)

    def as_dict(self) -> dict[str, Any]:
        """For a program: plans have names for their parts."""
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
    return tuple(sorted(patterns, key=lambda pattern: -_RANK[pattern.severity]))
