"""Signs in the data: targets, inputs and batches, and a loss no better than a constant prediction."""

import math

from steadystep.diagnosis.facts import Facts
from steadystep.diagnosis.learning import (
    JUDGED_AFTER,
    is_policy,
    learns,
    num_looks,
    progress,
    raw_inputs_of,
    stuck,
    supervised,
    target,
    unlearned,
)
from steadystep.diagnosis.output_evidence import first_and_last
from steadystep.records import BatchPartStats, BatchStats, DetectorName

_ENOUGH_BATCHES = 6
_FEWEST_CLASSES = 4
_AT_LEVEL, _BELOW_LEVEL = 1.25, 0.98  # times that
_ROOM = 0.3  # of the loss of a constant prediction
_ABOVE_BASE = 3.0  # times the loss of the best constant prediction
_OF_PAIRS = ("margin ranking", "cosine embedding")
_TINY, _WIDE = 1e-3, 50.0  # standard deviations of targets that layers are not made for
_FAR = 100.0  # the size of targets that a network has to grow to first
_SMALL_UPDATE, _LARGE_UPDATE = 3e-4, 0.1


def constant_targets(facts: Facts) -> str:
    """The loss compares the output with one and the same number."""
    part = target(facts)
    if part is None or not supervised(facts) or part.smallest != part.largest or num_looks(facts) < _ENOUGH_BATCHES:
        return ""
    trail = facts.measured.outputs
    if trail.last is None or trail.last.terms > 1 or trail.last.passes > 1:
        return ""
    if trail.last.compared or trail.loss[0] in _OF_PAIRS:  # the target is where the positive was put
        return ""
    if part.rows * num_looks(facts) < 64 or part.ignored == 1.0:
        return ""
    return f"every target in {num_looks(facts)} batches is {part.smallest:g}"


def ignored_targets(facts: Facts) -> str:
    """Every label is the one that losses ignore."""
    part = target(facts)
    if part is None or part.ignored < 1.0 or not part.whole or num_looks(facts) < _ENOUGH_BATCHES:
        return ""
    return f"every label in {num_looks(facts)} batches is -100, which the loss ignores"


def unrelated_targets(facts: Facts) -> str:
    """Updates of the usual size, and a loss that stays at the level of the best constant prediction."""
    found, ratio = stuck(facts), facts.ratio
    if found is None or not found.at_base or ratio is None or not _SMALL_UPDATE <= ratio < _LARGE_UPDATE:
        return ""
    if found.base is None or not _BELOW_LEVEL * found.base < found.end < _AT_LEVEL * found.base:
        return ""  # why: a little below it may be all there is to learn
    return (
        f"{found}, the loss of the best constant prediction; an update changes the weights by {ratio:.1e} of their size"
    )


def small_updates(facts: Facts) -> str:
    """Worse than a constant prediction, because the weights have hardly moved."""
    found, ratio = progress(facts), facts.ratio
    if found is None or found.base is None or found.beats_base or ratio is None or not 0.0 < ratio < _SMALL_UPDATE:
        return ""
    if found.end < 0.75 * found.start or facts.trace.num_updates < JUDGED_AFTER:
        return ""
    return f"{found}; an update changes the weights by {ratio:.1e} of their size (1e-3 is typical)"


def collapsed(facts: Facts) -> str:
    """Large updates, and nothing but a constant prediction left."""
    found, ratio = stuck(facts), facts.ratio
    if found is None or not found.at_base or ratio is None or ratio < _LARGE_UPDATE:
        return ""
    return f"{found}; an update changes the weights by {ratio:.2g} of their size (1e-3 is typical)"


def ended_above_start(facts: Facts) -> str:
    """A supervised loss that is higher than at the start."""
    found = progress(facts)
    if found is None or not supervised(facts) or found.end - found.start <= max(4.0 * found.error, 0.1 * found.start):
        return ""
    if found.base is not None and found.end < _ABOVE_BASE * found.base:  # targets may have grown meanwhile
        return ""
    return f"the loss rose from {found.start:.4g} to {found.end:.4g}"


def far_targets(facts: Facts) -> str:
    """Targets of hundreds and more, from which the outputs are still far away."""
    part, found, last = target(facts), progress(facts), facts.measured.outputs.last
    if part is None or part.whole or found is None or last is None or not supervised(facts):
        return ""
    size = max(abs(part.mean), part.std)
    if size < _FAR or found.end < 0.5 * found.start or last.rms > 0.5 * size:
        return ""
    return (
        f"targets have mean {part.mean:.3g} and standard deviation {part.std:.3g}, the outputs have reached "
        f"{last.rms:.3g}; the loss went from {found.start:.4g} to {found.end:.4g}"
    )


def raw_inputs(facts: Facts) -> str:
    """Inputs far from unit scale, and a loss that is not half of that of a constant prediction."""
    inputs, found = raw_inputs_of(facts), progress(facts)
    if inputs is None or found is None or found.base is None or max(abs(inputs.mean), inputs.std) < 20.0:
        return ""
    if learns(facts) or facts.trace.num_updates < JUDGED_AFTER:
        return ""
    return f"inputs have mean {inputs.mean:.3g} and standard deviation {inputs.std:.3g}; {found}"


