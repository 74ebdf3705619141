"""Signs in the data: targets, inputs, batches and rewards, and a loss no better than a constant prediction."""

import math

from steadystep.diagnosis.facts import Facts, told
from steadystep.diagnosis.learning import (
    JUDGED_AFTER,
    is_policy,
    learns,
    progress,
    reward,
    stuck,
    supervised,
    target,
)
from steadystep.diagnosis.output_evidence import first_and_last
from steadystep.records import BatchPart, BatchStats, DetectorName

_ENOUGH_BATCHES = 6
_ABOVE_BASE = 3.0  # times the loss of the best constant prediction
_SEVERAL = 0.8  # nats: more than two classes, as two may be the sides of an adversary
_FAR = 100.0  # the size of targets that a network has to grow to first
_ONE_KIND = 0.1  # of the entropy of all labels is left inside a batch
_TINY_BATCH = 4
_SMALL_UPDATE, _LARGE_UPDATE = 3e-4, 0.1


def constant_targets(facts: Facts) -> str:
    """The loss compares the output with one and the same number."""
    part = target(facts)
    if part is None or not supervised(facts) or part.smallest != part.largest or _looks(facts) < _ENOUGH_BATCHES:
        return ""
    if facts.opposed or facts.measured.outputs.last is None or facts.measured.outputs.last.terms > 1:
        return ""
    if part.rows * _looks(facts) < 64 or part.ignored == 1.0:
        return ""
    return f"every target in {_looks(facts)} batches is {part.smallest:g}"


def ignored_targets(facts: Facts) -> str:
    """Every label is the one that losses ignore."""
    part = target(facts)
    if part is None or part.ignored < 1.0 or not part.whole or _looks(facts) < _ENOUGH_BATCHES:
        return ""
    return f"every label in {_looks(facts)} batches is -100, which the loss ignores"


def one_kind_per_batch(facts: Facts) -> str:
    """Labels that hardly differ inside a batch, and differ between batches."""
    part = target(facts)
    if part is None or not supervised(facts) or part.rows < 8 or _batches(facts) < _ENOUGH_BATCHES or facts.opposed:
        return ""
    if facts.going_well:  # classes in turn on purpose, as in continual learning
        return ""
    if not part.entropy > _SEVERAL or part.entropy_within > _ONE_KIND * part.entropy:
        return ""
    return (
        f"a batch of {part.rows} holds hardly more than one class: the entropy of its labels is "
        f"{part.entropy_within:.2g}, that of all batches {part.entropy:.2g}"
    )


def unrelated_targets(facts: Facts) -> str:
    """Updates of the usual size, and a loss that stays at the level of the best constant prediction."""
    found, ratio = stuck(facts), facts.ratio
    if found is None or not found.at_base or ratio is None or not _SMALL_UPDATE <= ratio < _LARGE_UPDATE:
        return ""
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
    """Inputs far from unit scale, and a loss that stays at the level of a constant prediction."""
    inputs, found = facts.inputs, stuck(facts)
    if inputs is None or found is None or not found.at_base or max(abs(inputs.mean), inputs.std) < 20.0:
        return ""
    return f"inputs have mean {inputs.mean:.3g} and standard deviation {inputs.std:.3g}; {found}"


def constant_inputs(facts: Facts) -> str:
    """The model is given the same for every sample, and learns nothing."""
    first, last = first_and_last(facts)
    if stuck(facts) is None or first is None or last is None or first.shape[0] < 2:
        return ""
    batch, wanted = facts.measured.batch, target(facts)
    parts = [p for p in (() if batch is None else batch.parts) if p.shape and not p.whole and p is not wanted]
    empty = [part.name for part in parts if part.smallest == part.largest]
    if empty and _batches(facts) >= _ENOUGH_BATCHES:
        return f"{', '.join(empty)} of the batch holds a single number in all {_batches(facts)} batches"
    if first.input_spread == last.input_spread == 0.0:
        return f"all {last.shape[0]} inputs of a batch are the same"
    return ""


def same_batch(facts: Facts) -> str:
    """Every batch holds the same numbers, in new tensors: the loader starts anew in every step."""
    batch = facts.measured.batch
    if batch is None or batch.batches < _ENOUGH_BATCHES or not batch.parts:
        return ""
    first = batch.parts[0]
    if first.smallest == first.largest or not all(part.repeated for part in batch.parts):
        return ""
    return (
        f"all {batch.batches} batches that were measured hold the same {first.rows} samples, in new tensors each time"
    )


