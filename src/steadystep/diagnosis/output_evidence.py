"""Signs in the outputs: a loss that does not fit them, a softmax over the wrong dimension, outputs all alike."""

from statistics import fmean, median

from steadystep.diagnosis.causes import Fault
from steadystep.diagnosis.facts import Facts
from steadystep.diagnosis.learning import (
    JUDGED_AFTER,
    is_judged,
    is_policy,
    learns,
    progress,
    stuck,
    supervised,
    target,
)
from steadystep.records import DetectorName, OutputStats

_FAINT = 0.03  # of the outputs
_MOSTLY_ALIKE = 0.5
_AT_REST = 0.95  # of what it was some probes ago
_COLLAPSED = 0.3  # of the spread of the targets
_SMALL_PART = 0.3  # of the loss
_LEARNED_TERM = 0.3  # of what a constant prediction has
ENOUGH_PROBES = 3
"""Probes before anything is said of outputs."""


def first_and_last(facts: Facts) -> tuple[OutputStats | None, OutputStats | None]:
    """What the model returned at the first and at the last probe; none before the third."""
    trail = facts.measured.outputs
    return (trail.first, trail.last) if trail.count >= ENOUGH_PROBES else (None, None)


def constant_outputs(facts: Facts) -> str:
    """The output is the same for every sample, from the start."""
    first, last = first_and_last(facts)
    if first is None or last is None or first.shape[0] < 2 or stuck(facts) is None:
        return ""
    if first.input_spread == 0.0:
        return ""
    if max(first.distinct, last.distinct) < _MOSTLY_ALIKE:
        share = 1.0 - last.distinct
        return f"{share:.0%} of the {last.shape[0]} samples of a batch had the same output as the one before"
    if not (_is_constant(first) and _is_constant(last)):
        return ""
    return f"the output was the same for all {last.shape[0]} samples of a batch at steps {first.step} and {last.step}"


def faint_outputs(facts: Facts) -> str:
    """Outputs hardly differ between samples, before anything was learned and after nothing was."""
    first, last = first_and_last(facts)
    found = stuck(facts)
    if first is None or last is None or found is None or not found.at_base or first.shape[0] < 2:
        return ""
    if not first.spread < _FAINT * first.rms or first.input_spread == 0.0:
        return ""
    return (
        f"outputs of different samples differed by {first.spread / first.rms:.1%} of their size at step {first.step}, "
        f"before anything was learned; {found}"
    )


def wrong_axis(facts: Facts) -> str:
    """A softmax over the wrong dimension, as it was called."""
    return facts.measured.outputs.mistake(Fault.SOFTMAX_AXIS)


def wrong_loss(facts: Facts) -> str:
    """A loss function that does not fit what it is called with."""
    return facts.measured.outputs.mistake(Fault.WRONG_LOSS)


def distance_of_shares(facts: Facts) -> str:
    """A distance between a softmax or a sigmoid and labels of 0 and 1, in a run that learns little."""
    last, found = facts.measured.outputs.last, progress(facts)
    if last is None or last.target is None or found is None or learns(facts) or facts.trace.num_updates < JUDGED_AFTER:
        return ""
    labels = last.target.smallest == 0.0 and last.target.largest == 1.0 and last.target.entropy > 0.0
    if last.kind not in ("mse", "l1", "huber") or last.activation not in ("softmax", "sigmoid") or not labels:
        return ""
    trail = facts.measured.outputs
    # where a sigmoid is steep, its gradient does not vanish
    if last.activation == "sigmoid" and (stuck(facts) is None or (trail.lowest > 0.1 and trail.highest < 0.9)):
        return ""
    return f"the loss is the {last.kind} of a {last.activation} and of labels, whose gradient vanishes; {found}"


def bottomless(facts: Facts) -> str:
    """A loss that falls below zero and on, faster and faster, until numbers end.

    All of it falls: single losses of a policy gradient, a sum over an episode, reach far below zero as well.
    """
    losses, first = facts.trace.losses, facts.trace.first
    if len(losses) < 16 or is_policy(facts) or facts.opposed or supervised(facts):
        return ""
    quarter = len(losses) // 4
    before, last = median(losses[-2 * quarter : -quarter]), median(losses[-quarter:])
    if not last < min(before, -10.0 * max(abs(first[0]), 1.0)) or min(losses[-4:]) > 0.1 * min(losses):
        return ""
    return f"the loss fell from {first[0]:.4g} to {min(losses):.4g} and on: nothing bounds it from below"


def contracted(facts: Facts) -> str:
    """Outputs of all samples that run together, where nothing but a loss without a lower bound asks for it."""
    first, last = first_and_last(facts)
    if first is None or last is None or not facts.signed or supervised(facts) or is_policy(facts) or facts.opposed:
        return ""
    if last.terms or last.calls > 1 or len(last.shape) != 2 or last.shape[1] < 2 or first.input_spread == 0.0:
        return ""
    if not last.spread < 0.02 * first.spread:
        return ""
    return f"outputs of different samples differed by {first.spread:.3g} at first and by {last.spread:.3g} now"


def far_from_outputs(facts: Facts) -> str:
    """A large loss that does not fall, and outputs far smaller than what such a loss compares them with."""
    last, found = first_and_last(facts)[1], progress(facts)
    if last is None or found is None or not found.stood_still or supervised(facts) or last.terms or found.end < 50.0:
        return ""
    if DetectorName.CLIP_RATE in facts.warned:  # that is why it stands still
        return ""
    if not 0.0 < last.rms**2 < 0.01 * found.end or facts.trace.num_updates < 2 * JUDGED_AFTER:
        return ""
    return f"{found}, and the outputs have a root mean square of {last.rms:.3g}: what they are compared with is far off"


