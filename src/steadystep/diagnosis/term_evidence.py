"""Signs in the terms of a loss: one that the others keep from being learned, or drown, or that is all of it."""

import math
from statistics import median

from steadystep.diagnosis.facts import Facts
from steadystep.diagnosis.learning import JUDGED_AFTER, base_of, is_policy
from steadystep.diagnosis.output_evidence import ENOUGH_PROBES

_AT_REST = 0.95  # of what it was some probes ago
_COLLAPSED = 0.3  # of the spread of the targets
_SMALL_PART = 0.3  # of the loss
_LEARNED_TERM = 0.3  # of what a constant prediction has
_DROWNED, _UNLEARNED = 0.02, 0.8  # of the loss; of what a constant prediction has
_FAR = 20.0  # the size of targets beside others of usual size


def idle_term(facts: Facts) -> str:
    """One of several terms of the loss is no better than with a constant prediction, while the others are."""
    trail = facts.measured.outputs
    last, curve = trail.last, facts.curve
    if last is None or last.target is None or not last.kind or trail.loss[0] or len(trail.pairs) < ENOUGH_PROBES + 1:
        return ""
    if is_policy(facts) or facts.opposed or curve is None or facts.trace.num_updates < JUDGED_AFTER:
        return ""
    size = last.rms if "logits" in last.kind or last.kind == "cross-entropy" else last.target.std
    if not last.spread < _COLLAPSED * size:  # outputs that follow their inputs may have little to gain
        return ""
    base, text = base_of(last.kind, last.target)
    values = [value for _, value in trail.pairs]
    late = median(values[-ENOUGH_PROBES:])
    if values[-1] < _AT_REST * values[-ENOUGH_PROBES]:  # it falls still: nothing keeps it there
        return ""
    least = 0.98 if math.isnan(last.target.entropy) and "bce" in last.kind else 0.9  # targets between 0 and 1: a floor
    if base is None or late < least * base or late > 3.0 * base:
        return ""
    return f"the {last.kind} in the loss is {late:.4g} and {text} {base:.4g}: the rest of the loss keeps it there"


def mostly_penalty(facts: Facts) -> str:
    """A penalty on the weights that is most of the loss, while what the loss is about has not been learned."""
    trail = facts.measured.outputs
    last = trail.last
    if last is None or not last.penalized or last.terms != 1 or last.target is None or facts.opposed:
        return ""
    if is_policy(facts) or len(trail.pairs) < ENOUGH_PROBES or facts.trace.num_updates < JUDGED_AFTER:
        return ""
    whole, value = (median(column[-ENOUGH_PROBES:]) for column in zip(*trail.pairs, strict=True))
    base, text = base_of(last.kind, last.target)
    if base is None or not value < _SMALL_PART * whole or value < _LEARNED_TERM * base:
        return ""
    return (
        f"the {last.kind} is {value:.3g} of a loss of {whole:.3g}, the rest is a penalty on weights; {text} {base:.3g}"
    )


def drowned_term(facts: Facts) -> str:
    """A term that is next to nothing in the loss and has not been learned, beside targets of another scale."""
    trail, batch = facts.measured.outputs, facts.measured.batch
    last = trail.last
    if last is None or last.target is None or last.terms < 2 or batch is None or is_policy(facts) or facts.opposed:
        return ""
    if len(trail.pairs) < ENOUGH_PROBES + 1 or facts.trace.num_updates < JUDGED_AFTER:
        return ""
    base, text = base_of(last.kind, last.target)
    share = max(value / loss if loss > 0.0 else math.inf for loss, value in trail.pairs)
    late = median(value for _, value in trail.pairs[-ENOUGH_PROBES:])
    if base is None or not 0.0 <= share < _DROWNED or late < _UNLEARNED * base:
        return ""
    sizes = {part.name: max(abs(part.mean), part.std) for part in batch.parts[1:] if not part.whole}
    name = max(sizes, key=lambda part: sizes[part], default="")
    if not name or not sizes[name] > _FAR:
        return ""
    return (
        f"the {last.kind} is {late:.3g} of a loss of {trail.pairs[-1][0]:.3g} and {text} {base:.3g}: it drowns beside "
        f"{name} of the batch, whose size is {sizes[name]:.3g}"
    )
