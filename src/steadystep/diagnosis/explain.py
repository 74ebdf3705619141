"""The rules from evidence to cause, as a table one can read."""

import math
from collections.abc import Callable

from steadystep.diagnosis.causes import ADVICE, Cause
from steadystep.records import Diagnosis, Finding, Signals

HEALTHY = Diagnosis()

_NAMED = 3  # names listed in the evidence before "and N more"

# First match wins; from the most specific to the most general.
RULES: tuple[tuple[Cause, Callable[[Signals], bool]], ...] = (
    (Cause.SCHEDULE_ERROR, lambda s: not math.isfinite(s.lr)),
    (Cause.NON_FINITE_INPUT, lambda s: s.input_finite is False),
    (Cause.FORWARD_OVERFLOW, lambda s: s.scaled and not math.isfinite(s.loss)),
    (Cause.NON_FINITE_LOSS, lambda s: not math.isfinite(s.loss)),
    (Cause.NON_FINITE_BUFFER, lambda s: bool(s.bad_buffers)),
    (Cause.SCALE_OVERFLOW, lambda s: s.scaled),
    (Cause.NON_FINITE_GRADIENT, lambda s: not math.isfinite(s.grad_norm)),
)


def explain(signals: Signals, findings: tuple[Finding, ...]) -> Diagnosis:
    """The likeliest cause. Nothing has been applied yet at this point, so the damage is none."""
    if not findings:
        return HEALTHY
    cause = next(cause for cause, holds in RULES if holds(signals))
    evidence = "; ".join(_sentence(finding) for finding in findings)
    return Diagnosis(cause=cause.value, findings=findings, evidence=evidence, advice=ADVICE[cause])


def not_repeatable() -> Diagnosis:
    """For a group whose gradients were lost and could not be computed again."""
    cause = Cause.CLOSURE_NOT_REPEATABLE
    evidence = "a pass was interrupted and a closure gave another loss when it was run again"
    return Diagnosis(cause=cause.value, evidence=evidence, advice=ADVICE[cause])


def _sentence(finding: Finding) -> str:
    if not finding.where:
        return finding.what
    rest = len(finding.where) - _NAMED
    names = ", ".join(finding.where[:_NAMED]) + (f" and {rest} more" if rest > 0 else "")
    return f"{finding.what} ({names})"
