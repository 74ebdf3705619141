"""Does a rollback pay for itself? The very state it would restore, tried against the present weights batch by batch.

Each step's batch is run once under either, before anybody has learned from it, with the same random numbers. The pairs
are compared until they agree: single batches differ, the weights of a noisy run wander, and a jump that is on its way
down needs no help. What is lost by a rollback is in the comparison, because the old state has not seen those updates.
"""

import math
from dataclasses import replace
from typing import Any, Literal, final

from steadystep.records import Counterfactual, DetectorName, Finding, Severity, Signals

_FEWEST, _MOST = 8, 24  # batches
_CERTAIN = 4.0  # standard errors
_CREEPING = 2.0  # margins of a slow divergence: one of them is what it calls material
_SHARE = 0.5  # of a jump: what the old state must undo of it
_HEALING = 0.7  # of what it was at first: the gap closes by itself
_TREND = 16  # batches: with fewer, a fall is chance
_FALLS = 1.2  # sigma of the losses: noise alone falls by less between its ends
_EDGE = 4  # batches at either end, for the trend
_FEWEST_BAD = 3  # batches in a row
OF_THE_LOSS = (DetectorName.NOT_HEALING, DetectorName.SLOW_DIVERGENCE)
_OVERFLOWED = 4  # batches that are finite under the old state only
_QUIET_STEPS = 32  # after it came to nothing
_TOLD_STEPS = 400  # between two warnings
_REPLAYED_STEPS = 500  # between two replays for the sake of a gap that closes
GROWN = 2.0  # times what it was

Findings = tuple[Finding, ...]
RollbackTrialResult = Literal["gathering", "confirmed", "cleared", "healing"]
"""State of a trial: `confirmed` means that the rollback helps, `cleared` that it does not."""


@final
class RollbackTrial:
    """Tests over several batches whether a rollback would help, before it is made."""

    def __init__(self) -> None:
        self.finding: Finding | None = None
        """The finding under trial; None if there is no trial."""
        self.state = 0
        """Step of the snapshot that is tried."""
        self._lr = 0.0
        self._pairs: list[tuple[float, float]] = []
        self._aside = 0
        """Batches at the beginning that were too high for the old state as well: they tell nothing about weights."""
        self._replays = False
        self._silent = False
        """The last one began with a note."""
        self._quiet_until = -1
        self._told_until = self._replayed_until = -1

    def begin(self, finding: Finding, *, state: int, lr: float, replays: bool = False) -> bool:
        """Open a trial of `finding`, with `state` to roll back to; return False too soon after one without result.

        `replays` says that updates after that state can be replayed, so that good batches are not lost. A note opens
        one in silence, to find out whether its batches are bad, and keeps no warning waiting.
        """
        if finding.step < self._quiet_until and (finding.severity == "info" or not self._silent):
            return False
        self.finding, self.state, self._lr = finding, state, lr
        self._pairs, self._aside, self._replays = [], 0, replays
        return True

    def candidates(self, loud: Findings, lasting: Findings, *, replays: bool) -> Findings:
        """Return what to try: warnings, which end a silent trial, or a note about a loss that has doubled."""
        tried = self.finding
        if loud and tried is not None and tried.severity == "info" and loud[0].detector != tried.detector:
            self.close(loud[0].step)
        slow = [f for f in lasting if replays and f.detector == DetectorName.SLOW_DIVERGENCE]
        return loud or tuple(f for f in slow if f.value > GROWN * (f.baseline or math.inf) > 0.0)

    def heard(self, finding: Finding) -> None:
        """Update the trial with a newer `finding` of the same kind."""
        if self.finding is not None and self.finding.detector == finding.detector:
            graver = "act" in (finding.severity, self.finding.severity)
            self.finding = replace(finding, severity="act" if graver else finding.severity)

    def close(self, step: int) -> Finding:
        """Close the trial at `step` and return its finding."""
        assert self.finding is not None
        suspected, self.finding = replace(self.finding, step=step), None
        self._silent = suspected.severity == "info"
        self._quiet_until = step + _QUIET_STEPS
        return suspected

    def once(self, finding: Finding) -> Finding:
        """Return a warning unchanged, or as a note for a while after another one."""
        if finding.severity != "warn":
            return finding
        if finding.step < self._told_until:
            return replace(finding, severity="info")
        self._told_until = finding.step + _TOLD_STEPS
        return finding

    def may_replay(self, step: int) -> bool:
        """Return whether the updates since may be replayed as a test; one that led to nothing is not repeated soon."""
        if step < self._replayed_until:
            return False
        self._replayed_until = step + _REPLAYED_STEPS
        return True

    @property
    def counterfactual(self) -> Counterfactual:
        """Mean losses so far."""
        old, current = (_mean([pair[which] for pair in self._pairs]) for which in (0, 1))
        return Counterfactual(
            step=self.state, old_loss=old, current_loss=current, lr=self._lr, batches=len(self._pairs)
        )

    def add(self, *, old_loss: float, current_loss: float) -> RollbackTrialResult:
        """Add one batch: its loss under the earlier and under the current weights."""
        assert self.finding is not None
        if self._puts_aside(old_loss, current_loss):
            self._aside += 1
            return "gathering" if self._aside < _MOST else "cleared"
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
        lasting = self._is_over or _mean(better[-_EDGE:]) >= _HEALING * _mean(better[:_EDGE]) or self._too_slow(better)
        agree = sum(value > 0.0 for value in better) >= count - count // _FEWEST
        if mean > needed and mean >= _CERTAIN * error and agree and lasting and is_worse(self.counterfactual):
            return "confirmed"
        if count < _MOST and not mean + 2.0 * error < needed:
            return "gathering"
        return "healing" if count >= _TREND and self._falls() else "cleared"

    def _too_slow(self, better: list[float]) -> bool:
        """It heals, and half of the rise is still there after all these batches; nothing is lost by a replay."""
        finding = self.finding
        if len(better) < _MOST or not self._replays or finding is None or finding.baseline is None:
            return False
        return _mean(better[-_EDGE:]) >= _SHARE * (finding.value - finding.baseline)

    def _puts_aside(self, old_loss: float, current_loss: float) -> bool:
        """The batch is bad under any weights, as all were since the trial began; good ones may follow."""
        finding = self.finding
        if self._pairs or not self._replays or finding is None or finding.detector not in OF_THE_LOSS:
            return False
        if finding.baseline is None or not math.isfinite(old_loss) or old_loss <= finding.limit:
            return False
        return old_loss - finding.baseline > _SHARE * (current_loss - finding.baseline)

    def _falls(self) -> bool:
        """The loss is on its way back, by more than the batches differ."""
        assert self.finding is not None
        losses = [current_loss for _, current_loss in self._pairs]
        baseline = math.nan if self.finding.baseline is None else self.finding.baseline
        first, last, mean = _mean(losses[:_EDGE]), _mean(losses[-_EDGE:]), _mean(losses)
        noise = math.sqrt(_mean([(loss - mean) * (loss - mean) for loss in losses]))
        return last - baseline < _HEALING * (first - baseline) and first - last > _FALLS * noise

    def state_dict(self) -> dict[str, Any]:
        """Return the state, ready for JSON. Snapshots do not survive a resume, so an open trial is dropped."""
        return {"quiet_until": self._quiet_until, "told_until": self._told_until}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        self.finding = None
        self._quiet_until, self._told_until = int(state["quiet_until"]), int(state["told_until"])

    @property
    def _is_over(self) -> bool:
        """What did the damage has passed, and a rollback loses nothing else: a jump of weights, bad batches."""
        of_weights = self.finding is not None and self.finding.detector == DetectorName.WEIGHT_JUMP
        return of_weights or self.is_of_data

    @property
    def is_of_data(self) -> bool:
        """Batches were bad for a while and are good again."""
        repeated = self.finding is not None and self.finding.detector == DetectorName.SAME_BATCH
        return self._replays and (repeated or self._aside >= _FEWEST_BAD)

    def _needed(self, counterfactual: Counterfactual) -> float:
        finding = self.finding
        assert finding is not None
        baseline = counterfactual.old_loss if finding.baseline is None else finding.baseline
        margin = finding.limit - baseline
        if self._is_over:
            return 0.0  # what counts is that the loss is the worse for it
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
    DetectorName.SAME_BATCH,
)
"""Detectors of a lasting rise, whose findings are tested with earlier weights."""
_STUCK = 2  # refused updates before this one
_BY_CHANCE = 0.02  # what older weights may do better on one batch
_EARLY = DetectorName.EARLY_DIVERGENCE
_BETTER = 10.0  # times: what the first weights do better on a batch that is theirs to do
_UNTRIED = 1e4  # times the limit, and
_LARGE = 1e3  # absolute: without older weights to ask, only then is it said


