"""Signs that the steps are too large: what a learning rate that is too high does to a run."""

import math
from statistics import median

from steadystep.diagnosis.causes import Cause
from steadystep.diagnosis.facts import Facts, guessing, names, told
from steadystep.diagnosis.learning import learns, progress, raw_inputs_of, stuck, supervised
from steadystep.diagnosis.learning_evidence import dead_layer, saturated_layer
from steadystep.records import DetectorName

_LARGE_UPDATE, _HUGE_UPDATE = 0.1, 0.3  # of the weights, in one step; a thousandth is usual
_MANY_POINTS = 64
_FAR_ABOVE, _HAD_FALLEN, _OFTEN = 1.3, 0.7, 0.25  # of the loss of a constant prediction; of the later steps
_DIFFERENT, _ALIKE = 0.1, 0.05  # of the size of the outputs
_ALL, _ALIVE = 0.99, 0.8  # of the units of a layer
_SHARP = 100.0  # a logit: small GPTs stay below 64 at rates that suit them, and QK-clip (Kimi Team 2025) begins here


def huge_updates(facts: Facts) -> str:
    """Updates nearly as large as the weights."""
    ratio = facts.ratio
    return _moves(ratio) if ratio is not None and ratio >= _HUGE_UPDATE and len(facts.ratios) >= 4 else ""


def large_updates(facts: Facts) -> str:
    """Updates of a tenth of the weights."""
    ratio = facts.ratio
    return _moves(ratio) if ratio is not None and _LARGE_UPDATE <= ratio < _HUGE_UPDATE else ""


def unsteady(facts: Facts) -> str:
    """The loss rises again and again, and nothing has touched the weights but the optimizer."""
    seen = facts.warned.get(DetectorName.NOT_HEALING)
    if seen is None or {DetectorName.WEIGHT_JUMP, DetectorName.BIT_FLIP} & facts.warned.keys():
        return ""
    signs = (DetectorName.OSCILLATION, DetectorName.SLOW_DIVERGENCE)
    if not any(sign in facts.noted or sign in facts.warned for sign in signs) or not frequent_spikes(facts):
        return ""
    momentum = facts.structure.momentum
    more = f"; a momentum of {momentum:g} adds up {1 / (1 - momentum):.0f} steps" if 0.98 < momentum < 1.0 else ""
    return f"{told(seen)}; {frequent_spikes(facts)}{more}"


def leaped(facts: Facts) -> str:
    """The first updates were nearly as large as the weights."""
    ratio = max(facts.ratios[:4], default=0.0)
    return f"early updates changed the weights by {ratio:.2g} of their size" if ratio >= _HUGE_UPDATE else ""


def died(facts: Facts) -> str:
    """Layers that were alive at first and that updates have made silent for every input."""
    first, dead, probe = facts.first_probe, dead_layer(facts), facts.probe
    if first is None or probe is None or not dead or probe is first:
        return ""
    pairs = zip(first.dead, probe.dead, strict=False)
    before = [then for then, now in pairs if now >= _ALL > _ALIVE > then]
    return f"{dead}; at step {first.step} only {max(before):.0%} were" if before else ""


def sharp_attention(facts: Facts) -> str:
    """Attention that has come down to single positions: normalised layers hide large weights, logits do not."""
    probe = facts.probe
    if probe is None:
        return ""
    bound = max((b for b in probe.logit_bounds if math.isfinite(b)), default=0.0)
    if bound < _SHARP:
        return ""
    return f"attention logits reach up to {bound:.3g} at step {probe.step} (below 64 is typical)"


def climbed(facts: Facts) -> str:
    """The first updates made it worse."""
    curve, first, (peak, step) = facts.curve, facts.trace.first, facts.peak
    if curve is None or facts.signed or step > 32 or peak - first[0] <= max(0.25 * first[0], 5.0 * curve.noise):
        return ""
    return f"the loss first rose from {first[0]:.4g} to {peak:.4g} at step {step}"


def never_recovered(facts: Facts) -> str:
    """The loss went up early and has hardly been below its start since."""
    curve, first, (peak, step) = facts.curve, facts.trace.first, facts.peak
    if curve is None or facts.signed or curve.best < 0.9 * curve.start or 4 * step > facts.trace.steps[-1]:
        return ""
    if peak - first[0] <= max(2.0 * first[0], 10.0 * curve.noise):
        return ""
    return f"the loss rose to {peak:.4g} at step {step} and has hardly been below its initial value since"


