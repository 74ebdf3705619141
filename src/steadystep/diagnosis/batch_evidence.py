"""Signs in how batches are made: the same samples again, one kind at a time, too few of them, nothing in them."""

from steadystep.diagnosis.data_evidence import num_batches
from steadystep.diagnosis.facts import Facts
from steadystep.diagnosis.learning import JUDGED_AFTER, is_policy, learns, progress, supervised, target

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
    return f"{part.name}, the last tensor of the batch, is {part.smallest:g} for every sample of {num_batches(facts)}"


def tiny_batch(facts: Facts) -> str:
    """A handful of samples per batch, and little progress in the noise."""
    part, found, curve = target(facts), progress(facts), facts.curve
    if part is None or found is None or curve is None or part.rows > _TINY_BATCH or curve.noise < 0.2 * abs(found.end):
        return ""
    if learns(facts) or facts.trace.num_updates < JUDGED_AFTER:
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
