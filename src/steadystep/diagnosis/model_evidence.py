"""Signs in the model and its optimizer: what is not trained and why, rates, decay, dropout, mode, first weights."""

from statistics import median

from steadystep.diagnosis.facts import Facts, names
from steadystep.diagnosis.learning import (
    JUDGED_AFTER,
    below_constant,
    hardly_learned,
    is_judged,
    learns,
    progress,
    stuck,
)
from steadystep.diagnosis.measured import is_bias
from steadystep.records import DetectorName

_ENOUGH_PROBES = 3
_MANY = 1 / 3  # of the trained tensors
_NO_RATE = 1.1e-2  # of the largest learning rate: two factors of ten are the end of most schedules
_HIGH_DROPOUT = 0.9
_SHRUNK = 0.5
_LARGE_BIAS = 2.0
_LARGE_GAIN, _SMALL_GAIN = 4.0, 0.05  # of weights, times the root of their inputs
_QUICK_DECAY = 0.02  # of the weights per update
_LONG = 50  # updates
_STALE = 0.1  # of the running statistics that have been replaced
_SPACING = 2e-3  # half of the distance of two bfloat16 numbers
_BROKEN = ("damaged-weights", "forward-overflow")


def frozen_head(facts: Facts) -> str:
    """The last layer has `requires_grad` off, and what is left learned nothing."""
    parts = facts.structure
    if not parts.last_frozen or not parts.trained or facts.measured.loop.turns or not hardly_learned(facts):
        return ""
    return f"the last layer ({parts.last}) has requires_grad off, as have {parts.frozen} parameters in all"


def drawn_head(facts: Facts) -> str:
    """The last layer has `requires_grad` off and has never been trained, in a run that learns little."""
    parts = facts.structure
    if not parts.last_untrained or not parts.trained or facts.measured.loop.turns or facts.opposed or learns(facts):
        return ""
    if facts.trace.num_updates < JUDGED_AFTER or not is_judged(facts):
        return ""
    return (
        f"the last layer ({parts.last}) has requires_grad off and its weights are spread as they are drawn first: "
        "nothing has trained it"
    )


def stale_statistics(facts: Facts) -> str:
    """Running statistics that follow so slowly that evaluation still uses what they began with."""
    momentum, updates = facts.structure.norm_momentum, facts.trace.num_updates
    if not 0.0 < momentum * updates < _STALE or updates < JUDGED_AFTER:
        return ""
    left = (1.0 - momentum) ** updates
    return (
        f"batch normalization has a momentum of {momentum:g} (torch's is the share of the new batch): after {updates} "
        f"updates {left:.0%} of what evaluation uses is what the running statistics began with"
    )


def unusual_gains(facts: Facts) -> str:
    """Most layers began with weights far too large or far too small for their inputs, and nothing was learned."""
    first, parts = facts.measured.initial, facts.structure
    broke = DetectorName.EARLY_DIVERGENCE in facts.warned or any("non-finite" in cause for cause in facts.incidents)
    if first is None or (is_judged(facts) and not hardly_learned(facts) and not broke) or facts.opposed:
        return ""
    sizes = dict(zip(first.names, first.rms, strict=False))
    gains = {n: sizes[n] * f**0.5 for n, f in zip(parts.trained, parts.fan_ins, strict=False) if f > 3 and n in sizes}
    large = [n for n, gain in gains.items() if gain > _LARGE_GAIN]
    small = [n for n, gain in gains.items() if gain < _SMALL_GAIN]
    odd = large if len(large) >= len(small) else small
    if not odd or 2 * len(odd) < len(gains) or (not is_judged(facts) and not len(odd) == len(gains) > 2):
        return ""
    return (
        f"the weights of {len(odd)} of {len(gains)} layers began at {gains[odd[0]]:.2g} / sqrt(inputs); 0.6 to 1.4 is "
        f"typical ({names(odd)})"
    )