def tiny_batch(facts: Facts) -> str:
    """A handful of samples per batch, and no progress in the noise."""
    part, found, curve = target(facts), progress(facts), facts.curve
    if part is None or found is None or curve is None or part.rows > _TINY_BATCH or curve.noise < 0.2 * abs(found.end):
        return ""
    if found.gained or found.beats_base or facts.trace.num_updates < JUDGED_AFTER:
        return ""
    return f"a batch has {part.rows} samples, losses of consecutive steps differ by {curve.noise:.3g}; {found}"


def leaked_target(facts: Facts) -> str:
    """The next token is predicted all but perfectly, sooner than any text can be learned."""
    batch, found = facts.measured.batch, progress(facts)
    if batch is None or found is None or not batch.parts:
        return ""
    ids = batch.parts[-1]
    sequence = ids.whole and len(ids.shape) == 1 and ids.shape[0] >= 8 and ids.entropy > 1.5
    if not sequence or not (batch.shifted or len(batch.parts) == 1) or facts.trace.num_updates > 2000:
        return ""
    if found.end > 0.1 * ids.entropy:
        return ""
    updates = facts.trace.num_updates
    return f"after {updates} updates the loss is {found.end:.3g}; the entropy of the tokens is {ids.entropy:.3g}"


def flat_reward(facts: Facts) -> str:
    """Every reward is the same."""
    part = reward(facts)
    if part is None or part.smallest != part.largest or _batches(facts) < _ENOUGH_BATCHES:
        return ""
    return f"every reward in {_batches(facts)} batches is {part.smallest:g}"


def certain_policy(facts: Facts) -> str:
    """A policy that has become certain, while its reward has not risen."""
    first, last = first_and_last(facts)
    part, early = reward(facts), facts.measured.early
    then = None if part is None or early is None else _named(early, part.name)
    if first is None or last is None or part is None or early is None or then is None or not first.entropy > 0.3:
        return ""
    if last.entropy > 0.1 * first.entropy:
        return ""
    if facts.idle_share > 0.5:
        share = f"the gradient was exactly zero in {facts.idle_share:.0%} of the later steps"
        return f"the entropy of the policy fell from {first.entropy:.3g} to {last.entropy:.3g}; {share}"
    before, count = then.mean, early.batches
    more = _batches(facts) - count
    if more < 3:
        return ""
    now = (part.mean * _batches(facts) - before * count) / more
    if now - before > 2.0 * part.std / math.sqrt(more * part.rows):
        return ""
    return (
        f"the entropy of the policy fell from {first.entropy:.3g} to {last.entropy:.3g}; the mean reward went from "
        f"{before:.3g} to {now:.3g}"
    )


def copied_target(facts: Facts) -> str:
    """One of the inputs is the target."""
    trail = facts.measured.outputs
    if trail.last is None or not trail.last.copied or is_policy(facts) or facts.opposed or trail.count < 4:
        return ""
    return f"{trail.last.copied} is the target at all {trail.count} probes"


def large_rewards(facts: Facts) -> str:
    """Rewards of many hundreds, and gradients that are clipped or units that saturate for it."""
    part = reward(facts)
    if part is None or max(abs(part.mean), part.std) < 5.0 * _FAR:
        return ""
    signs = (DetectorName.CLIP_RATE, DetectorName.SATURATED_UNITS)
    seen = next((facts.warned[sign] for sign in signs if sign in facts.warned), None)
    if seen is None:
        return ""
    return f"rewards have mean {part.mean:.3g} and standard deviation {part.std:.3g}; {told(seen)}"


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


def _looks(facts: Facts) -> int:
    """Batches in which the targets were measured."""
    part, outputs = target(facts), facts.measured.outputs
    heard = part is not None and outputs.last is not None and part is outputs.last.target
    return outputs.count if heard else _batches(facts)


def _batches(facts: Facts) -> int:
    return 0 if facts.measured.batch is None else facts.measured.batch.batches


def _named(batch: BatchStats, name: str) -> BatchPart | None:
    return next((part for part in batch.parts if part.name == name), None)
