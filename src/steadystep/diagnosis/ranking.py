"""Causes of a run, the likeliest first."""

import math

from steadystep.diagnosis.causes import ADVICE, Cause
from steadystep.diagnosis.charges import CHARGES, CONSEQUENCES, REFUTED
from steadystep.diagnosis.facts import Facts
from steadystep.diagnosis.sentences import told
from steadystep.records import Diagnosis

_ENOUGH = 1.0
_INCIDENT = 1.2
_FORGIVEN = 0.5
_NEARLY_ALL = 0.95  # of the gradients


def rank(facts: Facts) -> tuple[Diagnosis, ...]:
    """Every cause with enough against it, or the one diagnosis "healthy"."""
    scores: dict[Cause, float] = {}
    blamed: set[Cause] = set()
    evidence: dict[Cause, dict[str, str]] = {}

    def count(cause: Cause, weight: float, text: str) -> None:
        scores[cause] = scores.get(cause, 0.0) + weight
        evidence.setdefault(cause, {}).setdefault(text.rpartition(",")[0] or text, text)  # the same thing only once

    for name, tally in facts.incidents.items():
        blamed.add(Cause(name))
        count(Cause(name), _INCIDENT + 0.1 * min(math.log2(tally.count), 5.0), told(tally))
    for charge in CHARGES:
        text = charge.sign(facts)
        if text:
            blamed |= set() if charge.level else {charge.cause}
            forgiven = charge.forgivable and facts.going_well
            count(charge.cause, charge.weight * (_FORGIVEN if forgiven else 1.0), text)
    for cause, refutes in REFUTED.items():
        if refutes(facts):
            scores.pop(cause, None)
    guilty = [cause for cause, score in scores.items() if score >= _ENOUGH and cause in blamed]
    if not guilty:
        return (_healthy(facts),)
    consequences = {effect for cause in guilty for effect in CONSEQUENCES.get(cause, ())}
    guilty.sort(key=lambda cause: (cause in consequences, -scores[cause]))
    return tuple(
        Diagnosis(cause=cause.value, evidence="; ".join(evidence[cause].values()), advice=ADVICE[cause])
        for cause in guilty
    )


def _healthy(facts: Facts) -> Diagnosis:
    curve = facts.curve
    if curve is None:
        return Diagnosis(evidence=f"nothing found in {facts.trace.num_updates} updates")
    ratio = "" if facts.ratio is None else f", updates of {facts.ratio:.1e} of the weights"
    loss = f"loss {curve.start:.4g} at the start and {curve.late:.4g} now"
    clipped = facts.noted.get("clip-rate")
    # why no fault: an optimizer that divides by the size of the gradient does not mind, and plain ones are warned about
    always = clipped is not None and clipped.worst is not None and clipped.worst >= _NEARLY_ALL
    aside = f"; {told(clipped)}" if clipped is not None and always else ""
    advice = ADVICE[Cause.CLIPPING_TOO_TIGHT] if always else ""
    return Diagnosis(evidence=f"{facts.trace.num_updates} updates, {loss}{ratio}{aside}", advice=advice)