def growing_rate(facts: Facts) -> str:
    """A schedule that takes the learning rate far beyond where it was meant to be, and still raises it."""
    lrs, base = facts.trace.lrs, facts.structure.announced
    if len(lrs) < 32 or not base > 0.0 or not lrs[-1] > 10.0 * base or lrs[-1] < 0.99 * max(lrs):
        return ""
    if lrs[len(lrs) // 2] >= 0.5 * lrs[-1]:
        return ""
    if not (facts.incidents or facts.warned or facts.noted) and learns(facts):
        return ""
    return f"the schedule began at a learning rate of {base:.3g} and has raised it to {lrs[-1]:.3g}"


def quick_decay(facts: Facts) -> str:
    """Decay that takes more from the weights in a few dozen updates than a run puts there."""
    parts, rate = facts.structure, max(facts.trace.lrs, default=0.0)
    if parts.scale_free and not parts.decoupled:
        return ""
    share = rate * parts.weight_decay
    if not share > _QUICK_DECAY or learns(facts) or progress(facts) is None or facts.trace.num_updates < JUDGED_AFTER:
        return ""
    return f"weight decay of {parts.weight_decay:g} at a rate of {rate:g} takes {share:.1%} of the weights per update"


def rate_of_zero(facts: Facts) -> str:
    """Parameter groups with a learning rate of 0, in a run that learns little."""
    still = tuple(name for name in facts.structure.rate_zero if name not in facts.measured.updated)
    total = len(facts.structure.trained)
    # why not all: then a schedule has come to its end, or the rate itself is 0
    if not _MANY * total <= len(still) < total or not any(facts.trace.lrs) or learns(facts):
        return ""
    return f"{len(still)} of {len(facts.structure.trained)} parameters have a learning rate of 0 ({names(still)})"


def mostly_frozen(facts: Facts) -> str:
    """Most parameters have `requires_grad` off, and what is left learned nothing."""
    parts = facts.structure
    if parts.frozen <= 2 * len(parts.trained) or not hardly_learned(facts):
        return ""
    return f"{parts.frozen} of {parts.frozen + len(parts.trained)} parameters have requires_grad off"


def rate_always_zero(facts: Facts) -> str:
    """No schedule, and a learning rate of 0, not none at all: then the loop or the optimizer has its own."""
    if facts.structure.announced or not facts.structure.rate_zero or not _never_any_rate(facts):
        return ""
    return f"the learning rate was 0 in all {facts.trace.num_updates} updates"


def schedule_stays_at_zero(facts: Facts) -> str:
    """A schedule that never leaves 0."""
    if not facts.structure.announced or not _never_any_rate(facts):
        return ""
    rate = facts.structure.announced
    return f"the schedule kept the learning rate at 0 in all {facts.trace.num_updates} updates; its base is {rate:g}"


def still_warming_up(facts: Facts) -> str:
    """A rate that has risen throughout a run that learned nothing, and is still far from what was announced."""
    lrs, found, updates = facts.trace.lrs, progress(facts), facts.trace.num_updates
    if updates < JUDGED_AFTER or found is None or found.gained or len(lrs) < 32:
        return ""
    if not 0.0 < lrs[-1] < 0.1 * facts.structure.announced or lrs[-1] < max(lrs) or lrs[0] >= 0.5 * lrs[-1]:
        return ""
    of = facts.structure.announced
    return f"after {updates} updates the schedule has come to a learning rate of {lrs[-1]:.3g} of {of:.3g}; {found}"


def schedule_ends_early(facts: Facts) -> str:
    """A learning rate that has been next to nothing for most of a run that learned little."""
    lrs = facts.trace.lrs
    highest = max(lrs, default=0.0)
    if facts.trace.num_updates < JUDGED_AFTER or not highest > 0.0 or learns(facts):
        return ""
    after = lrs[lrs.index(highest) :]
    gone = [lr for lr in after if lr <= _NO_RATE * highest]
    if len(gone) < 0.5 * len(lrs) or lrs[-1] > _NO_RATE * highest:
        return ""
    step = facts.trace.steps[len(lrs) - len(gone)]
    low = f"below {_NO_RATE * highest:.1g} since step {step}"
    return f"the learning rate fell from {highest:.3g} to {lrs[-1]:.3g} and has been {low}"


def strong_dropout(facts: Facts) -> str:
    """Nearly everything is dropped, and the loss has not halved."""
    parts = facts.structure
    if parts.dropout < _HIGH_DROPOUT or facts.trace.num_updates < JUDGED_AFTER or learns(facts):
        return ""
    return f"dropout of {parts.dropout:g} ({names(parts.dropouts)}) sets nearly all activations to zero"


def strong_decay(facts: Facts) -> str:
    """Weights that decay has made small, in a run that learned nothing."""
    parts, shrunk = facts.structure, shrinkage(facts)
    if not parts.weight_decay > 0.0 or shrunk is None or shrunk > _SHRUNK or learns(facts):
        return ""
    if stuck(facts) is None and not _not_better(facts):
        return ""
    return f"the weights have shrunk to {shrunk:.2g} of their size at the start; weight decay is {parts.weight_decay:g}"


def shrinkage(facts: Facts) -> float | None:
    """The size of the weights now, as a share of that before the first update; None where it is unknown."""
    first, probe = facts.measured.initial, facts.probe
    if first is None or probe is None:
        return None
    before = dict(zip(first.names, first.rms, strict=False))
    now = zip(probe.names, probe.weight_rms, strict=False)
    shares = [size / before[n] for n, size in now if before.get(n, 0.0) > 0.0 and not is_bias(n)]
    return median(shares) if shares else None


def in_eval_mode(facts: Facts) -> str:
    """Batch normalization or dropout in evaluation mode at every probe, in a run that learns little."""
    trail = facts.measured.outputs
    if trail.count < 1 or trail.evaluating < trail.count or not facts.structure.modes or learns(facts):
        return ""
    suffers = facts.incidents or DetectorName.EARLY_DIVERGENCE in facts.warned or stuck(facts) is not None
    partly = trail.last is not None and not trail.last.evaluating_all
    if (trail.count < _ENOUGH_PROBES or partly) and not suffers:
        return ""
    modes = facts.structure.modes
    return f"the model was in evaluation mode at all {trail.count} probes: {modes} of its modules differ then"


def half_weights(facts: Facts) -> str:
    """Weights in float16 that are updated as they are, and a run that breaks or does not learn."""
    parts = facts.structure
    if not parts.half or learns(facts):
        return ""
    broken = any(cause.startswith("non-finite") or cause in _BROKEN for cause in facts.incidents)
    if not broken and not _lost_updates(facts) and stuck(facts) is None:
        return ""
    return (
        f"{parts.half} of {len(parts.trained)} parameters are float16: small updates, and an eps of 1e-8, round to zero"
    )


def rounded_away(facts: Facts) -> str:
    """Weights in bfloat16, updates smaller than the distance of two such numbers, and hardly anything learned."""
    parts, ratio, found = facts.structure, facts.ratio, progress(facts)
    if not parts.coarse or ratio is None or not ratio < _SPACING or found is None:
        return ""
    if found.end < 0.75 * found.start or facts.trace.num_updates < JUDGED_AFTER:
        return ""
    return (
        f"{parts.coarse} of {len(parts.trained)} parameters are bfloat16, whose neighbors are 0.4 % apart, and an "
        f"update changes them by {ratio:.1e} of their size; {found}"
    )


def large_biases(facts: Facts) -> str:
    """Biases far larger than any recipe gives, in a run that learned nothing."""
    first = facts.measured.initial
    if first is None or stuck(facts) is None:
        return ""
    large = [n for n, size in zip(first.names, first.rms, strict=False) if is_bias(n) and size > _LARGE_BIAS]
    return f"biases began with a root mean square above {_LARGE_BIAS:g} ({names(large)})" if large else ""


def equal_weights(facts: Facts) -> str:
    """Matrices whose elements were all the same before the first update, in a run that learns little."""
    first = facts.measured.initial
    if first is None or not first.std or learns(facts):
        return ""
    columns = [(n, rms, std) for n, rms, std in zip(first.names, first.rms, first.std, strict=False) if not is_bias(n)]
    equal = [n for n, rms, std in columns if std <= 1e-6 * rms and rms > 0.0]
    if not equal or 2 * len(equal) < len(columns) or facts.trace.num_updates < JUDGED_AFTER:
        return ""
    gains = [n for n, rms, _ in columns if n in equal and abs(rms - 1.0) < 1e-6]  # as those of normalization are
    if (gains or not is_judged(facts)) and not (stuck(facts) or below_constant(facts)):
        return ""
    return f"all elements of {len(equal)} of {len(columns)} weights were equal before the first update ({names(equal)})"


def _never_any_rate(facts: Facts) -> bool:
    lrs = facts.trace.lrs
    return len(lrs) >= 32 and not any(lrs) and not facts.measured.updated and bool(facts.structure.trained)


def _not_better(facts: Facts) -> bool:
    found = progress(facts)
    return found is not None and not found.gained


def _lost_updates(facts: Facts) -> bool:
    """Gradients that are there, and weights that an update left as they were."""
    probe = facts.probe
    return probe is not None and bool(probe.update_rms) and not any(probe.update_rms) and facts.idle_share == 0.0
