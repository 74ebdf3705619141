"""What a charge looks for. Each sign is a sentence with its numbers, or nothing."""

import math
from collections.abc import Callable

from steadystep.diagnosis.curve import guessing
from steadystep.diagnosis.facts import Facts
from steadystep.diagnosis.sentences import names
from steadystep.diagnosis.tally import Tally

_LARGE_UPDATE, _HUGE_UPDATE = 0.1, 0.3  # of the weights, in one step; a thousandth is usual
_USUAL_UPDATE = 3e-4
# Fine-tuning with Adam at 5e-7 changes weights by 1e-5 a step.
_TINY_UPDATE = 3e-6
_LONG = 200  # updates
_KNOWN = frozenset(
    {
        *("non-finite", "gradient-spike", "loss-spike", "not-healing", "slow-divergence", "worse-than-best"),
        *("learning-rate-jump", "learning-rate-bounds", "oscillation", "vanishing-gradient", "zero-gradient"),
        *("growing-gradient", "clip-rate", "update-ratio", "poisoned-moments", "rms-surprise", "loss-scale"),
        *("dead-units", "saturated-units", "no-learning", "suspicious-perfection"),
    }
)


def warned(detector: str) -> Callable[[Facts], str]:
    """A warning or more of this detector."""
    return lambda facts: _told(facts.warned.get(detector))


def noted(detector: str) -> Callable[[Facts], str]:
    """A note of this detector, where it did not warn as well."""
    return lambda facts: "" if detector in facts.warned else _told(facts.noted.get(detector))


def dead_units(facts: Facts) -> str:
    """Units of which an output is left that still learns."""
    return "" if idle(facts) else _told(facts.warned.get("dead-units"))


def dead_layer(facts: Facts) -> str:
    """A whole layer is zero for every input; when nothing learns at all, the output is to blame and not the layer."""
    probe = facts.probe
    if probe is None or idle(facts):
        return ""
    dead = [name for name, share in zip(probe.modules, probe.dead, strict=False) if share >= 0.99]
    return f"at step {probe.step} hardly a unit was alive in {names(dead)}" if dead else ""


def idle(facts: Facts) -> str:
    """No gradient at all, though there is something to learn."""
    share = facts.idle_share
    if share <= 0.5 or done(facts):
        return ""
    return f"the gradient was exactly zero in {share:.0%} of the later steps"


def done(facts: Facts) -> str:
    """No loss and no gradient."""
    share = facts.done_share
    return f"loss and gradient were exactly zero in {share:.0%} of the later steps" if share > 0.5 else ""


def weights_at_zero(facts: Facts) -> str:
    """Zeros that no update can change."""
    zeros = facts.stuck_at_zero
    if not zeros or 2 * len(zeros) < len(facts.weights):
        return ""
    return f"{len(zeros)} of {len(facts.weights)} weights are all zero and get no gradient ({names(zeros)})"


