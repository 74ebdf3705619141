"""Signs of what was wrong before the first step: the scale of the data and of the weights."""

import math

from steadystep.diagnosis.causes import Cause
from steadystep.diagnosis.curve import guessing
from steadystep.diagnosis.facts import Facts
from steadystep.diagnosis.sentences import names, told
from steadystep.diagnosis.signs import dead_layer, saturated_layer
from steadystep.diagnosis.step_size import huge_updates, leaped, rose, spikes, went_up

# Root mean square. A variance above 10 is never meant (Wardat et al. 2022, DeepDiagnosis); 1 is for norms.
_LARGE_WEIGHT, _UNIT_WEIGHT = math.sqrt(10.0), 0.8
_HALVED = 0.5
_BROKEN = (Cause.NON_FINITE_LOSS, Cause.NON_FINITE_GRADIENT, Cause.FORWARD_OVERFLOW)


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
    """Inputs of a wrong scale, and a run that shows it.

    A first loss far above all others is no sign of suffering while it goes well: so begins any regression whose targets
    are not around zero.
    """
    if not (large_inputs(facts) or uneven_inputs(facts)) or learns(facts):
        return ""
    looks = [went_up, dead_layer, huge_updates, saturated_layer]
    if not facts.going_well:
        looks += [cold_start, high_start, rose, spikes, _slow, _breaks]
    return next((text for text in (look(facts) for look in looks) if text), "")


def learns(facts: Facts) -> bool:
    """Whether the loss has been halved, for good, by a net that is alive and does not merely guess."""
    curve = facts.curve
    if curve is None or facts.signed or not facts.going_well or curve.late > _HALVED * curve.start:
        return False
    points = len(facts.trace.losses) / 8
    guesses = guessing(curve.late, precision=2.0 * curve.noise / math.sqrt(points)) is not None
    return not guesses and not dead_layer(facts)


def large_weights(facts: Facts) -> str:
    """Some weights far larger than any recipe gives, or most of them larger, and not made so by the first update."""
    if leaped(facts):
        return ""
    large = facts.weights_above(_LARGE_WEIGHT) or _most(facts, facts.weights_above(_UNIT_WEIGHT))
    return f"the weights were large after the first update: {names(large)}" if large else ""


def all_weights_large(facts: Facts) -> str:
    """Most weights far larger than any recipe gives, and not made so by the first update."""
    large = () if leaped(facts) else _most(facts, facts.weights_above(_LARGE_WEIGHT))
    return (
        f"{len(large)} of {len(facts.weights)} weights had a variance above 10 after the first update" if large else ""
    )


def cold_start(facts: Facts) -> str:
    """A first loss far above the size that losses are meant to have."""
    curve, first = facts.curve, facts.trace.first
    if curve is None or facts.signed or first[0] < 20.0 or not curve.best < min(10.0, first[0] / 10.0):
        return ""
    return f"the first loss was {first[0]:.4g}, against {curve.best:.4g} later"


def high_start(facts: Facts) -> str:
    """A first loss far above what soon followed."""
    curve, first = facts.curve, facts.trace.first
    if curve is None or not first or facts.signed or first[0] < 30.0 * max(abs(curve.best), 1e-3) or first[0] < 20.0:
        return ""
    return f"the first loss was {first[0]:.4g}, against {curve.best:.4g} later"


def _most(facts: Facts, some: tuple[str, ...]) -> tuple[str, ...]:
    return some if len(some) >= 3 and len(some) > 0.6 * len(facts.weights) else ()


def _breaks(facts: Facts) -> str:
    tallies = [facts.incidents[cause] for cause in _BROKEN if cause in facts.incidents]
    return told(tallies[0]) if tallies else ""


def _slow(facts: Facts) -> str:
    curve = facts.curve
    if curve is None or curve.learned:
        return ""
    return f"the loss went from {curve.start:.4g} to {curve.late:.4g}"