def constant_inputs(facts: Facts) -> str:
    """The model is given the same for every sample, and learns nothing."""
    first, last = first_and_last(facts)
    if stuck(facts) is None or first is None or last is None or first.shape[0] < 2:
        return ""
    batch, wanted = facts.measured.batch, target(facts)
    ids = [p for p in (() if batch is None else batch.parts) if p.shape and p.whole and p is not wanted]
    rows = facts.structure.table_rows
    same = [p.name for p in ids if 0 < p.values <= 2 and p.values < 0.2 * rows]
    if same and len(same) == len(ids) and num_batches(facts) >= _ENOUGH_BATCHES:
        return f"of the {rows} rows of the embedding, {', '.join(same)} has asked for {ids[0].values} in all batches"
    parts = [p for p in (() if batch is None else batch.parts) if p.shape and not p.whole and p is not wanted]
    empty = [part.name for part in parts if part.smallest == part.largest]
    if empty and num_batches(facts) >= _ENOUGH_BATCHES:
        return f"{', '.join(empty)} of the batch holds a single number in all {num_batches(facts)} batches"
    if first.input_spread == last.input_spread == 0.0:
        return f"all {last.shape[0]} inputs of a batch are the same"
    return ""


def leaked_target(facts: Facts) -> str:
    """The next token is predicted all but perfectly, sooner than any text can be learned."""
    batch, found = facts.measured.batch, progress(facts)
    if batch is None or found is None or not batch.parts:
        return ""
    ids = batch.parts[-1]
    sequence = ids.whole and len(ids.shape) == 1 and ids.shape[0] >= 8 and ids.entropy > 1.5
    if not sequence or not (batch.shifted or len(batch.parts) == 1) or facts.trace.num_updates > 2000:
        return ""
    last = facts.measured.outputs.last
    if last is None or not last.ahead:  # a rule without noise is learned as well
        return ""
    if batch.shifted and found.beats_base:
        return f"targets are the next tokens of the input, and positions see later ones ({last.ahead})"
    if found.end > 0.1 * ids.entropy:
        return ""
    updates = facts.trace.num_updates
    low = f"after {updates} updates the loss is {found.end:.3g}; the entropy of the tokens is {ids.entropy:.3g}"
    return f"{low}; positions see later ones ({last.ahead})"


def tiny_targets(facts: Facts) -> str:
    """Targets so small that errors, gradients and updates are next to nothing."""
    part, found = target(facts), progress(facts)
    if part is None or part.whole or found is None or found.base is None or not supervised(facts):
        return ""
    size = max(abs(part.mean), part.std)
    if not 0.0 < size < _TINY or found.end < 0.1 * found.base or facts.trace.num_updates < JUDGED_AFTER:
        return ""
    return f"targets have mean {part.mean:.3g} and standard deviation {part.std:.3g}; {found}"


def wide_targets(facts: Facts) -> str:
    """Targets that spread over hundreds, and a loss no better than with a constant prediction."""
    part, found = target(facts), unlearned(facts)
    if part is None or part.whole or found is None or found.base is None or not supervised(facts) or part.std < _WIDE:
        return ""
    if DetectorName.CLIP_RATE in facts.warned:  # the limit, not the targets, sets the step size
        return ""
    return f"targets have mean {part.mean:.3g} and standard deviation {part.std:.3g}; {found}"


def numbered_classes(facts: Facts) -> str:
    """Labels 0 to n, equally frequent, that a distance takes for quantities, in a run that learns little."""
    last, part, found = facts.measured.outputs.last, target(facts), progress(facts)
    if last is None or part is None or found is None or found.base is None or facts.trace.num_updates < JUDGED_AFTER:
        return ""
    if found.end < _ROOM * found.base:
        return ""
    whole = part.whole and part.smallest == 0.0 and part.values == part.largest + 1.0 and not part.shape
    if not whole or not _FEWEST_CLASSES <= part.values <= 100 or part.entropy < 0.9 * math.log(part.values):
        return ""
    if facts.measured.outputs.loss[0] not in ("mse", "l1", "huber") or math.prod(last.shape[1:]) != 1:
        return ""
    return f"{part.values} labels, all as frequent, are compared as numbers ({facts.measured.outputs.loss[0]}); {found}"


def outside_of_domain(facts: Facts) -> str:
    """Targets that the loss function is not defined for."""
    kind, part = facts.measured.outputs.loss[0], target(facts)
    last = facts.measured.outputs.last
    if not kind and last is not None:
        kind, part = last.kind, last.target
    if part is None or num_looks(facts) < 3 or part.smallest == part.largest:
        return ""
    seen = f"targets are between {part.smallest:g} and {part.largest:g}"
    if kind in ("bce", "bce with logits") and (part.smallest < -0.01 or part.largest > 1.01):
        return f"{seen}, and binary cross-entropy is made for 0 to 1: beyond, it falls without end"
    if kind in ("soft margin", "hinge embedding", "cosine embedding", "margin ranking") and part.smallest > -0.5:
        return f"{seen}, and a margin loss is made for -1 and 1: at 0 there is no gradient"
    if kind == "poisson" and part.smallest < 0.0:
        return f"{seen}, and a Poisson loss is made for counts"
    return ""


def copied_target(facts: Facts) -> str:
    """One of the inputs is the target."""
    trail = facts.measured.outputs
    if trail.last is None or not trail.last.copied or is_policy(facts) or facts.opposed or trail.count < 4:
        return ""
    return f"{trail.last.copied} is the target at all {trail.count} probes"


def num_batches(facts: Facts) -> int:
    """Batches that were measured."""
    return 0 if facts.measured.batch is None else facts.measured.batch.batches


def part_named(batch: BatchStats, name: str) -> BatchPartStats | None:
    """The part of this name."""
    return next((part for part in batch.parts if part.name == name), None)


def enough_batches(facts: Facts) -> bool:
    """Whether so many were measured that a constant is one."""
    return num_batches(facts) >= _ENOUGH_BATCHES