def content_rivals(facts: Facts) -> str:
    """Two networks that are trained in turns and both have nothing left to gain: they are not rivals."""
    losses, first = facts.trace.losses, facts.trace.first
    if facts.measured.loop.turns < 8 or len(losses) < 64 or is_policy(facts) or min(first) <= 0.0:
        return ""
    if not max(map(abs, losses[-16:])) < 0.01 * fmean(first):
        return ""
    return f"two networks are trained in turns, and the losses of both went to {max(losses[-16:]):.2g}: none opposes"


def collapsed_outputs(facts: Facts) -> str:
    """Several views of a batch, all of whose outputs point the same way, while the loss went to zero."""
    last, found = first_and_last(facts)[1], progress(facts)
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
    if last is None or trail.count < ENOUGH_PROBES or learns(facts):
        return ""
    if last.kind == "bce with logits" and not last.activation:  # the call was seen, and nothing in front of it
        return ""
    if kind == "cross-entropy" and trail.simplex[0] == trail.count:
        return "the rows of the output add up to 1, and the loss is cross_entropy, which applies softmax again"
    if kind == "bce with logits" and trail.lowest >= 0.0 and trail.highest <= 1.0 and last.spread > 0.0:
        return (
            f"the outputs are between {trail.lowest:.3g} and {trail.highest:.3g}, as after a sigmoid, and the loss is "
            "binary_cross_entropy_with_logits, which applies it again"
        )
    return ""


def wrong_input_of_loss(facts: Facts) -> str:
    """A likelihood of what is no log-probability, a sign that is turned, shapes that broadcast."""
    trail = facts.measured.outputs
    kind, part = trail.loss
    if trail.last is None or trail.count < ENOUGH_PROBES or is_policy(facts):
        return ""
    if kind == "nll" and (trail.highest > 1e-3 or trail.simplex[0] == trail.count):
        return f"the loss is nll_loss, which expects log-probabilities, and the outputs reach {trail.highest:.3g}"
    if kind == "broadcast mse":
        return f"outputs of shape {trail.last.shape} and the targets {part}, which have one dimension, broadcast"
    if kind.startswith("negative ") and not is_judged(facts):
        return f"the loss is the {kind[9:]} with its sign turned"
    return ""


def out_of_reach(facts: Facts) -> str:
    """Outputs that end in a sigmoid, a softmax or a tanh, and targets beyond them."""
    trail, part = facts.measured.outputs, target(facts)
    kind = trail.loss[0]
    if part is None or trail.count < ENOUGH_PROBES or kind not in ("mse", "l1", "huber") or learns(facts):
        return ""
    if trail.last is not None and trail.last.activation in ("relu", "softplus") and part.mean < 0.5 * part.std:
        negative = f"targets have mean {part.mean:.3g} and reach down to {part.smallest:.3g}"
        return (
            f"outputs end in a {trail.last.activation} and are never below 0, {negative}" if part.smallest < 0 else ""
        )
    bounded = trail.last is not None and trail.last.activation in ("sigmoid", "softmax", "tanh")
    if trail.highest > 1.0 or trail.lowest < -1.0 or (trail.highest < 0.9 and not bounded):
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
    if curve.start - curve.late > curve.noise:
        return ""
    return f"the loss of this classifier is negative: {curve.start:.4g} at the start, {curve.late:.4g} now"


def below_zero(facts: Facts) -> str:
    """A loss of targets that are 0 or 1 for each output, with outputs that are no shares, which falls below zero."""
    trail, part = facts.measured.outputs, target(facts)
    last = trail.last
    if last is None or part is None or trail.count < ENOUGH_PROBES or last.terms or is_policy(facts) or facts.opposed:
        return ""
    binary = part.smallest == 0.0 and part.largest == 1.0 and (part.binary > 0.0 or part.values == 2)
    if not binary or tuple(last.shape[1:]) != tuple(part.shape) or not (trail.lowest < 0.0 or trail.highest > 1.0):
        return ""
    if not facts.trace.first or facts.trace.first[0] < 0.0 or not median(facts.trace.losses[-16:]) < 0.0:
        return ""
    return (
        f"the loss went from {facts.trace.first[0]:.3g} to {facts.trace.losses[-1]:.3g}, below what any answer to "
        f"targets of 0 and 1 can have: outputs are no probabilities, they are between {trail.lowest:.3g} and "
        f"{trail.highest:.3g}"
    )


def rectified_scores(facts: Facts) -> str:
    """Scores of classes that a ReLU has made, in a run that learns little: a class at zero gets no gradient."""
    last, found = first_and_last(facts)[1], progress(facts)
    if last is None or found is None or last.activation != "relu" or learns(facts):
        return ""
    if last.kind not in ("cross-entropy", "nll", "bce with logits") or facts.trace.num_updates < JUDGED_AFTER:
        return ""
    return f"the scores of the {last.kind} come from a relu, which has no gradient below zero; {found}"


def softmax_over_batch(facts: Facts) -> str:
    """The columns of the output add up to 1, not its rows; or there is one column and it is 1."""
    trail = facts.measured.outputs
    last = trail.last
    if last is None or trail.count < ENOUGH_PROBES or len(last.shape) < 2 or last.shape[0] < 2:
        return ""
    if last.shape[-1] == 1 and trail.lowest == trail.highest == 1.0:
        return "the softmax is over a single unit: every output is 1"
    if trail.simplex[1] == trail.count and not trail.simplex[0]:
        return f"the outputs add up to 1 over the {last.shape[0]} samples of the batch, not over the classes"
    return ""


def _is_constant(outputs: OutputStats) -> bool:
    return outputs.spread <= 1e-6 * outputs.rms