def bold_adam(facts: Facts) -> str:
    """A learning rate that Adam, whose updates are about as large as the rate, is hardly ever given."""
    lr = max(facts.trace.lrs, default=0.0)
    adam = facts.probe is not None and facts.probe.second_moments
    return f"a learning rate of {lr:.2g} with Adam" if adam and lr >= 0.1 else ""


def reckless_adam(facts: Facts) -> str:
    """A rate with which Adam overwrites small weights at once."""
    return bold_adam(facts) if max(facts.trace.lrs, default=0.0) >= 0.3 else ""


def rose(facts: Facts) -> str:
    """The loss is above its start."""
    curve = facts.curve
    if curve is None or facts.signed or not curve.rose:
        return ""
    return f"the loss is {curve.late:.4g}; it began at {curve.start:.4g}"


def fell_back(facts: Facts) -> str:
    """What was learned has been lost again."""
    curve = facts.curve
    if curve is None or facts.signed or not curve.learned or curve.near_best:
        return ""
    return f"the loss is {curve.late:.4g}; it was {curve.best:.4g} at best"


def went_up(facts: Facts) -> str:
    """The loss has been far above what it was at first."""
    first, (peak, step) = facts.trace.first, facts.peak
    if facts.signed or not first or not 0.0 < 30.0 * first[0] < peak:
        return ""
    return f"the loss rose from {first[0]:.4g} to {peak:.4g} at step {step}"


def frequent_spikes(facts: Facts) -> str:
    """Spikes of loss or gradient in more than one step of a hundred."""
    found = [
        occurrences.get(d)
        for occurrences in (facts.warned, facts.noted)
        for d in (DetectorName.GRADIENT_SPIKE, DetectorName.LOSS_SPIKE)
    ]
    count = sum(seen.count for seen in found if seen is not None)
    if count < max(3.0, 0.01 * facts.trace.num_updates):
        return ""
    return f"{count} loss or gradient spikes in {facts.trace.num_updates} updates"


def _moves(ratio: float) -> str:
    return f"an update changes the weights by {ratio:.2g} of their size (1e-3 is typical)"


# Root mean square. A variance above 10 is never meant (Wardat et al. 2022, DeepDiagnosis); 1 is for norms.
_LARGE_WEIGHT, _UNIT_WEIGHT = math.sqrt(10.0), 0.8
_HALVED = 0.5
_BROKEN = (Cause.NON_FINITE_LOSS, Cause.NON_FINITE_GRADIENT, Cause.FORWARD_OVERFLOW)


def large_inputs(facts: Facts) -> str:
    """Inputs far from unit scale."""
    inputs = raw_inputs_of(facts)
    if inputs is None or max(abs(inputs.mean), inputs.std) < 20.0:
        return ""
    return f"inputs have mean {inputs.mean:.3g}, standard deviation {inputs.std:.3g} and maximum {inputs.largest:.3g}"


def uneven_inputs(facts: Facts) -> str:
    """Features of very different scale."""
    inputs = raw_inputs_of(facts)
    if inputs is None or inputs.scale_spread < 1e3 or inputs.largest < 20.0:
        return ""
    return f"the largest scale of an input feature is {inputs.scale_spread:.3g} times the smallest"


def suffers(facts: Facts) -> str:
    """Inputs of a wrong scale, and a run that shows it.

    A first loss far above all others is no sign of suffering while it goes well: so begins any regression whose targets
    are not around zero.
    """
    if not (large_inputs(facts) or uneven_inputs(facts)):
        return ""
    if DetectorName.EARLY_DIVERGENCE in facts.warned:  # what a guard has done about it does not excuse the inputs
        return told(facts.warned[DetectorName.EARLY_DIVERGENCE])
    if has_halved(facts):
        return ""
    looks = [went_up, dead_layer, huge_updates, saturated_layer]
    if not facts.going_well:
        looks += [cold_start, high_start, rose, frequent_spikes, _slow, _breaks]
    return next((text for text in (look(facts) for look in looks) if text), "")


