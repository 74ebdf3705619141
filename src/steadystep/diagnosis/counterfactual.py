"""Does a rollback pay for itself? The very state it would restore, tried against the present weights batch by batch.

Each step's batch is run once under either, before anybody has learned from it, with the same random numbers. The pairs
are compared until they agree: single batches differ, the weights of a noisy run wander, and a jump that is on its way
down needs no help. What is lost by going back is in the comparison, because the old state has not seen those updates.
"""

import math
from dataclasses import replace
from typing import Any, Literal, final

from steadystep.diagnosis.damage import is_worse
from steadystep.records import Counterfactual, DetectorName, Finding, Severity, Signals

_FEWEST, _MOST = 8, 24  # batches
_CERTAIN = 4.0  # standard errors
_CREEPING = 2.0  # margins of a slow divergence: one of them is what it calls material
_SHARE = 0.5  # of a jump: what the old state must undo of it
_HEALING = 0.7  # of what it was at first: the gap closes by itself
_TREND = 16  # batches: with fewer, a fall is chance
_FALLS = 1.2  # sigma of the losses: noise alone falls by less between its ends
_EDGE = 4  # batches at either end, for the trend
_OVERFLOWED = 4  # batches that are finite under the old state only
_QUIET_STEPS = 32  # after it came to nothing
_TOLD_STEPS = 400  # between two warnings

RollbackTrialResult = Literal["gathering", "confirmed", "cleared", "healing"]


@final
class RollbackTrial:
    """Opened by a suspicion, closed by a verdict."""

    def __init__(self) -> None:
        self.finding: Finding | None = None
        """What is suspected; None while nothing is."""
        self.state = 0
        """The step whose weights are tried."""
        self._lr = 0.0
        self._pairs: list[tuple[float, float]] = []
        self._quiet_until = -1
        self._told_until = -1

    def begin(self, finding: Finding, *, state: int, lr: float) -> bool:
        """Suspect `finding`; a rollback would restore `state`. False so soon after one that came to nothing."""
        if finding.step < self._quiet_until:
            return False
        self.finding, self.state, self._lr = finding, state, lr
        self._pairs = []
        return True

    def heard(self, finding: Finding) -> None:
        """The same suspicion once more: its newest numbers count."""
        if self.finding is not None and self.finding.detector == finding.detector:
            graver = "act" in (finding.severity, self.finding.severity)
            self.finding = replace(finding, severity="act" if graver else finding.severity)

    def close(self, step: int) -> Finding:
        """The suspicion is settled at `step`; returns what it was."""
        assert self.finding is not None
        suspected, self.finding = replace(self.finding, step=step), None
        self._quiet_until = step + _QUIET_STEPS
        return suspected

    def once(self, finding: Finding) -> Finding:
        """A warning as it is, and as a note for a while after another one."""
        if finding.severity != "warn":
            return finding
        if finding.step < self._told_until:
            return replace(finding, severity="info")
        self._told_until = finding.step + _TOLD_STEPS
        return finding

    @property
    def counterfactual(self) -> Counterfactual:
        """What was seen so far, as means."""
        current_loss, old_loss = (
            [current_loss for _, current_loss in self._pairs],
            [old_loss for old_loss, _ in self._pairs],
        )
        return Counterfactual(
            step=self.state,
            old_loss=_mean(old_loss),
            current_loss=_mean(current_loss),
            lr=self._lr,
            batches=len(self._pairs),
        )

    def add(self, *, old_loss: float, current_loss: float) -> RollbackTrialResult:
        """One more batch: its loss under the old state and under the present weights."""
        assert self.finding is not None
        self._pairs.append((old_loss, current_loss))
        if not all(math.isfinite(old_loss) for old_loss, _ in self._pairs):
            return "cleared"  # the data's fault
        better = [current_loss - old_loss for old_loss, current_loss in self._pairs]
        overflowed = sum(not math.isfinite(value) for value in better)
        count = len(better)
        if overflowed >= _OVERFLOWED:
            return "confirmed"
        if overflowed:
            return "gathering" if count < _MOST else "cleared"
        if count < _FEWEST:
            return "gathering"
        mean = _mean(better)
        error = math.sqrt(_mean([(value - mean) * (value - mean) for value in better]) / (count - 1))
        needed = self._needed(self.counterfactual)
        # why not for a jump of weights: what changed them from outside is undone, whatever they learn to do without
        lasting = self._is_of_weights or _mean(better[-_EDGE:]) >= _HEALING * _mean(better[:_EDGE])
        agree = sum(value > 0.0 for value in better) >= count - count // _FEWEST
        if mean > needed and mean >= _CERTAIN * error and agree and lasting and is_worse(self.counterfactual):
            return "confirmed"
        if count < _MOST and not mean + 2.0 * error < needed:
            return "gathering"
        return "healing" if count >= _TREND and self._falls() else "cleared"

    def _falls(self) -> bool:
        """The loss is on its way back, by more than the batches differ."""
        assert self.finding is not None
        losses = [current_loss for _, current_loss in self._pairs]
        baseline = math.nan if self.finding.baseline is None else self.finding.baseline
        first, last, mean = _mean(losses[:_EDGE]), _mean(losses[-_EDGE:]), _mean(losses)
        noise = math.sqrt(_mean([(loss - mean) * (loss - mean) for loss in losses]))
        return last - baseline < _HEALING * (first - baseline) and first - last > _FALLS * noise

    def state_dict(self) -> dict[str, Any]:
        """JSON-ready state. States in memory do not survive a resume, and so does no suspicion."""
        return {"quiet_until": self._quiet_until, "told_until": self._told_until}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        self.finding = None
        self._quiet_until, self._told_until = int(state["quiet_until"]), int(state["told_until"])

    @property
    def _is_of_weights(self) -> bool:
        return self.finding is not None and self.finding.detector == DetectorName.WEIGHT_JUMP

    def _needed(self, counterfactual: Counterfactual) -> float:
        finding = self.finding
        assert finding is not None
        baseline = counterfactual.old_loss if finding.baseline is None else finding.baseline
        margin = finding.limit - baseline
        if self._is_of_weights:  # its numbers are norms; what counts is that the loss is the worse for it
            return 0.0
        if finding.detector == DetectorName.SLOW_DIVERGENCE:
            return _CREEPING * margin
        return max(margin, _SHARE * (counterfactual.current_loss - baseline))


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else math.nan


