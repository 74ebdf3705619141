"""Hearing an old batch: has it become worse, or is only the new data different?

Between a loss that rises because the weights have been damaged and one that rises because the data has changed, no
curve can tell. A batch from before can: run again with the same random numbers, it is free of the noise between
batches. It costs a forward pass, so it is asked only when a finding depends on the answer.
"""

from dataclasses import replace

from steadystep.diagnosis.damage import acquitted
from steadystep.records import Finding, Severity, Signals

_LASTING = ("not-healing", "slow-divergence")
_STUCK = 2  # refused updates before this one
_DRIFT = 0.03  # of the loss: more than a healthy run forgets about a batch


def needs_witness(signals: Signals, findings: tuple[Finding, ...]) -> bool:
    """Whether the answer would change what is done."""
    stuck = signals.refused_in_a_row >= _STUCK and signals.input_finite is not False
    return any((f.detector in _LASTING and f.value > f.limit) or (stuck and f.severity == "critical") for f in findings)


def first_sign(findings: tuple[Finding, ...]) -> int:
    """A witness must be older than this."""
    return min(f.step if f.since is None else f.since for f in findings)


def weigh(signals: Signals, findings: tuple[Finding, ...]) -> tuple[Finding, ...]:
    """The findings with the severity that the witness gives them; unchanged when none was heard."""
    return findings if signals.witness is None else tuple(_weighed(signals, f) for f in findings)


def _weighed(signals: Signals, finding: Finding) -> Finding:
    if finding.detector == "slow-divergence":
        return replace(finding, severity="act" if has_drifted(signals, finding) else _at_most_warn(finding.severity))
    if finding.detector == "not-healing":
        return replace(finding, severity="warn" if acquitted(signals) else "act")
    return finding


def has_drifted(signals: Signals, finding: Finding) -> bool:
    """The old batch is worse than it was: by more than a healthy run forgets, and by more than the finding's margin."""
    witness = signals.witness
    if witness is None or finding.usual is None:
        return False
    material = max(_DRIFT * abs(witness.then), finding.limit - finding.usual)
    return finding.value > finding.limit and not witness.now - witness.then <= material


def _at_most_warn(severity: Severity) -> Severity:
    return "warn" if severity in ("act", "critical") else severity
