"""The rules from the findings of one step to a cause, as a table one can read."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import final

from steadystep.diagnosis.advice import advise
from steadystep.diagnosis.causes import Cause
from steadystep.diagnosis.counterfactual import OF_THE_LOSS, is_cleared, is_worse
from steadystep.diagnosis.facts import UNKNOWN_SETUP, Setup, sentence
from steadystep.records import GRAVE, Action, Damage, DetectorName, Diagnosis, Finding, Plan, Signals, severity_rank

HEALTHY = Diagnosis()

# Updates usually change weights by a thousandth; above a tenth they jump (Nikanjam et al. 2021, TheDeepChecker).
_BIG_UPDATE = 0.1
_RISEN = 1.3
_IN_A_ROW = 2  # refused updates from which bad data alone becomes unlikely


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
        return self.damage is not Damage.WEIGHTS and is_cleared(self.signals)

    @property
    def big_updates(self) -> bool:
        """Something at this step says that updates are too large."""
        if self.any & {
            DetectorName.LEARNING_RATE_JUMP,
            DetectorName.LEARNING_RATE_CREEP,
            DetectorName.LEARNING_RATE_BOUNDS,
        }:
            return True
        return any(f.detector == DetectorName.UPDATE_RATIO and f.value >= _BIG_UPDATE for f in self.findings)

    @property
    def risen(self) -> bool:
        """The learning rate is well above the one under which the old batch was seen."""
        counterfactual = self.signals.counterfactual
        return counterfactual is not None and 0.0 < _RISEN * counterfactual.lr < self.signals.lr

    @property
    def small_updates(self) -> bool:
        """The update-ratio is what was found, and it is on the low side."""
        return all(f.value < _BIG_UPDATE for f in self.findings if f.detector == DetectorName.UPDATE_RATIO)


CauseRule = tuple[Cause, Callable[[StepFacts], bool]]


def _loud(*detectors: str) -> Callable[[StepFacts], bool]:
    return lambda case: bool(case.loudest.intersection(detectors))


_LASTING = _loud(DetectorName.NOT_HEALING, DetectorName.SLOW_DIVERGENCE)

# First match wins. NaN and infinity come first, then what asks for action, then the rest; among equals the
# most specific first. A rule about detectors looks at the gravest findings of the step only.
CAUSE_RULES: tuple[CauseRule, ...] = (
    (Cause.SCHEDULE_ERROR, lambda c: not math.isfinite(c.signals.lr)),
    (Cause.NON_FINITE_INPUT, lambda c: c.signals.input_finite is False),
    (
        Cause.DAMAGED_WEIGHTS,
        lambda c: not c.signals.all_finite and (_is_confirmed(c) or DetectorName.WEIGHT_JUMP in c.any),
    ),
    (Cause.FORWARD_OVERFLOW, lambda c: c.signals.scaled and not math.isfinite(c.signals.loss)),
    (Cause.NON_FINITE_LOSS, lambda c: not math.isfinite(c.signals.loss)),
    (Cause.NON_FINITE_BUFFER, lambda c: bool(c.signals.bad_buffers)),
    (Cause.LOSS_SCALE_COLLAPSE, lambda c: c.signals.scaled and DetectorName.LOSS_SCALE in c.loudest),
    (Cause.SCALE_OVERFLOW, lambda c: c.signals.scaled and not math.isfinite(c.signals.grad_norm)),
    (Cause.NON_FINITE_GRADIENT, lambda c: not math.isfinite(c.signals.grad_norm)),
    (Cause.ODD_REPLICA, _loud(DetectorName.ODD_REPLICA)),
    (Cause.MISCOMPUTED_STEP, _loud(DetectorName.MISCOMPUTATION)),
    (Cause.DAMAGED_WEIGHTS, _loud(DetectorName.BIT_FLIP, DetectorName.WEIGHT_JUMP)),
    (Cause.LEARNING_RATE_TOO_HIGH, _loud(DetectorName.EARLY_DIVERGENCE)),
    (Cause.BAD_BATCH, _loud(DetectorName.BUFFER_JUMP, DetectorName.INPUT_SCALE)),
    (Cause.SCHEDULE_ERROR, _loud(DetectorName.LEARNING_RATE_JUMP)),
    (Cause.POLICY_MISMATCH, _loud(DetectorName.POLICY_MISMATCH)),
    (Cause.RATIO_EXPLOSION, _loud(DetectorName.RATIO_EXPLOSION)),
    (Cause.UNKNOWN, lambda c: _LASTING(c) and c.suspicion),
    (Cause.DATA_SHIFT, lambda c: _LASTING(c) and c.cleared),
    (Cause.LEARNING_RATE_TOO_HIGH, lambda c: _LASTING(c) and (c.big_updates or c.risen)),
    (Cause.DAMAGED_WEIGHTS, lambda c: DetectorName.NOT_HEALING in c.loudest and _is_confirmed(c)),
    (Cause.POISONED_MOMENTS, _loud(DetectorName.POISONED_MOMENTS, DetectorName.DAMAGED_STATE)),
    (Cause.LOST_MOMENTS, _loud(DetectorName.LOST_MOMENTS)),
    (Cause.LEARNING_RATE_TOO_HIGH, _LASTING),
    (Cause.BAD_BATCH, lambda c: DetectorName.GRADIENT_SPIKE in c.loudest and DetectorName.LOSS_SPIKE in c.any),
    (Cause.EXPLODING_GRADIENT, _loud(DetectorName.GRADIENT_SPIKE)),
    (Cause.MISSING_ZERO_GRAD, _loud(DetectorName.GROWING_GRADIENT)),
    (Cause.GRADIENT_UNDERFLOW, lambda c: c.signals.scaled and DetectorName.ZERO_GRADIENT in c.loudest),
    (Cause.DEAD_UNITS, _loud(DetectorName.DEAD_UNITS)),
    (Cause.ZERO_GRADIENT, _loud(DetectorName.ZERO_GRADIENT)),
    (Cause.SATURATION, _loud(DetectorName.SATURATED_UNITS)),
    (Cause.VANISHING_GRADIENT, _loud(DetectorName.VANISHING_GRADIENT)),
    (Cause.EMBEDDING_GROWTH, _loud(DetectorName.EMBEDDING_GROWTH)),
    (Cause.ATTENTION_LOGIT_GROWTH, _loud(DetectorName.ATTENTION_LOGIT_GROWTH)),
    (Cause.SCHEDULE_ERROR, _loud(DetectorName.LEARNING_RATE_CREEP)),
    (Cause.SCHEDULE_ERROR, _loud(DetectorName.LEARNING_RATE_BOUNDS)),
    (Cause.LOSS_SCALE_COLLAPSE, _loud(DetectorName.LOSS_SCALE)),
    (Cause.OSCILLATION, _loud(DetectorName.OSCILLATION)),
    (Cause.LEARNING_RATE_TOO_HIGH, _loud(DetectorName.WORSE_THAN_BEST, DetectorName.CONSTANT_PREDICTION)),
    (Cause.CLIPPING_TOO_TIGHT, _loud(DetectorName.CLIP_RATE)),
    (Cause.SCHEDULE_ERROR, _loud(DetectorName.SHORT_WARMUP)),
    (Cause.BAD_ADVANTAGES, _loud(DetectorName.BAD_ADVANTAGES)),
    (Cause.REWARD_HACKING, _loud(DetectorName.REWARD_HACKING)),
    (Cause.VALUE_DIVERGENCE, _loud(DetectorName.VALUE_DIVERGENCE)),
    (Cause.POLICY_DRIFT, _loud(DetectorName.KL_BLOW_UP)),
    (Cause.ENTROPY_COLLAPSE, _loud(DetectorName.ENTROPY_COLLAPSE)),
    (Cause.POLICY_COLLAPSE, _loud(DetectorName.REWARD_COLLAPSE)),
    (Cause.DEAD_GROUPS, _loud(DetectorName.DEAD_GROUPS)),
    (Cause.FLAT_REWARD, _loud(DetectorName.FLAT_REWARD)),
    (Cause.METRIC_OUT_OF_BOUNDS, _loud(DetectorName.METRIC_BOUNDS)),
    (Cause.NO_LEARNING, _loud(DetectorName.NO_LEARNING)),
    (Cause.SUSPICIOUS_PERFECTION, _loud(DetectorName.SUSPICIOUS_PERFECTION)),
    (Cause.REPEATED_BATCH, _loud(DetectorName.SAME_BATCH)),
    (Cause.BAD_BATCH, _loud(DetectorName.LOSS_SPIKE)),
    (Cause.EXPLODING_GRADIENT, _loud(DetectorName.RMS_SURPRISE)),
    (Cause.LEARNING_RATE_TOO_LOW, lambda c: DetectorName.UPDATE_RATIO in c.loudest and c.small_updates),
    (Cause.LEARNING_RATE_TOO_HIGH, _loud(DetectorName.UPDATE_RATIO)),
    (Cause.UNKNOWN, lambda c: True),
)


def explain(signals: Signals, findings: tuple[Finding, ...], setup: Setup = UNKNOWN_SETUP) -> Diagnosis:
    """Return the most likely cause for one step, how far the damage has reached, and advice.

    Args:
        signals: the measurements.
        findings: what the detectors found.
        setup: what is known of the settings of the run, so that advice leaves out what is set.
    """
    if not findings:
        return HEALTHY
    top = max(severity_rank(finding.severity) for finding in findings)
    case = StepFacts(
        signals=signals,
        findings=findings,
        loudest=frozenset(f.detector for f in findings if severity_rank(f.severity) == top),
        any=frozenset(f.detector for f in findings),
        suspicion=top == 0,
        damage=reach(signals, findings),
    )
    cause = next(cause for cause, holds in CAUSE_RULES if holds(case))
    return Diagnosis(
        cause=cause.value,
        damage=case.damage,
        findings=findings,
        evidence="; ".join([*map(sentence, findings), *_counterfactual_evidence(signals)]),
        advice=_about_memory(signals) or advise(cause, as_measured(setup, signals)),
    )


def _about_memory(signals: Signals) -> str:
    """Advice after bits that flipped and are in place again."""
    if not signals.bit_flips or not all(flip.repaired for flip in signals.bit_flips):
        return ""
    return "the guard put it back; if it happens again, check the memory of this machine (ECC counters, a memory test)"


def advised(diagnosis: Diagnosis, signals: Signals, plan: Plan, setup: Setup = UNKNOWN_SETUP) -> Diagnosis:
    """Return the same diagnosis with the advice that is left after a plan was carried out.

    Args:
        diagnosis: the one before.
        signals: the measurements of the step.
        plan: what was done.
        setup: what is known of the settings of the run.
    """
    if not plan.actions or _about_memory(signals):
        return diagnosis
    return replace(diagnosis, advice=advise(Cause(diagnosis.cause), as_measured(setup, signals), plan))


def as_warning(diagnosis: Diagnosis) -> Diagnosis:
    """Return the diagnosis of what was tried and led to nothing: a warning, and no damage that is known."""
    found = tuple(replace(f, severity="warn") if f.severity == "act" else f for f in diagnosis.findings)
    return replace(diagnosis, findings=found, damage=Damage.NONE)


def of_data(diagnosis: Diagnosis, count: int) -> Diagnosis:
    """Return the diagnosis of `count` batches that were to blame, whatever the curve looked like."""
    cause = diagnosis.cause if diagnosis.cause == Cause.REPEATED_BATCH else Cause.BAD_BATCH
    what = f"{count} batches are unusual for the restored weights: their updates were undone, the others replayed"
    return replace(diagnosis, cause=Cause(cause).value, evidence=f"{diagnosis.evidence}; {what}")


def as_measured(setup: Setup, signals: Signals) -> Setup:
    """Return the setup with what the signals of a step show of it: a loss scaler is one of fp16."""
    precision = "fp16" if signals.scaled else setup.precision
    given = signals.batch_rms is not None or signals.input_finite is not None or setup.gives_batch
    return replace(setup, precision=precision, gives_batch=given)


def not_repeatable(*, given: bool = False) -> Diagnosis:
    """Return the diagnosis of a group whose gradients were lost; `given` says that it came with `batch=`."""
    cause, plan = Cause.CLOSURE_NOT_REPEATABLE, Plan(actions=(Action.SKIP_STEP,))
    evidence = "a forward or backward pass was interrupted, and re-running the closure gave a different loss"
    return Diagnosis(cause=cause.value, evidence=evidence, advice=advise(cause, Setup(gives_batch=given), plan))


def exception_in_step(error: BaseException, plan: Plan) -> Diagnosis:
    """Return the diagnosis of a step whose closure raised.

    Args:
        error: what it raised.
        plan: what was done about it.
    """
    cause = Cause.EXCEPTION_IN_STEP
    evidence = f"the closure raised {type(error).__name__}: {error}"
    return Diagnosis(cause=cause.value, evidence=evidence[:500], advice=advise(cause, UNKNOWN_SETUP, plan))


def _is_confirmed(case: StepFacts) -> bool:
    return case.damage is Damage.WEIGHTS and case.signals.counterfactual is not None


def _counterfactual_evidence(signals: Signals) -> list[str]:
    tried = signals.counterfactual
    if tried is None:
        return []
    if not tried.batches:
        return [f"the loss of all batches tried is high with the weights of step {tried.step} too"]
    if tried.rollouts:
        earned = f"{-tried.current_loss:.4g} now and {-tried.old_loss:.4g} with the weights of step {tried.step}"
        return [f"{tried.batches} rollouts earn {earned} on average"]
    losses = f"{tried.current_loss:.4g} now and {tried.old_loss:.4g} with the weights of step {tried.step}"
    if tried.batches > 1:
        return [f"the mean loss of the last {tried.batches} batches is {losses}"]
    return [f"the loss of this batch is {losses}"]


def reach(signals: Signals, findings: tuple[Finding, ...]) -> Damage:
    """What the findings claim. Weights are damaged where that is certain, or where older ones do better."""
    if signals.counterfactual is not None and signals.counterfactual.rollouts:
        return Damage.WEIGHTS
    asked = {f.detector for f in findings if f.severity in GRAVE}
    if asked & {
        DetectorName.ODD_REPLICA,
        DetectorName.WEIGHT_JUMP,
        DetectorName.EARLY_DIVERGENCE,
        DetectorName.SAME_BATCH,  # asked for only where that was found out
    }:
        return Damage.WEIGHTS
    if any(f.detector == DetectorName.BIT_FLIP and f.severity in GRAVE and f.value > 0.0 for f in findings):
        return Damage.WEIGHTS  # it could not be put back
    stuck = signals.refused_in_a_row >= _IN_A_ROW and signals.input_finite is not False
    stuck = stuck and any(f.severity == "critical" for f in findings)
    accused = bool(asked & set(OF_THE_LOSS)) or stuck
    if accused and signals.counterfactual is not None and is_worse(signals.counterfactual):
        return Damage.WEIGHTS
    # why: nothing could be run again, but weights that jumped and give nothing finite since are not the data's doing
    if stuck and signals.counterfactual is None and any(f.detector == DetectorName.WEIGHT_JUMP for f in findings):
        return Damage.WEIGHTS
    return Damage.MOMENTS if asked & {DetectorName.POISONED_MOMENTS, DetectorName.DAMAGED_STATE} else Damage.NONE
