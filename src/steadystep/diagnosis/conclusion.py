"""What is said of a run without a cause against it: that it learns, that it does not, or that it cannot be told."""

from collections.abc import Sequence

from steadystep.diagnosis.advice import advise
from steadystep.diagnosis.causes import Cause, Fault
from steadystep.diagnosis.facts import Facts, told
from steadystep.diagnosis.learning import TOO_SHORT, Progress, is_judged, is_policy, progress, supervised
from steadystep.records import DetectorName, Diagnosis

_NEARLY_ALL = 0.95  # of the gradients
_LONG = 200  # updates, before a loss that has not moved is called so
_USUAL_UPDATE = 3e-4  # of the weights


def conclude(facts: Facts, *, live: bool = False) -> Diagnosis:
    """Return "healthy" with the evidence for it, or "no-learning" for a loss that has not moved."""
    updates, found = facts.trace.num_updates, progress(facts)
    if facts.curve is None or updates < TOO_SHORT:
        return Diagnosis(evidence=f"too short to tell: nothing found in {updates} updates")
    if live:
        return Diagnosis(evidence=_numbers(facts))
    if found is None or not is_judged(facts):
        return _unjudged(facts)
    if _stands_still(facts, found):
        return Diagnosis(
            cause=Cause.NO_LEARNING.value,
            evidence=f"not learning, cause unknown: in {updates} updates {found}; {_moves(facts)}",
            advice=advise(Cause.NO_LEARNING, facts.setup),
        )
    if not (found.gained or found.beats_base):
        return _unjudged(facts)
    if not facts.curve.near_best:
        return _fine(facts, f"no cause found, but the loss was {facts.curve.best:.4g} at best: {_numbers(facts)}")
    return _learns(facts, found)


def _stands_still(facts: Facts, found: Progress) -> bool:
    """The loss is where it began after many updates of the usual size, and not below a constant prediction."""
    moved = facts.ratio is not None and facts.ratio >= _USUAL_UPDATE and supervised(facts)
    return moved and found.stood_still and facts.trace.num_updates >= _LONG


def _learns(facts: Facts, found: Progress) -> Diagnosis:
    base = f"; {found.base_text} is {found.base:.4g}" if found.beats_base else ""
    return _fine(facts, f"{_numbers(facts)}{base}")


def _unjudged(facts: Facts) -> Diagnosis:
    return _fine(facts, f"no sign of trouble, learning not judged: {_why_not(facts)}; {_numbers(facts)}")


def _fine(facts: Facts, evidence: str) -> Diagnosis:
    clipped = facts.noted.get(DetectorName.CLIP_RATE)
    # why no fault: an optimizer that divides by the size of the gradient does not mind, and plain ones are warned about
    if clipped is not None and clipped.worst is not None and clipped.worst >= _NEARLY_ALL:
        return Diagnosis(evidence=f"{evidence}; {told(clipped)}", advice=advise(Cause.CLIPPING_TOO_TIGHT, facts.setup))
    return Diagnosis(evidence=evidence)


def _why_not(facts: Facts) -> str:
    if facts.opposed:
        return "the loss depends on another network"
    if facts.signed:
        return "the loss goes below zero"
    if is_policy(facts):
        return "the loss of a policy says little"
    return "the loss has not fallen" + ("" if supervised(facts) else ", and what it measures is unknown")


def _numbers(facts: Facts) -> str:
    curve = facts.curve
    assert curve is not None
    loss = f"loss {curve.start:.4g} at the start, {curve.late:.4g} now"
    return f"{facts.trace.num_updates} updates, {loss}" + (f", {_moves(facts)}" if facts.ratio is not None else "")


def _moves(facts: Facts) -> str:
    return "" if facts.ratio is None else f"an update changes the weights by {facts.ratio:.1e} of their size"


_OF_THE_LOOP = frozenset(
    {
        *(Cause.MISSING_ZERO_GRAD, Cause.SCHEDULE_ERROR, Cause.LOST_MOMENTS, Cause.POISONED_MOMENTS),
        *(Cause.NON_FINITE_INPUT, Cause.FORWARD_OVERFLOW, Cause.LOSS_SCALE_COLLAPSE, Cause.GRADIENT_UNDERFLOW),
        *(Cause.REPEATED_BATCH, Cause.POLICY_DRIFT, Cause.ENTROPY_COLLAPSE, Cause.FLAT_REWARD),
        *(Cause.METRIC_OUT_OF_BOUNDS, Cause.EXCEPTION_IN_STEP, Cause.CLOSURE_NOT_REPEATABLE, Cause.ODD_REPLICA),
    }
)
"""Mistakes between the steps, or of a time that is over: experiments take their own steps and see none of them."""

_REFUTED_BY_LEARNING = frozenset(
    {
        *(Cause.NO_LEARNING, Cause.LEARNING_RATE_TOO_LOW, Cause.BATCH_SIZE_UNFIT, Cause.CLIPPING_TOO_TIGHT),
        *(Cause.OSCILLATION, Cause.UNSCALED_DATA, Cause.DEAD_UNITS, Cause.SATURATION, Cause.VANISHING_GRADIENT),
        *(Cause.ZERO_GRADIENT, Cause.POOR_INITIALISATION, Cause.SUSPICIOUS_PERFECTION, Cause.UNKNOWN),
    }
)
"""What a run that can be seen to learn does not have, whatever its curve looks like."""
_SEEN_DIRECTLY = frozenset(
    {
        *(Fault.TARGET_LEAK, Fault.UNSHUFFLED_DATA, Fault.CONSTANT_TARGETS, Fault.CONSTANT_INPUTS),
        *(Fault.FROZEN_PARAMETERS, Fault.WRONG_OPTIMIZER_PARAMS),
    }
)
"""Unless the data or the parameters themselves show it."""


def one_story(seen: Sequence[Diagnosis], tried: Sequence[Diagnosis]) -> tuple[Diagnosis, ...]:
    """Put together what the run showed (`seen`) and what experiments showed (`tried`), the likeliest first.

    >>> seen, tried = Diagnosis(cause="missing-zero-grad"), Diagnosis(cause="learning-rate-too-high")
    >>> [diagnosis.cause for diagnosis in one_story([seen], [tried])]
    ['missing-zero-grad', 'learning-rate-too-high']
    """
    healthy = all(diagnosis.cause == Cause.HEALTHY for diagnosis in tried)
    faulty = [diagnosis for diagnosis in seen if diagnosis.cause != Cause.HEALTHY]
    if healthy:
        kept = [d for d in faulty if d.cause not in _REFUTED_BY_LEARNING or d.fault in _SEEN_DIRECTLY]
        return tuple(kept) or tuple(tried)
    named = {(diagnosis.cause, diagnosis.fault) for diagnosis in tried}
    others = [diagnosis for diagnosis in faulty if (diagnosis.cause, diagnosis.fault) not in named]
    unknown = all(diagnosis.cause == Cause.NO_LEARNING and not diagnosis.fault for diagnosis in tried)
    first = [d for d in others if unknown or (d.cause in _OF_THE_LOOP and d is seen[0])]
    return (*first, *tried, *(diagnosis for diagnosis in others if diagnosis not in first))
