"""Signs in the data and in the loss: targets, inputs, batches, and a loss that does not fit the outputs."""

import math

from steadystep.diagnosis.facts import Facts
from steadystep.diagnosis.learning import JUDGED_AFTER, is_judged, is_policy, learns, progress, reward, stuck, supervised, target
from steadystep.records import BatchPart, BatchStats, OutputStats

_ENOUGH_BATCHES = 6
_SEVERAL = 0.8  # nats: more than two classes, as two may be the sides of an adversary
_ENOUGH_PROBES = 3
_FAR = 100.0  # the size of targets that a network has to grow to first
_ONE_KIND = 0.1  # of the entropy of all labels is left inside a batch
_TINY_BATCH = 4
_SMALL_UPDATE, _LARGE_UPDATE = 3e-4, 0.1


def constant_targets(facts: Facts) -> str:
    """The loss compares the output with one and the same number."""
    part = target(facts)
    if part is None or not supervised(facts) or part.smallest != part.largest or _batches(facts) < _ENOUGH_BATCHES:
        return ""
    if facts.opposed or part.rows * _batches(facts) < 64:
        return ""
    return f"every target in {_batches(facts)} batches is {part.smallest:g}"


def ignored_targets(facts: Facts) -> str:
    """Every label is the one that losses ignore."""
    part = target(facts)
    if part is None or part.ignored < 1.0 or not part.whole or _batches(facts) < _ENOUGH_BATCHES:
        return ""
    return f"every label in {_batches(facts)} batches is -100, which the loss ignores"


def one_kind_per_batch(facts: Facts) -> str:
    """Labels that hardly differ inside a batch, and differ between batches."""
    part = target(facts)
    if part is None or not supervised(facts) or part.rows < 8 or _batches(facts) < _ENOUGH_BATCHES or facts.opposed:
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
    return f"{found}, the loss of the best constant prediction; an update changes the weights by {ratio:.1e} of their size"


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
    first, last = _outputs(facts)
    if stuck(facts) is None or first is None or last is None or first.shape[0] < 2:
        return ""
    if first.input_spread == last.input_spread == 0.0:
        return f"all {last.shape[0]} inputs of a batch are the same"
    return ""


def constant_outputs(facts: Facts) -> str:
    """The output is the same for every sample, from the start."""
    first, last = _outputs(facts)
    if first is None or last is None or first.shape[0] < 2 or stuck(facts) is None:
        return ""
    if not (_is_constant(first) and _is_constant(last)) or first.input_spread == 0.0:
        return ""
    return f"the output was the same for all {last.shape[0]} samples of a batch at steps {first.step} and {last.step}"


def collapsed_outputs(facts: Facts) -> str:
    """Several views of a batch, all of whose outputs point the same way, while the loss went to zero."""
    last, found = _outputs(facts)[1], progress(facts)
    if last is None or found is None or supervised(facts) or last.calls < 2 or len(last.shape) != 2:
        return ""
    if last.shape[0] < 8 or last.shape[1] < 4 or found.end > 0.1 * found.start or not last.alignment > 0.995:
        return ""
    return (
        f"the outputs of all {last.shape[0]} samples of a batch point the same way: the mean of their unit vectors has "
        f"length {last.alignment:.4f}"
    )


def activation_twice(facts: Facts) -> str:
    """Probabilities go into a loss that expects logits."""
    trail = facts.measured.outputs
    kind, last = trail.loss[0], trail.last
    if last is None or trail.count < _ENOUGH_PROBES or learns(facts):
        return ""
    if kind == "cross-entropy" and trail.simplex[0] == trail.count:
        return "the rows of the output add up to 1, and the loss is cross_entropy, which applies softmax again"
    if kind == "bce with logits" and 0.0 <= trail.lowest and trail.highest <= 1.0 and last.spread > 0.0:
        return (
            f"the outputs are between {trail.lowest:.3g} and {trail.highest:.3g}, as after a sigmoid, and the loss is "
            "binary_cross_entropy_with_logits, which applies it again"
        )
    return ""


def wrong_input_of_loss(facts: Facts) -> str:
    """A likelihood of what is no log-probability, a sign that is turned, shapes that broadcast."""
    trail = facts.measured.outputs
    kind, part = trail.loss
    if trail.last is None or trail.count < _ENOUGH_PROBES or is_policy(facts):
        return ""
    if kind == "nll" and (trail.highest > 1e-3 or trail.simplex[0] == trail.count):
        return f"the loss is nll_loss, which expects log-probabilities, and the outputs reach {trail.highest:.3g}"
    if kind == "broadcast mse":
        return f"outputs of shape {trail.last.shape} and targets {part} of shape {trail.last.shape[:1]} broadcast to a square"
    if kind.startswith("negative ") and not is_judged(facts):
        return f"the loss is the {kind[9:]} with its sign turned"
    return ""


