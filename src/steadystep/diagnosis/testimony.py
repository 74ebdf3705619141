"""Would going back help? A batch under older weights tells.

Between a loss that rises because the weights have been damaged and one that rises because the data or the objective has
changed, no curve can tell. The same batch with the same random numbers can: if older weights do no better on it, there
is nothing to go back for. Losses that stay high and weights that jumped are compared over several batches
(`evidence.py`); for updates that are refused again and again the batch at hand is enough.
"""

import math
from dataclasses import replace

from steadystep.diagnosis.damage import is_worse
from steadystep.records import Finding, Severity, Signals, Witness

LASTING = ("not-healing", "slow-divergence", "worse-than-best", "weight-jump")
"""Detectors of what only a comparison of weights can confirm: a loss that stays high, a tensor that changed much."""
_STUCK = 2  # refused updates before this one
_EARLY = "early-divergence"
_BETTER = 10.0  # times: what the first weights do better on a batch that is theirs to do
_UNTRIED = 1e4  # times the limit, and
_LARGE = 1e3  # absolute: without older weights to ask, only then is it said


def needs_witness(signals: Signals, findings: tuple[Finding, ...]) -> bool:
    """Whether this batch under older weights says what is to be done.

    It does where updates are refused again and again, or the loss has multiplied in the first steps.
    """
    stuck = signals.refused_in_a_row >= _STUCK and signals.input_finite is not False
    if any(f.detector == "weight-jump" and f.severity == "act" for f in findings):
        return False  # there is nothing to ask: these weights cannot be used
    if any(f.detector == _EARLY and f.severity == "act" for f in findings):
        return True
    return stuck and any(f.severity == "critical" for f in findings)


def first_sign(findings: tuple[Finding, ...]) -> int:
    """Only weights older than this can tell."""
    return min(f.step if f.since is None else f.since for f in findings)


def weigh(signals: Signals, findings: tuple[Finding, ...]) -> tuple[Finding, ...]:
    """The findings with the severity that the witness gives them; most are unchanged when none was heard."""
    witness = signals.witness
    findings = tuple(_early(f, witness) if f.detector == _EARLY else f for f in findings)
    if witness is None:
        return findings
    severity: Severity = "act" if is_worse(witness) else "warn"
    return tuple(replace(f, severity=severity) if f.detector == "weight-jump" else f for f in findings)


def _early(finding: Finding, witness: Witness | None) -> Finding:
    """Undone where the batch at hand is an ordinary one for the first weights, and not for the present ones."""
    if finding.severity != "act":
        return finding
    severity: Severity = "info"
    if witness is None:
        severity = "warn" if finding.value > max(_UNTRIED * finding.limit, _LARGE) else "info"
    elif finding.usual is not None and math.isfinite(witness.then):
        ordinary = witness.then <= _BETTER * finding.usual
        severity = "act" if ordinary and not witness.now <= _BETTER * witness.then else "info"
    return replace(finding, severity=severity)
