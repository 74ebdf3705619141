"""Would going back help? A batch under older weights tells.

Between a loss that rises because the weights have been damaged and one that rises because the data or the objective has
changed, no curve can tell. The same batch with the same random numbers can: if older weights do no better on it, there
is nothing to go back for. Losses that stay high and weights that jumped are compared over several batches
(`evidence.py`); for updates that are refused again and again the batch at hand is enough.
"""

from dataclasses import replace

from steadystep.diagnosis.damage import is_worse
from steadystep.records import Finding, Severity, Signals

LASTING = ("not-healing", "slow-divergence", "worse-than-best", "weight-jump")
"""Detectors of what only a comparison of weights can confirm: a loss that stays high, a tensor that changed much."""
_STUCK = 2  # refused updates before this one


def needs_witness(signals: Signals, findings: tuple[Finding, ...]) -> bool:
    """Whether updates are refused again and again, so that this batch under older weights says what is to be done."""
    stuck = signals.refused_in_a_row >= _STUCK and signals.input_finite is not False
    if any(f.detector == "weight-jump" and f.severity == "act" for f in findings):
        return False  # there is nothing to ask: these weights cannot be used
    return stuck and any(f.severity == "critical" for f in findings)


def first_sign(findings: tuple[Finding, ...]) -> int:
    """Only weights older than this can tell."""
    return min(f.step if f.since is None else f.since for f in findings)


def weigh(signals: Signals, findings: tuple[Finding, ...]) -> tuple[Finding, ...]:
    """The findings with the severity that the witness gives them; unchanged when none was heard."""
    witness = signals.witness
    if witness is None:
        return findings
    severity: Severity = "act" if is_worse(witness) else "warn"
    return tuple(replace(f, severity=severity) if f.detector == "weight-jump" else f for f in findings)
