"""What is said of a run without a cause against it."""

from steadystep.diagnosis.advice import advise
from steadystep.diagnosis.causes import Cause
from steadystep.diagnosis.facts import Facts, told
from steadystep.diagnosis.learning import (
    TOO_SHORT,
    Progress,
    changed_loss,
    is_judged,
    is_policy,
    progress,
    supervised,
    worse_than_constant,
)
from steadystep.records import DetectorName, Diagnosis

_NEARLY_ALL = 0.95  # of the gradients
_LONG = 200  # updates, before a loss that has not moved is called so
_USUAL_UPDATE = 3e-4  # of the weights
_NEAR, _FELL = 1.5, 0.7  # of the loss of a constant prediction, of the first loss


def conclude_from_curve(facts: Facts, *, live: bool = False) -> Diagnosis:
    """Return "healthy" with the evidence for it, or "no-learning" for a loss that has not moved."""
    updates, found = facts.trace.num_updates, progress(facts)
    if facts.curve is None or updates < TOO_SHORT:
        return Diagnosis(evidence=f"too short to tell: nothing found in {updates} updates")
    if live:
        return Diagnosis(evidence=_numbers(facts))
    if found is None or not is_judged(facts):
        return _unjudged(facts)
    behind = _stands_still(facts, found) or (worse_than_constant(facts) is not None and not _comes_near(found))
    if updates >= _LONG and supervised(facts) and behind:
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


def _comes_near(found: Progress) -> bool:
    """Whether the loss has fallen by a third and is on its way below that of a constant prediction: slow, not stuck."""
    return found.base is not None and found.end < min(_NEAR * found.base, _FELL * found.start)


def _stands_still(facts: Facts, found: Progress) -> bool:
    """The loss is where it began after many updates of the usual size, and not below a constant prediction."""
    return facts.ratio is not None and facts.ratio >= _USUAL_UPDATE and found.stood_still


def _learns(facts: Facts, found: Progress) -> Diagnosis:
    base = f"; {found.base_text} is {found.base:.4g}" if found.beats_base else ""
    return _fine(facts, f"{_numbers(facts)}{base}")


NOT_JUDGED = "no sign of trouble, learning not judged"


def _unjudged(facts: Facts) -> Diagnosis:
    return _fine(facts, f"{NOT_JUDGED}: {_why_not(facts)}; {_numbers(facts)}")


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
    if change := changed_loss(facts):
        return f"{change}, as where the program scales or exchanges its loss"
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