LASTING = (
    DetectorName.NOT_HEALING,
    DetectorName.SLOW_DIVERGENCE,
    DetectorName.WORSE_THAN_BEST,
    DetectorName.WEIGHT_JUMP,
)
"""Detectors of what only a comparison of weights can confirm: a loss that stays high, a tensor that changed much."""
_STUCK = 2  # refused updates before this one
_EARLY = DetectorName.EARLY_DIVERGENCE
_BETTER = 10.0  # times: what the first weights do better on a batch that is theirs to do
_UNTRIED = 1e4  # times the limit, and
_LARGE = 1e3  # absolute: without older weights to ask, only then is it said


def needs_counterfactual(signals: Signals, findings: tuple[Finding, ...]) -> bool:
    """Whether this batch under older weights says what is to be done.

    It does where updates are refused again and again, or the loss has multiplied in the first steps.
    """
    stuck = signals.refused_in_a_row >= _STUCK and signals.input_finite is not False
    if any(f.detector == DetectorName.WEIGHT_JUMP and f.severity == "act" for f in findings):
        return False  # there is nothing to ask: these weights cannot be used
    if any(f.detector == _EARLY and f.severity == "act" for f in findings):
        return True
    return stuck and any(f.severity == "critical" for f in findings)


def first_sign(findings: tuple[Finding, ...]) -> int:
    """Only weights older than this can tell."""
    return min(f.step if f.since is None else f.since for f in findings)


def weigh(signals: Signals, findings: tuple[Finding, ...]) -> tuple[Finding, ...]:
    """Return the findings with the severity that the counterfactual gives them; without one most are unchanged."""
    counterfactual = signals.counterfactual
    findings = tuple(_early(f, counterfactual) if f.detector == _EARLY else f for f in findings)
    if counterfactual is None:
        return findings
    severity: Severity = "act" if is_worse(counterfactual) else "warn"
    return tuple(replace(f, severity=severity) if f.detector == DetectorName.WEIGHT_JUMP else f for f in findings)


def _early(finding: Finding, counterfactual: Counterfactual | None) -> Finding:
    """Undone where the batch at hand is an ordinary one for the first weights, and not for the present ones."""
    if finding.severity != "act":
        return finding
    severity: Severity = "info"
    if counterfactual is None:
        severity = "warn" if finding.value > max(_UNTRIED * finding.limit, _LARGE) else "info"
    elif finding.baseline is not None and math.isfinite(counterfactual.old_loss):
        ordinary = counterfactual.old_loss <= _BETTER * finding.baseline
        severity = (
            "act" if ordinary and not counterfactual.current_loss <= _BETTER * counterfactual.old_loss else "info"
        )
    return replace(finding, severity=severity)