def out_of_reach(facts: Facts) -> str:
    """Outputs that end in a sigmoid, a softmax or a tanh, and targets beyond them."""
    trail, part = facts.measured.outputs, target(facts)
    kind = trail.loss[0]
    if part is None or trail.count < _ENOUGH_PROBES or kind not in ("mse", "l1", "huber") or learns(facts):
        return ""
    if trail.highest > 1.0 or trail.lowest < -1.0 or trail.highest < 0.9:
        return ""
    if part.mean - 0.5 * part.std <= 1.0 and part.mean + 0.5 * part.std >= trail.lowest:
        return ""
    return f"outputs are between {trail.lowest:.3g} and {trail.highest:.3g}, targets around {part.mean:.3g}"


def negative_loss(facts: Facts) -> str:
    """A classifier whose loss is below zero and does not fall."""
    part, curve = target(facts), facts.curve
    losses = facts.trace.losses
    if part is None or curve is None or part.shape or not part.whole or is_policy(facts) or facts.opposed:
        return ""
    if len(losses) < 64 or max(facts.trace.first) >= 0.0 or max(losses[-16:]) >= 0.0:
        return ""
    if curve.start - curve.late > max(3.0 * curve.noise, 0.1 * abs(curve.start)):
        return ""
    return f"the loss of this classifier is negative: {curve.start:.4g} at the start, {curve.late:.4g} now"


def softmax_over_batch(facts: Facts) -> str:
    """The columns of the output add up to 1, not its rows; or there is one column and it is 1."""
    trail = facts.measured.outputs
    last = trail.last
    if last is None or trail.count < _ENOUGH_PROBES or len(last.shape) < 2 or last.shape[0] < 2:
        return ""
    if last.shape[-1] == 1 and trail.lowest == trail.highest == 1.0:
        return "the softmax is over a single unit: every output is 1"
    if trail.simplex[1] == trail.count and not trail.simplex[0]:
        return f"the outputs add up to 1 over the {last.shape[0]} samples of the batch, not over the classes"
    return ""


def batch_as_time(facts: Facts) -> str:
    """A layer without batch_first that is given (batch, time, features)."""
    last = facts.measured.outputs.last
    if last is None or not last.misread or learns(facts):
        return ""
    return f"{', '.join(last.misread[:3])} is not batch_first and is given the batch as its first dimension"


def same_batch(facts: Facts) -> str:
    """Every batch holds the same numbers, in new tensors: the loader starts anew in every step."""
    batch = facts.measured.batch
    if batch is None or batch.batches < _ENOUGH_BATCHES or not batch.parts:
        return ""
    first = batch.parts[0]
    if first.smallest == first.largest or not all(part.repeated for part in batch.parts):
        return ""
    return f"all {batch.batches} batches that were measured hold the same {first.rows} samples, in new tensors each time"


def tiny_batch(facts: Facts) -> str:
    """A handful of samples per batch, and no progress in the noise."""
    part, found, curve = target(facts), stuck(facts), facts.curve
    if part is None or found is None or curve is None or part.rows > _TINY_BATCH or curve.noise < 0.2 * abs(found.end):
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
    return f"after {facts.trace.num_updates} updates the loss is {found.end:.3g}; the entropy of the tokens is {ids.entropy:.3g}"


def flat_reward(facts: Facts) -> str:
    """Every reward is the same."""
    part = reward(facts)
    if part is None or part.smallest != part.largest or _batches(facts) < _ENOUGH_BATCHES:
        return ""
    return f"every reward in {_batches(facts)} batches is {part.smallest:g}"


def certain_policy(facts: Facts) -> str:
    """A policy that has become certain, while its reward has not risen."""
    first, last = _outputs(facts)
    part, early = reward(facts), facts.measured.early
    then = None if part is None or early is None else _named(early, part.name)
    if first is None or last is None or part is None or early is None or then is None or not first.entropy > 0.3:
        return ""
    if last.entropy > 0.1 * first.entropy:
        return ""
    before, count = then.mean, early.batches
    more = _batches(facts) - count
    if more < 3:
        return ""
    now = (part.mean * _batches(facts) - before * count) / more
    if now - before > 2.0 * part.std / math.sqrt(more * part.rows):
        return ""
    return (
        f"the entropy of the policy fell from {first.entropy:.3g} to {last.entropy:.3g}, while the mean reward went from "
        f"{before:.3g} to {now:.3g}"
    )


def _batches(facts: Facts) -> int:
    return 0 if facts.measured.batch is None else facts.measured.batch.batches


def _outputs(facts: Facts) -> tuple[OutputStats | None, OutputStats | None]:
    trail = facts.measured.outputs
    return (trail.first, trail.last) if trail.count >= _ENOUGH_PROBES else (None, None)


def _is_constant(outputs: OutputStats) -> bool:
    return outputs.spread <= 1e-6 * outputs.rms


def _named(batch: BatchStats, name: str) -> BatchPart | None:
    return next((part for part in batch.parts if part.name == name), None)