def is_uncertain(finding: Finding) -> bool:
    """Only a comparison can confirm it; a weight that is no longer finite needs none."""
    certain = {DetectorName.WEIGHT_JUMP: "act", DetectorName.SAME_BATCH: "warn"}.get(finding.detector, "")
    return finding.detector in LASTING and finding.severity != certain


def needs_counterfactual(signals: Signals, findings: tuple[Finding, ...]) -> bool:
    """Return whether the loss under earlier weights is needed for a decision.

    It is where updates are refused again and again, or where the loss has multiplied in the first steps.

    Args:
        signals: the measurements.
        findings: what the detectors found.
    """
    stuck = signals.refused_in_a_row >= _STUCK and signals.input_finite is not False
    if any(f.detector == DetectorName.WEIGHT_JUMP and f.severity == "act" for f in findings):
        return False  # there is nothing to ask: these weights cannot be used
    if any(f.detector == _EARLY and f.severity == "act" for f in findings):
        return True
    return stuck and any(f.severity == "critical" for f in findings)


def first_sign(findings: tuple[Finding, ...]) -> int:
    """Return the first step of the fault in `findings`: only earlier weights are free of it."""
    return min(f.step if f.since is None else f.since for f in findings)


def weigh(signals: Signals, findings: tuple[Finding, ...]) -> tuple[Finding, ...]:
    """Return the findings with the severity that the counterfactual gives them; without one most are unchanged.

    Args:
        signals: the measurements, with or without a counterfactual.
        findings: what the detectors found.
    """
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
        undone = ordinary and not counterfactual.current_loss <= _BETTER * counterfactual.old_loss
        severity = "act" if undone else "info"
    return replace(finding, severity=severity)


def is_cleared(signals: Signals) -> bool:
    """Older weights were tried on this batch, and do no better."""
    return signals.counterfactual is not None and not is_worse(signals.counterfactual)


def as_closing(signals: Signals) -> Signals:
    """Return the signals with a counterfactual that is reason enough for a replay, and for nothing else."""
    assert signals.counterfactual is not None
    return replace(signals, counterfactual=replace(signals.counterfactual, closing=True))


def is_worse(counterfactual: Counterfactual) -> bool:
    """True when the present weights do worse than the older ones by more than chance.

    A batch that is not finite under older weights either is the data's fault.
    """
    if not math.isfinite(counterfactual.old_loss):
        return False
    return not counterfactual.current_loss - counterfactual.old_loss <= _BY_CHANCE * abs(counterfactual.old_loss)
