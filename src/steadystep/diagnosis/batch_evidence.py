"""Signs in how batches are made and in the terms of a loss: too few samples, the same again, a term that drowns."""

import math
from statistics import median

from steadystep.diagnosis.data_evidence import num_batches
from steadystep.diagnosis.facts import Facts
from steadystep.diagnosis.learning import (
    JUDGED_AFTER,
    base_of,
    is_policy,
    is_well_below,
    learns,
    progress,
    supervised,
    target,
)
from steadystep.diagnosis.output_evidence import ENOUGH_PROBES

_ENOUGH_BATCHES = 6
_SEVERAL = 0.8  # nats: more than two classes, as two may be the sides of an adversary
_TWO = 0.05  # nats, of a loss of classes and no other term
_ONE_KIND = 0.1  # of the entropy of all labels is left inside a batch
_TINY_BATCH = 4
_HANDFUL = 64  # samples that are too few to be a data set
_FEW_VALUES = 0.05  # of the samples


def same_batch(facts: Facts) -> str:
    """Every batch holds the same numbers, in new tensors: the loader starts anew in every step."""
    batch = facts.measured.batch
    if batch is None or batch.batches < _ENOUGH_BATCHES or not batch.parts:
        return ""
    first = batch.parts[0]
    if first.smallest == first.largest or not all(part.repeated for part in batch.parts):
        return ""
    if all(part.whole and not part.shape for part in batch.parts):
        return ""  # why: episodes and balanced batches have the same class numbers, and other samples
    return (
        f"all {batch.batches} batches that were measured hold the same {first.rows} samples, in new tensors each time"
    )


def few_samples(facts: Facts) -> str:
    """All batches hold the same few samples, in any order."""
    batch = facts.measured.batch
    part = None if batch is None else next((p for p in batch.parts if p.shape and not p.whole), None)
    if part is None or num_batches(facts) < _ENOUGH_BATCHES or facts.opposed or part.distinct < 2 or part.values:
        return ""
    if part.counted < max(_ENOUGH_BATCHES * part.rows, 96) or part.distinct > min(part.rows, _HANDFUL):
        return ""
    first = facts.measured.outputs.first
    others = [p for p in facts.measured.batch.parts if p.counted and not p.whole] if facts.measured.batch else []
    if any(p.distinct > part.distinct for p in others) or (first is not None and first.input_spread == 0.0):
        return ""  # why: samples that differ in something else are not the same
    return f"the first {part.counted} samples are the same {part.distinct} again and again, in another order"


def few_inputs(facts: Facts) -> str:
    """Real-valued inputs that take a few values only, while their targets differ, in a run that learns little."""
    batch, part = facts.measured.batch, target(facts)
    given = None if batch is None else next((p for p in batch.parts if p.shape and not p.whole), None)
    if given is None or part is None or part.whole or given is part or not supervised(facts) or learns(facts):
        return ""
    if given.counted < 128 or not given.distinct < _FEW_VALUES * given.counted or part.values or given.values:
        return ""
    if 2 * part.distinct < part.counted:
        return ""
    return f"{given.counted} inputs take {given.distinct} different values, and their targets {part.distinct}"


def constant_part(facts: Facts) -> str:
    """What comes last in the batch, after the inputs, is one and the same number, and no loss function has it."""
    batch = facts.measured.batch
    part = batch.parts[-1] if batch is not None and len(batch.parts) > 1 else None
    if part is None or supervised(facts) or is_policy(facts) or facts.opposed or part.smallest != part.largest:
        return ""
    if part.rows < 8 or num_batches(facts) < _ENOUGH_BATCHES or part.shape or part.ignored or learns(facts):
        return ""  # why: lengths and weights of samples may all be the same
    if facts.measured.outputs.last is not None and facts.measured.outputs.last.compared:  # views need no labels
        return ""
    return f"{part.name}, the last tensor of the batch, is {part.smallest:g} for every sample of {num_batches(facts)}"


def tiny_batch(facts: Facts) -> str:
    """A handful of samples per batch, and little progress in the noise."""
    part, found, curve = target(facts), progress(facts), facts.curve
    if part is None or found is None or curve is None or part.rows > _TINY_BATCH or curve.noise < 0.2 * abs(found.end):
        return ""
    if learns(facts) or is_well_below(facts) or facts.trace.num_updates < JUDGED_AFTER:
        return ""
    return f"a batch has {part.rows} samples, losses of consecutive steps differ by {curve.noise:.3g}; {found}"


def small_normed_batch(facts: Facts) -> str:
    """Batch normalization over a handful of samples, in a run that learns little."""
    batch, found = facts.measured.batch, progress(facts)
    if batch is None or not batch.parts or not facts.structure.norms or found is None or learns(facts):
        return ""
    rows = batch.parts[0].rows
    curve = facts.curve
    if not 1 <= rows < _TINY_BATCH or facts.trace.num_updates < JUDGED_AFTER:
        return ""
    if curve is None or curve.noise < 0.2 * abs(found.end):
        return ""
    return f"batch normalization takes its statistics from {rows} samples; {found}"


def one_kind_per_batch(facts: Facts) -> str:
    """Labels that hardly differ inside a batch, and differ between batches."""
    part = target(facts)
    if part is None or not supervised(facts) or part.rows < 8 or num_batches(facts) < _ENOUGH_BATCHES or facts.opposed:
        return ""
    jumps = _is_of_classes(facts) and part.entropy > _TWO and _jumps(facts)
    if facts.going_well and not jumps:  # classes in turn on purpose, as in continual learning
        return ""
    several = part.entropy > _SEVERAL or jumps
    if not several or part.entropy_within > _ONE_KIND * part.entropy:
        return ""
    return (
        f"a batch of {part.rows} holds hardly more than one class: the entropy of its labels is "
        f"{part.entropy_within:.2g}, that of all batches {part.entropy:.2g}"
    )


def _jumps(facts: Facts) -> bool:
    """Late losses are next to nothing but for a few: those where another class begins."""
    late = sorted(facts.trace.losses[len(facts.trace.losses) // 2 :])
    return len(late) >= 32 and (late[-1] > 20.0 * late[len(late) // 2] or not learns(facts))


def _is_of_classes(facts: Facts) -> bool:
    last = facts.measured.outputs.last
    return facts.measured.outputs.loss[0] in ("cross-entropy", "nll", "bce", "bce with logits") and (
        last is not None and last.terms <= 1
    )


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
    if last.passes > 1 and trail.multiple is not None:  # one of several micro-batches: there is no rest
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