def underflow(facts: Facts) -> str:
    """Gradients that are zero under a loss scaler."""
    if not facts.scaled or dead_layer(facts):
        return ""
    shares = sorted(facts.probe.zero_shares) if facts.probe is not None else []
    if shares and shares[len(shares) // 2] > 0.5:
        return f"in half of the tensors more than {shares[len(shares) // 2]:.0%} of the fp16 gradient is exactly zero"
    return _told(facts.warned.get("zero-gradient")) or idle(facts)


def guesses(facts: Facts) -> str:
    """The loss of guessing, without any trend, while the weights do move."""
    curve, ratio = facts.curve, facts.ratio
    if curve is None or facts.trace.num_updates < _LONG or ratio is None or ratio < _USUAL_UPDATE:
        return ""
    points = len(facts.trace.losses) / 8
    classes = guessing(curve.late, precision=2.0 * curve.noise / math.sqrt(points))
    quiet = curve.noise < 0.03 * curve.late and curve.highest - curve.lowest < 0.5 * curve.late
    if classes is None or not (quiet and curve.settled and curve.start - curve.late < 0.25 * curve.late):
        return ""
    return (
        f"the loss began at {curve.start:.4g} and stays at {curve.late:.4g}, which is ln {classes}: what guessing "
        f"between {classes} classes costs; the weights change by {ratio:.1e} of their size per step"
    )


def unchanged(facts: Facts) -> str:
    """There are gradients, and the updates do nothing with them."""
    probes = [probe for probe in (facts.first_probe, facts.probe) if probe is not None and probe.update_rms]
    if len(facts.ratios) < 4 or facts.idle_share > 0.0 or any(any(probe.update_rms) for probe in probes):
        return ""
    return f"at steps {probes[0].step} and {probes[-1].step} the update changed no weight at all"


def hardly_moves(facts: Facts) -> str:
    """Nothing learned, and weights that have stayed where they were."""
    curve, ratio = facts.curve, facts.highest_ratio
    if curve is None or not 0.0 < ratio < _TINY_UPDATE or facts.trace.num_updates < _LONG:
        return ""
    if curve.start - curve.best > 0.02 * abs(curve.start) + curve.noise:
        return ""
    lr = max(facts.trace.lrs)
    return (
        f"in {facts.trace.num_updates} updates the loss went from {curve.start:.4g} to {curve.late:.4g}; an update "
        f"changes the weights by {ratio:.1e} of their size (1e-3 is usual) at a learning rate of {lr:.3g}"
    )


def huge_updates(facts: Facts) -> str:
    """Updates nearly as large as the weights."""
    ratio = facts.ratio
    return _moves(ratio) if ratio is not None and ratio >= _HUGE_UPDATE and len(facts.ratios) >= 4 else ""


def large_updates(facts: Facts) -> str:
    """Updates of a tenth of the weights."""
    ratio = facts.ratio
    return _moves(ratio) if ratio is not None and _LARGE_UPDATE <= ratio < _HUGE_UPDATE else ""


def leaped(facts: Facts) -> str:
    """The first updates were nearly as large as the weights."""
    ratio = max(facts.ratios[:4], default=0.0)
    return f"early updates changed the weights by {ratio:.2g} of their size" if ratio >= _HUGE_UPDATE else ""


def climbed(facts: Facts) -> str:
    """The first updates made it worse."""
    curve, first, (peak, step) = facts.curve, facts.trace.first, facts.peak
    if curve is None or facts.signed or step > 32 or peak - first[0] <= max(0.25 * first[0], 5.0 * curve.noise):
        return ""
    return f"at first the loss rose, from {first[0]:.4g} to {peak:.4g} at step {step}"


def never_recovered(facts: Facts) -> str:
    """The loss went up and has not been below its start since."""
    curve, first, (peak, step) = facts.curve, facts.trace.first, facts.peak
    if curve is None or facts.signed or curve.learned or peak < 3.0 * first[0]:
        return ""
    return f"the loss rose from {first[0]:.4g} to {peak:.4g} at step {step} and nothing has been learned since"


def bold_adam(facts: Facts) -> str:
    """A learning rate that Adam, whose updates are about as large as the rate, is hardly ever given."""
    lr = max(facts.trace.lrs, default=0.0)
    adam = facts.probe is not None and facts.probe.second_moments
    return f"a learning rate of {lr:.2g} with Adam" if adam and lr >= 0.1 else ""


def rose(facts: Facts) -> str:
    """The loss is above its start."""
    curve = facts.curve
    if curve is None or facts.signed or not curve.rose:
        return ""
    return f"the loss is {curve.late:.4g} and began at {curve.start:.4g}"


def went_up(facts: Facts) -> str:
    """The loss has been far above what it was at first."""
    first, (peak, step) = facts.trace.first, facts.peak
    if facts.signed or not first or not 0.0 < 30.0 * first[0] < peak:
        return ""
    return f"the loss rose from {first[0]:.4g} to {peak:.4g} at step {step}"


def spikes(facts: Facts) -> str:
    """Spikes of loss or gradient in more than one step of a hundred."""
    found = [tallies.get(d) for tallies in (facts.warned, facts.noted) for d in ("gradient-spike", "loss-spike")]
    count = sum(tally.count for tally in found if tally is not None)
    if count < max(3.0, 0.01 * facts.trace.num_updates):
        return ""
    return f"{count} spikes of loss or gradient in {facts.trace.num_updates} updates"


def drowned(facts: Facts) -> str:
    """Noise as large as the loss, and no progress in it."""
    curve, ratio = facts.curve, facts.ratio
    if curve is None or facts.trace.num_updates < _LONG or facts.signed or curve.learned or not curve.settled:
        return ""
    if curve.noise < 0.5 * curve.late or ratio is None or not _USUAL_UPDATE <= ratio < _LARGE_UPDATE:
        return ""
    return f"losses of neighbouring steps differ by {curve.noise / curve.late:.0%} of their level, which does not fall"


def unexplained(facts: Facts) -> str:
    """Warnings of detectors that no other charge knows."""
    return "; ".join(_told(tally) for name, tally in facts.warned.items() if name not in _KNOWN)


def large_inputs(facts: Facts) -> str:
    """Inputs far from unit scale."""
    inputs = facts.inputs
    if inputs is None or max(abs(inputs.mean), inputs.std) < 20.0:
        return ""
    return f"inputs have mean {inputs.mean:.3g}, standard deviation {inputs.std:.3g}, largest {inputs.largest:.3g}"


def uneven_inputs(facts: Facts) -> str:
    """Features of very different scale."""
    inputs = facts.inputs
    if inputs is None or inputs.scale_spread < 1e3 or inputs.largest < 20.0:
        return ""
    return f"the largest scale of an input feature is {inputs.scale_spread:.3g} times the smallest"


def suffers(facts: Facts) -> str:
    """Inputs of a wrong scale, and a run that shows it."""
    if not (large_inputs(facts) or uneven_inputs(facts)):
        return ""
    looks = (went_up, dead_layer, huge_updates) + (() if facts.going_well else (high_start, rose, spikes, _slow))
    return next((text for text in (look(facts) for look in looks) if text), "")


def large_weights(facts: Facts) -> str:
    """Weights far larger than any recipe gives."""
    large = facts.large_weights
    return f"weights with a variance above 10: {names(large)}" if large else ""


def high_start(facts: Facts) -> str:
    """A first loss far above what soon followed."""
    curve, first = facts.curve, facts.trace.first
    if curve is None or not first or facts.signed or first[0] < 30.0 * max(abs(curve.best), 1e-3) or first[0] < 20.0:
        return ""
    return f"the first loss was {first[0]:.4g}, against {curve.best:.4g} later"


def _slow(facts: Facts) -> str:
    curve = facts.curve
    if curve is None or curve.learned:
        return ""
    return f"the loss went from {curve.start:.4g} to {curve.late:.4g}"


def _moves(ratio: float) -> str:
    return f"an update changes the weights by {ratio:.2g} of their size (1e-3 is usual)"


def _told(tally: Tally | None) -> str:
    if tally is None:
        return ""
    return f"{tally.what} ({names(tally.where)}), {tally.when}" if tally.names else f"{tally.what}, {tally.when}"
