"""Would going back help? The present batch under older weights tells.

Between a loss that rises because the weights have been damaged and one that rises because the data or the objective has
changed, no curve can tell. The same batch with the same random numbers can: if older weights do no better on it, there
is nothing to go back for. It costs a few forward passes, so it is asked only when a finding depends on the answer.
"""

import math
from dataclasses import replace

from steadystep.diagnosis.damage import is_worse
from steadystep.records import Finding, Severity, Signals

_LASTING = ("not-healing", "slow-divergence")
_STUCK = 2  # refused updates before this one
_CERTAIN = 2.0  # margins: one batch is noisier than the level it is compared with
_SHARE = 0.5  # of a jump: what older weights must undo of it to be worth going back to


def needs_witness(signals: Signals, findings: tuple[Finding, ...]) -> bool:
    """Whether the answer would change what is done."""
    stuck = signals.refused_in_a_row >= _STUCK and signals.input_finite is not False
    if any(f.detector == "weight-jump" and f.severity == "act" for f in findings):
        return False  # there is nothing to ask: these weights cannot be used
    wanted = (*_LASTING, "weight-jump")
    return any(f.detector in wanted or (stuck and f.severity == "critical") for f in findings)


def first_sign(findings: tuple[Finding, ...]) -> int:
    """Only weights older than this can tell."""
    return min(f.step if f.since is None else f.since for f in findings)


def weigh(signals: Signals, findings: tuple[Finding, ...]) -> tuple[Finding, ...]:
    """The findings with the severity that the witness gives them; unchanged when none was heard."""
    return findings if signals.witness is None else tuple(_weighed(signals, f) for f in findings)


def _weighed(signals: Signals, finding: Finding) -> Finding:
    if finding.detector == "weight-jump":
        return replace(finding, severity="act" if signals.witness and is_worse(signals.witness) else "warn")
    if finding.detector not in _LASTING:
        return finding
    return replace(finding, severity="act" if convicts(signals, finding) else _at_most_warn(finding.severity))


def convicts(signals: Signals, finding: Finding) -> bool:
    """Older weights do better on this batch: by half of a jump, or by twice what a creeping loss calls material."""
    witness = signals.witness
    if witness is None or finding.usual is None or not is_worse(witness):
        return False
    better = witness.now - witness.then
    margin = finding.limit - finding.usual
    creeping = finding.detector == "slow-divergence"
    needed = _CERTAIN * margin if creeping else max(margin, _SHARE * (witness.now - finding.usual))
    return better == math.inf or not better <= needed


def _at_most_warn(severity: Severity) -> Severity:
    return "warn" if severity in ("act", "critical") else severity
