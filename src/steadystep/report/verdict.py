"""What the page says first."""

from dataclasses import dataclass
from typing import final

from steadystep.track.run import Run


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Sign:
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
class Verdict:
    """One sentence about a run, and what it rests on."""

    said: str
    healthy: bool
    signs: tuple[Sign, ...] = ()


def judged(run: Run) -> Verdict:
    """The doctor's reading of the curves."""
    from steadystep.curves import diagnose

    reading = diagnose(run)
    signs = tuple(
        Sign(kind=p.kind, severity=p.severity, step=p.step, until=p.until, evidence=p.evidence, advice=p.advice)
        for p in reading.findings
    )
    return Verdict(said=reading.verdict, healthy=reading.healthy, signs=signs)