def has_halved(facts: Facts) -> bool:
    """Whether the loss has been halved, for good, by a net that is alive and does not merely guess."""
    curve = facts.curve
    if curve is None or facts.signed or not facts.going_well or curve.late > _HALVED * curve.start:
        return False
    points = len(facts.trace.losses) / 8
    guesses = guessing(curve.late, precision=2.0 * curve.noise / math.sqrt(points)) is not None
    return not guesses and not dead_layer(facts)


def large_weights(facts: Facts) -> str:
    """Some weights far larger than any recipe gives, or most of them larger, and not made so by the first update."""
    if leaped(facts) and facts.measured.initial is None:
        return ""
    large = facts.weights_above(_LARGE_WEIGHT) or _most(facts, facts.weights_above(_UNIT_WEIGHT))
    return f"the weights were large {_when(facts)} the first update: {names(large)}" if large else ""


def all_weights_large(facts: Facts) -> str:
    """Most weights far larger than any recipe gives, and not made so by the first update."""
    by_update = leaped(facts) and facts.measured.initial is None
    large = () if by_update else _most(facts, facts.weights_above(_LARGE_WEIGHT))
    if not large:
        return ""
    return f"{len(large)} of {len(facts.weights)} weights had a variance above 10 {_when(facts)} the first update"


def _when(facts: Facts) -> str:
    return "after" if facts.measured.initial is None else "before"


def cold_start(facts: Facts) -> str:
    """A first loss far above the size that losses are meant to have."""
    curve, first = facts.curve, facts.trace.first
    if curve is None or facts.signed or first[0] < 20.0 or not curve.best < min(10.0, first[0] / 10.0):
        return ""
    return f"the first loss was {first[0]:.4g}, later losses reach {curve.best:.4g}"


def high_start(facts: Facts) -> str:
    """A first loss far above what soon followed."""
    curve, first = facts.curve, facts.trace.first
    if curve is None or not first or facts.signed or first[0] < 30.0 * max(abs(curve.best), 1e-3) or first[0] < 20.0:
        return ""
    return f"the first loss was {first[0]:.4g}, later losses reach {curve.best:.4g}"


def _most(facts: Facts, some: tuple[str, ...]) -> tuple[str, ...]:
    return some if len(some) >= 3 and len(some) > 0.6 * len(facts.weights) else ()


def _breaks(facts: Facts) -> str:
    occurrences = [facts.incidents[cause] for cause in _BROKEN if cause in facts.incidents]
    return told(occurrences[0]) if occurrences else ""


def _slow(facts: Facts) -> str:
    curve = facts.curve
    if curve is None or curve.learned:
        return ""
    return f"the loss went from {curve.start:.4g} to {curve.late:.4g}"


def wanders(facts: Facts) -> str:
    """A loss that had fallen below that of a constant prediction, and is far above it again and again."""
    found, losses = progress(facts), facts.trace.losses
    if found is None or found.base is None or not supervised(facts) or len(losses) < _MANY_POINTS or learns(facts):
        return ""
    eighth = len(losses) // 8
    later = losses[eighth:]
    best = min(median(later[i : i + 8]) for i in range(0, len(later) - 8, 8))
    above = sum(loss > _FAR_ABOVE * found.base for loss in later) / len(later)
    if best > _HAD_FALLEN * found.base or above < _OFTEN:
        return ""
    momentum = facts.structure.momentum
    more = f"; a momentum of {momentum:g} adds up {1 / (1 - momentum):.0f} steps" if 0.98 < momentum < 1.0 else ""
    return (
        f"the loss was {best:.3g} and has been above {_FAR_ABOVE * found.base:.3g} in {above:.0%} of the later steps, "
        f"up to {max(later):.3g}; {found.base_text} is {found.base:.3g}{more}"
    )


def stunned(facts: Facts) -> str:
    """First updates of a tenth of the weights, after which the outputs are the same for every input."""
    found, trail = stuck(facts), facts.measured.outputs
    first, last, ratio = trail.first, trail.last, max(facts.ratios[:2], default=0.0)
    if found is None or not found.at_base or first is None or last is None or trail.count < 3 or ratio < _LARGE_UPDATE:
        return ""
    if not first.spread > _DIFFERENT * first.rms or not last.spread < _ALIKE * max(last.rms, first.rms):
        return ""
    return (
        f"the first updates changed the weights by {ratio:.2g} of their size, and outputs of different samples, "
        f"{first.spread:.3g} apart at first, are {last.spread:.3g} apart now; {found}"
    )
