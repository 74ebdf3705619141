"""What the page says first."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, final

import numpy as np

from steadystep.report.episodes import Episode, episodes, interventions
from steadystep.track.run import Run

if TYPE_CHECKING:
    from steadystep.curves import Reading

_AROUND = 20  # steps: a spike needs some to heal


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


def judged(run: Run, reading: "Reading | None" = None) -> Verdict:
    """The doctor's reading of the curves, and what the guard had to do with it."""
    from steadystep.curves import diagnose

    reading = reading or diagnose(run)
    signs = tuple(
        Sign(kind=p.kind, severity=p.severity, step=p.step, until=p.until, evidence=p.evidence, advice=p.advice)
        for p in reading.findings
    )
    acted = interventions(run, episodes(run))
    if not acted:
        return Verdict(said=reading.verdict, healthy=reading.healthy, signs=signs)
    did = f"the guard stepped in {'once' if len(acted) == 1 else f'{len(acted)} times'} ({_named(acted)})"
    if all(_is_handled(sign, acted, run) for sign in signs if sign.severity != "info"):
        return Verdict(said=f"Kept on course: {did}; the curves show no other trouble.", healthy=True, signs=signs)
    return Verdict(said=f"{reading.verdict} {did[0].upper()}{did[1:]}.", healthy=False, signs=signs)


def _is_handled(sign: Sign, acted: Sequence[Episode], run: Run) -> bool:
    """Trouble that began where the guard stepped in, and ended soon after; NaN losses, each of which it refused."""
    if sign.kind == "non-finite":
        bad = run.loss.steps[~np.isfinite(run.loss.values)].tolist()
        return all(any(e.first <= step <= e.last for e in acted) for step in bad)
    return sign.until is not None and any(
        e.first - _AROUND <= sign.step and sign.until <= e.last + _AROUND for e in acted
    )


def _named(acted: Sequence[Episode]) -> str:
    named = [f"{e.cause} at step {e.first:,}" for e in acted[:3]]
    return ", ".join(named) + (f" and {len(acted) - 3} more" if len(acted) > 3 else "")
