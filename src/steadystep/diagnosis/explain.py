"""The rules from the findings of one step to a cause, as a table one can read."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import final

from steadystep.diagnosis.causes import ADVICE, Cause
from steadystep.diagnosis.facts import sentence
from steadystep.records import Damage, Diagnosis, Finding, Signals, Witness

# Refused updates in a row from which bad data alone becomes unlikely.
_IN_A_ROW = 2
# What older weights may do better on one batch by chance.
_FORGIVEN = 0.02


def reach(signals: Signals, findings: tuple[Finding, ...]) -> Damage:
    """What the findings claim. Weights are damaged where that is certain, or where older ones do better."""
    asked = {f.detector for f in findings if f.severity in ("act", "critical")}
    if asked & {"odd-replica", "weight-jump", "early-divergence"}:
        return Damage.WEIGHTS
    stuck = signals.refused_in_a_row >= _IN_A_ROW and signals.input_finite is not False
    stuck = stuck and any(f.severity == "critical" for f in findings)
    accused = bool(asked & {"not-healing", "slow-divergence"}) or stuck
    if accused and signals.witness is not None and is_worse(signals.witness):
        return Damage.WEIGHTS
    # why: nothing could be run again, but weights that jumped and give nothing finite since are not the data's doing
    if stuck and signals.witness is None and any(f.detector == "weight-jump" for f in findings):
        return Damage.WEIGHTS
    return Damage.MOMENTS if asked & {"poisoned-moments", "damaged-state"} else Damage.NONE


def acquitted(signals: Signals) -> bool:
    """Older weights were tried on this batch, and do no better."""
    return signals.witness is not None and not is_worse(signals.witness)


def is_worse(witness: Witness) -> bool:
    """True when the present weights do worse than the older ones by more than chance.

    A batch that is not finite under older weights either is the data's fault.
    """
    if not math.isfinite(witness.then):
        return False
    return not witness.now - witness.then <= _FORGIVEN * abs(witness.then)


HEALTHY = Diagnosis()

_LOUDNESS = {"info": 0, "warn": 1, "act": 2, "critical": 3}
# Updates usually change weights by a thousandth; above a tenth they jump (Nikanjam et al. 2021, TheDeepChecker).
_BIG_UPDATE = 0.1
_RISEN = 1.3


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class StepFacts:
    """One step with its findings, in the form that rules ask for."""

    signals: Signals
    findings: tuple[Finding, ...]
    loudest: frozenset[str]
    """Detectors whose findings are the gravest of this step."""
    any: frozenset[str]
    """All detectors that said something."""
    suspicion: bool
    """Nothing here is more than a note."""
    damage: Damage

    @property
    def cleared(self) -> bool:
        """The loss has been high for long, and an old batch says that it is not the weights."""
        heard = self.signals.witness is not None and self.damage is not Damage.WEIGHTS
        return heard and acquitted(self.signals)

    @property
    def big_updates(self) -> bool:
        """Something at this step says that updates are too large."""
        if self.any & {"learning-rate-jump", "learning-rate-creep", "learning-rate-bounds"}:
            return True
        return any(f.detector == "update-ratio" and f.value >= _BIG_UPDATE for f in self.findings)

    @property
    def risen(self) -> bool:
        """The learning rate is well above the one under which the old batch was seen."""
        witness = self.signals.witness
        return witness is not None and 0.0 < _RISEN * witness.lr < self.signals.lr

    @property
    def small_updates(self) -> bool:
        """The update-ratio is what was found, and it is on the low side."""
        return all(f.value < _BIG_UPDATE for f in self.findings if f.detector == "update-ratio")


CauseRule = tuple[Cause, Callable[[StepFacts], bool]]


def _loud(*detectors: str) -> Callable[[StepFacts], bool]:
    return lambda case: bool(case.loudest.intersection(detectors))


_LASTING = _loud("not-healing", "slow-divergence")

# First match wins. Numbers that are no numbers come first, then what asks for action, then the rest; among equals the
# most specific first. A rule about detectors looks at the gravest findings of the step only.
CAUSE_RULES: tuple[CauseRule, ...] = (
    (Cause.SCHEDULE_ERROR, lambda c: not math.isfinite(c.signals.lr)),
    (Cause.NON_FINITE_INPUT, lambda c: c.signals.input_finite is False),
    (Cause.DAMAGED_WEIGHTS, lambda c: not c.signals.healthy and (_convicted(c) or "weight-jump" in c.any)),
    (Cause.FORWARD_OVERFLOW, lambda c: c.signals.scaled and not math.isfinite(c.signals.loss)),
    (Cause.NON_FINITE_LOSS, lambda c: not math.isfinite(c.signals.loss)),
    (Cause.NON_FINITE_BUFFER, lambda c: bool(c.signals.bad_buffers)),
    (Cause.LOSS_SCALE_COLLAPSE, lambda c: c.signals.scaled and "loss-scale" in c.loudest),
    (Cause.SCALE_OVERFLOW, lambda c: c.signals.scaled and not math.isfinite(c.signals.grad_norm)),
    (Cause.NON_FINITE_GRADIENT, lambda c: not math.isfinite(c.signals.grad_norm)),
    (Cause.ODD_REPLICA, _loud("odd-replica")),
    (Cause.DAMAGED_WEIGHTS, _loud("weight-jump")),
    (Cause.LEARNING_RATE_TOO_HIGH, _loud("early-divergence")),
    (Cause.BAD_BATCH, _loud("buffer-jump", "input-scale")),
    (Cause.SCHEDULE_ERROR, _loud("learning-rate-jump")),
    (Cause.UNKNOWN, lambda c: _LASTING(c) and c.suspicion),
    (Cause.DATA_SHIFT, lambda c: _LASTING(c) and c.cleared),
    (Cause.LEARNING_RATE_TOO_HIGH, lambda c: _LASTING(c) and (c.big_updates or c.risen)),
    (Cause.DAMAGED_WEIGHTS, lambda c: "not-healing" in c.loudest and _convicted(c)),
    (Cause.POISONED_MOMENTS, _loud("poisoned-moments", "damaged-state")),
    (Cause.LOST_MOMENTS, _loud("lost-moments")),
    (Cause.LEARNING_RATE_TOO_HIGH, _LASTING),
    (Cause.BAD_BATCH, lambda c: "gradient-spike" in c.loudest and "loss-spike" in c.any),
    (Cause.EXPLODING_GRADIENT, _loud("gradient-spike")),
    (Cause.MISSING_ZERO_GRAD, _loud("growing-gradient")),
    (Cause.GRADIENT_UNDERFLOW, lambda c: c.signals.scaled and "zero-gradient" in c.loudest),
    (Cause.DEAD_UNITS, _loud("dead-units")),
    (Cause.ZERO_GRADIENT, _loud("zero-gradient")),
    (Cause.SATURATION, _loud("saturated-units")),
    (Cause.VANISHING_GRADIENT, _loud("vanishing-gradient")),
    (Cause.EMBEDDING_GROWTH, _loud("embedding-growth")),
    (Cause.ATTENTION_LOGIT_GROWTH, _loud("attention-logit-growth")),
    (Cause.SCHEDULE_ERROR, _loud("learning-rate-creep")),
    (Cause.SCHEDULE_ERROR, _loud("learning-rate-bounds")),
    (Cause.LOSS_SCALE_COLLAPSE, _loud("loss-scale")),
    (Cause.OSCILLATION, _loud("oscillation")),
    (Cause.LEARNING_RATE_TOO_HIGH, _loud("worse-than-best", "constant-prediction")),
    (Cause.CLIPPING_TOO_TIGHT, _loud("clip-rate")),
    (Cause.SCHEDULE_ERROR, _loud("short-warmup")),
    (Cause.POLICY_DRIFT, _loud("kl-blow-up")),
    (Cause.ENTROPY_COLLAPSE, _loud("entropy-collapse")),
    (Cause.FLAT_REWARD, _loud("flat-reward")),
    (Cause.METRIC_OUT_OF_BOUNDS, _loud("metric-bounds")),
    (Cause.NO_LEARNING, _loud("no-learning")),
    (Cause.SUSPICIOUS_PERFECTION, _loud("suspicious-perfection")),
    (Cause.REPEATED_BATCH, _loud("same-batch")),
    (Cause.BAD_BATCH, _loud("loss-spike")),
    (Cause.EXPLODING_GRADIENT, _loud("rms-surprise")),
    (Cause.LEARNING_RATE_TOO_LOW, lambda c: "update-ratio" in c.loudest and c.small_updates),
    (Cause.LEARNING_RATE_TOO_HIGH, _loud("update-ratio")),
    (Cause.UNKNOWN, lambda c: True),
)


def explain(signals: Signals, findings: tuple[Finding, ...]) -> Diagnosis:
    """The likeliest cause for one step, and what the trouble has reached so far."""
    if not findings:
        return HEALTHY
    top = max(_LOUDNESS[finding.severity] for finding in findings)
    case = StepFacts(
        signals=signals,
        findings=findings,
        loudest=frozenset(f.detector for f in findings if _LOUDNESS[f.severity] == top),
        any=frozenset(f.detector for f in findings),
        suspicion=top == 0,
        damage=reach(signals, findings),
    )
    cause = next(cause for cause, holds in CAUSE_RULES if holds(case))
    return Diagnosis(
        cause=cause.value,
        damage=case.damage,
        findings=findings,
        evidence="; ".join([*map(sentence, findings), *_testimony(signals)]),
        advice=ADVICE[cause],
    )


def not_repeatable() -> Diagnosis:
    """For a group whose gradients were lost and could not be computed again."""
    cause = Cause.CLOSURE_NOT_REPEATABLE
    evidence = "a pass was interrupted and a closure gave another loss when it was run again"
    return Diagnosis(cause=cause.value, evidence=evidence, advice=ADVICE[cause])


def exception_in_step(error: BaseException) -> Diagnosis:
    """For a step whose closure raised."""
    cause = Cause.EXCEPTION_IN_STEP
    evidence = f"the closure raised {type(error).__name__}: {error}"
    return Diagnosis(cause=cause.value, evidence=evidence[:500], advice=ADVICE[cause])


def _convicted(case: StepFacts) -> bool:
    return case.damage is Damage.WEIGHTS and case.signals.witness is not None


def _testimony(signals: Signals) -> list[str]:
    witness = signals.witness
    if witness is None:
        return []
    if witness.batches > 1:
        pair = f"{witness.now:.4g}, and {witness.then:.4g} with the weights of step {witness.step}"
        return [f"the last {witness.batches} batches have a mean loss of {pair}"]
    return [
        f"this batch has a loss of {witness.now:.4g}, and {witness.then:.4g} with the weights of step {witness.step}"
    ]
