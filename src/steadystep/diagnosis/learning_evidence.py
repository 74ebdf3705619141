"""Signs that something does not learn. Each sign is a sentence with its numbers, or nothing."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import final

from steadystep.diagnosis.causes import Cause, Fault
from steadystep.diagnosis.facts import Facts, Occurrences, guessing, names, told
from steadystep.diagnosis.learning import is_policy, learns, progress, stuck
from steadystep.diagnosis.measured import is_bias
from steadystep.records import DetectorName

_LARGE_UPDATE = 0.1  # of the weights, in one step; a thousandth is usual
_USUAL_UPDATE, _NOTICEABLE_UPDATE = 3e-4, 1e-2
# Fine-tuning with Adam at 5e-7 changes weights by 2e-5 a step, and by more than a hundredth in a whole run.
_TINY_UPDATE, _TINY_JOURNEY = 1e-5, 0.01
_LONG = 200  # updates
_RARE = 0.05  # of the updates
_KNOWN = frozenset(
    {
        *(DetectorName.EARLY_DIVERGENCE, DetectorName.CONSTANT_PREDICTION, DetectorName.NON_FINITE),
        *(DetectorName.GRADIENT_SPIKE, DetectorName.LOSS_SPIKE, DetectorName.NOT_HEALING),
        *(DetectorName.SLOW_DIVERGENCE, DetectorName.WORSE_THAN_BEST, DetectorName.LEARNING_RATE_JUMP),
        *(DetectorName.LEARNING_RATE_CREEP, DetectorName.LEARNING_RATE_BOUNDS, DetectorName.OSCILLATION),
        *(DetectorName.VANISHING_GRADIENT, DetectorName.ZERO_GRADIENT, DetectorName.BUFFER_JUMP),
        *(DetectorName.INPUT_SCALE, DetectorName.SAME_BATCH, DetectorName.WEIGHT_JUMP, DetectorName.BIT_FLIP),
        *(DetectorName.MISCOMPUTATION, DetectorName.DAMAGED_STATE, DetectorName.GROWING_GRADIENT),
        *(DetectorName.CLIP_RATE, DetectorName.UPDATE_RATIO, DetectorName.POISONED_MOMENTS),
        *(DetectorName.RMS_SURPRISE, DetectorName.LOSS_SCALE, DetectorName.LOST_MOMENTS, DetectorName.ODD_REPLICA),
        *(DetectorName.SHORT_WARMUP, DetectorName.DEAD_UNITS, DetectorName.SATURATED_UNITS, DetectorName.NO_LEARNING),
        *(DetectorName.SUSPICIOUS_PERFECTION, DetectorName.EMBEDDING_GROWTH, DetectorName.ATTENTION_LOGIT_GROWTH),
        *(DetectorName.POLICY_MISMATCH, DetectorName.RATIO_EXPLOSION, DetectorName.REWARD_HACKING),
        *(DetectorName.VALUE_DIVERGENCE, DetectorName.REWARD_COLLAPSE, DetectorName.DEAD_GROUPS),
        *(DetectorName.KL_BLOW_UP, DetectorName.ENTROPY_COLLAPSE, DetectorName.FLAT_REWARD),
        *(DetectorName.METRIC_BOUNDS, DetectorName.BAD_ADVANTAGES),
    }
)


EvidenceTest = Callable[[Facts], str]
"""Evidence in words; an empty string when there is none."""


@final
@dataclass(frozen=True, slots=True)
class EvidenceRule:
    """One row of the table."""

    cause: Cause
    weight: float
    sign: EvidenceTest
    forgivable: bool = False
    """Counts half in a run that is going well all the same."""
    level: bool = False
    """Goes by the level of the loss.

    A target network, an adversary or growing targets raise it too, so by itself such a sign blames nothing: it takes
    one of another kind beside it, or a finding that older weights have confirmed.
    """
    fault: Fault | None = None
    """The particular mistake."""
    certain: bool = False
    """Seen as it is, not concluded from the curves: it comes first."""


def warned(detector: str) -> Callable[[Facts], str]:
    """A warning or more of this detector."""
    return lambda facts: _told(facts.warned.get(detector))


def noted(detector: str) -> Callable[[Facts], str]:
    """A note of this detector, where it did not warn as well."""
    return lambda facts: "" if detector in facts.warned else _told(facts.noted.get(detector))


def carries_over(facts: Facts) -> str:
    """The gradients of an update are still there when the next backward pass begins."""
    loop = facts.measured.loop
    if not loop.never_clears or facts.opposed:  # why: the loss of one network leaves gradients in the other
        return ""
    if _skips(facts) or (loop.clears_often and learns(facts)):  # steps of accumulation, with an update at each of them
        return ""
    total = loop.carried + loop.renewed
    return f"after {loop.carried} of {total} updates the next backward pass was added to gradients that had been used"


def clears(facts: Facts) -> str:
    """Gradients are known to be cleared, so that nothing can add up."""
    loop = facts.measured.loop
    known = loop.renewed >= max(4, 0.9 * facts.trace.num_updates) and not loop.carried
    return "gradients are cleared after each update" if known else ""


def lost_moments(facts: Facts) -> str:
    """Moments that were cleared, unless that was rare and the run has got over it."""
    seen = facts.warned.get(DetectorName.LOST_MOMENTS)
    rare = seen is None or max(seen.count, facts.measured.loop.emptied) < _RARE * facts.trace.num_updates
    return "" if rare and learns(facts) else _told(seen)


def forgets(facts: Facts) -> str:
    """The optimizer has no moments left at the next step, again and again."""
    loop = facts.measured.loop
    return f"the optimizer lost its state after {loop.emptied} updates" if loop.forgets else ""


def dead_units(facts: Facts) -> str:
    """Units of which an output is left that still learns."""
    return "" if idle(facts) else _told(facts.warned.get(DetectorName.DEAD_UNITS))


def dead_layer(facts: Facts) -> str:
    """A whole layer is zero for every input; when nothing learns at all, the output is to blame and not the layer."""
    probe = facts.probe
    if probe is None or idle(facts):
        return ""
    dead = [name for name, share in zip(probe.modules, probe.dead, strict=False) if share >= 0.99]
    return f"at step {probe.step} almost all units were dead in {names(dead)}" if dead else ""


def clipped(facts: Facts) -> str:
    """Not where the loss falls with an optimizer that divides by the size of the gradient."""
    found = progress(facts)
    gained = found is not None and found.gained and facts.curve is not None and facts.curve.near_best
    if gained and facts.structure.scale_free:
        return ""
    return _told(facts.warned.get(DetectorName.CLIP_RATE))


def saturated_layer(facts: Facts) -> str:
    """A sigmoid or tanh that is mostly flat."""
    probe = facts.probe
    if probe is None:
        return ""
    flat = [name for name, share in zip(probe.modules, probe.saturated, strict=False) if share >= 0.5]
    return f"at step {probe.step} most outputs were saturated in {names(flat)}" if flat else ""


def idle(facts: Facts) -> str:
    """No gradient at all, though there is something to learn."""
    share = facts.idle_share - facts.done_share
    if share <= 0.5:
        return ""
    return f"the gradient was exactly zero in {share:.0%} of the later steps"


def vanishing(facts: Facts) -> str:
    """A gradient that shrinks from layer to layer; one that is exactly zero is cut off, and is another matter."""
    seen = facts.warned.get(DetectorName.VANISHING_GRADIENT)
    return "" if seen is None or not seen.worst else told(seen)


def unreached(facts: Facts) -> str:
    """Weights without a gradient; that of a bias alone may cancel out, as in a hinge loss of two sides."""
    seen = facts.warned.get(DetectorName.ZERO_GRADIENT)
    if seen is None or (seen.names and all(map(is_bias, seen.names))):
        return ""
    return told(seen)


def done(facts: Facts) -> str:
    """No loss and no gradient, in nearly all batches and from the start: later, a task without noise is solved."""
    share = 0.0 if is_policy(facts) or all(facts.trace.first) else facts.done_share
    return f"loss and gradient were exactly zero in {share:.0%} of the later steps" if share > 0.9 else ""


def weights_at_zero(facts: Facts) -> str:
    """Zeros that no update can change."""
    zeros = facts.stuck_at_zero
    if not zeros or 2 * len(zeros) < len(facts.weights):
        return ""
    return f"{len(zeros)} of {len(facts.weights)} weights are all zero and receive no gradient ({names(zeros)})"


def underflow(facts: Facts) -> str:
    """Gradients that are zero under a loss scaler."""
    if not facts.scaled or dead_layer(facts):
        return ""
    shares = sorted(facts.probe.zero_shares) if facts.probe is not None else []
    if shares and shares[len(shares) // 2] > 0.5:
        return f"in half of the tensors more than {shares[len(shares) // 2]:.0%} of the fp16 gradient is exactly zero"
    return _told(facts.warned.get(DetectorName.ZERO_GRADIENT)) or idle(facts)


def guesses(facts: Facts) -> str:
    """The loss of guessing, without any trend, while the weights do move."""
    curve, ratio = facts.curve, facts.ratio
    if curve is None or facts.trace.num_updates < _LONG or ratio is None or ratio < _USUAL_UPDATE or facts.opposed:
        return ""
    points = len(facts.trace.losses) / 8
    classes = guessing(curve.late, precision=2.0 * curve.noise / math.sqrt(points))
    quiet = curve.noise < 0.03 * curve.late and curve.highest - curve.lowest < 0.5 * curve.late
    if classes is None or not (quiet and curve.settled and curve.start - curve.late < 0.25 * curve.late):
        return ""
    if not _may_be_classes(facts, classes):
        return ""
    return (
        f"the loss began at {curve.start:.4g} and stays at {curve.late:.4g}, which is ln {classes}: the loss of "
        f"guessing among {classes} classes; an update changes the weights by {ratio:.1e} of their size"
    )


def _may_be_classes(facts: Facts, classes: int) -> bool:
    """Whether the outputs have so many columns, or two values where they have one; true where they are unknown."""
    last = facts.measured.outputs.last
    if last is None:
        return True
    columns = last.shape[-1] if len(last.shape) > 1 else 1
    return classes in last.shape[1:] or (classes == 2 and (columns == 1 or bool(facts.measured.outputs.loss[0])))


def piles_up(facts: Facts) -> str:
    """The first gradients add up: each doubling of the time about doubles the norm.

    The escape from a saddle grows by the same factor at each step, and so by more and more with each doubling.
    """
    norms = facts.trace.first_norms
    if len(norms) < 16 or norms[0] <= 0.0 or sum(b > a for a, b in pairwise(norms)) < 13:
        return ""
    doublings = [norms[1] / norms[0], norms[3] / norms[1], norms[7] / norms[3], norms[15] / norms[7]]
    if min(doublings) < 1.15 or max(doublings) > 4.0 or norms[15] < 7.0 * norms[0]:
        return ""
    return f"the first 16 gradient norms grew from {norms[0]:.3g} to {norms[15]:.3g}, as they do without zero_grad"


def unchanged(facts: Facts) -> str:
    """There are gradients, and the updates do nothing with them."""
    probes = [probe for probe in (facts.first_probe, facts.probe) if probe is not None and probe.update_rms]
    moved = any(any(probe.update_rms) for probe in probes)
    if not probes or moved or len(facts.ratios) < 4 or facts.idle_share > 0.0 or _skips(facts):
        return ""
    return f"at steps {probes[0].step} and {probes[-1].step} the update changed no weight at all"


def _skips(facts: Facts) -> bool:
    """Updates that change nothing, in a run that learns all the same."""
    found, probes = progress(facts), [p for p in (facts.first_probe, facts.probe) if p is not None and p.update_rms]
    return found is not None and found.gained and any(not any(probe.update_rms) for probe in probes)


def hardly_moves(facts: Facts) -> str:
    """Nothing learned, and weights that have stayed where they were."""
    curve, ratio = facts.curve, facts.highest_ratio
    updates = facts.trace.num_updates
    if curve is None or not 0.0 < ratio < min(_TINY_UPDATE, _TINY_JOURNEY / updates) or updates < _LONG:
        return ""
    if curve.start - curve.best > 0.02 * abs(curve.start) + curve.noise:
        return ""
    found = progress(facts)
    if found is not None and found.beats_base:  # a fine-tune that begins at its floor
        return ""
    lr = max(facts.trace.lrs)
    return (
        f"in {updates} updates the loss went from {curve.start:.4g} to {curve.late:.4g}; an update changes the "
        f"weights by {ratio:.1e} of their size (1e-3 is typical) at a learning rate of {lr:.3g}"
    )


def drowned(facts: Facts) -> str:
    """Noise as large as the loss, no progress in it, and updates large enough to follow it."""
    curve, ratio = facts.curve, facts.ratio
    if curve is None or facts.trace.num_updates < _LONG or facts.signed or curve.learned or not curve.settled:
        return ""
    found = progress(facts)
    if found is not None and (found.gained or found.beats_base):
        return ""
    if not 0.0 < curve.late <= curve.noise or ratio is None or not _NOTICEABLE_UPDATE <= ratio < _LARGE_UPDATE:
        return ""
    return f"losses of consecutive steps differ by {curve.noise / curve.late:.0%} of their level, which does not fall"


def always_zero(facts: Facts) -> str:
    """Weights whose gradient is zero at every probe of a run that has learned nothing: cut off, not faded or dead."""
    seen, probe, kept = facts.measured, facts.probe, facts.structure
    if probe is None or not seen.updated or stuck(facts) is None or kept.half or kept.coarse or dead_layer(facts):
        return ""
    known = zip(probe.names, probe.weight_rms, probe.update_rms, strict=False)
    moves = {n: update / weight for n, weight, update in known if weight > 0.0 and not is_bias(n)}
    still = [n for n in moves if n in seen.touched and n not in seen.updated and n not in kept.rate_zero]
    others = [move for n, move in moves.items() if n in seen.updated] or [0.0]
    if 3 * len(still) < len(moves) or min(others) < 0.01 * max(others) or DetectorName.DEAD_UNITS in facts.warned:
        return ""
    return f"{len(still)} of {len(moves)} weights have a gradient that is always zero ({names(still)})"


def unexplained(facts: Facts) -> str:
    """Warnings of detectors that no other rule knows."""
    return "; ".join(told(seen) for name, seen in facts.warned.items() if name not in _KNOWN)


def _told(seen: Occurrences | None) -> str:
    return "" if seen is None else told(seen)
