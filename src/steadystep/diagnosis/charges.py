"""From the facts of a run to its causes: a table of charges, each with a weight and with evidence in words.

The weights of the charges that hold are added up for each cause, and a sum of 1 is a diagnosis. So one charge of 1 or
more is enough by itself, and signs that healthy runs show too stay below 1 and count only together.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import final

from steadystep.diagnosis import beginnings, signs, step_size
from steadystep.diagnosis.causes import Cause
from steadystep.diagnosis.facts import Facts
from steadystep.diagnosis.signs import noted, warned

Sign = Callable[[Facts], str]
"""Evidence in words; an empty string when there is none."""


@final
@dataclass(frozen=True, slots=True)
class Charge:
    """One row of the table."""

    cause: Cause
    weight: float
    sign: Sign
    forgivable: bool = False
    """Counts half in a run that is going well all the same."""
    level: bool = False
    """Goes by the level of the loss.

    A target network, an adversary or growing targets raise it too, so by itself such a sign blames nothing: it takes
    one of another kind beside it, or a finding that older weights have confirmed.
    """


def _unless_it_learns(sign: Sign) -> Sign:
    """Units that rest are no fault where the loss has been halved without them."""
    return lambda facts: "" if beginnings.learns(facts) else sign(facts)


CHARGES: tuple[Charge, ...] = (
    # one sign is enough
    Charge(Cause.MISSING_ZERO_GRAD, 1.8, warned("growing-gradient")),
    Charge(Cause.MISSING_ZERO_GRAD, 1.1, signs.piles_up),
    Charge(Cause.DEAD_UNITS, 1.3, _unless_it_learns(signs.dead_units)),
    Charge(Cause.DEAD_UNITS, 1.0, signs.dead_layer),
    Charge(Cause.SATURATION, 1.0, _unless_it_learns(warned("saturated-units"))),
    Charge(Cause.EMBEDDING_GROWTH, 1.0, warned("embedding-growth")),
    Charge(Cause.ATTENTION_LOGIT_GROWTH, 1.0, warned("attention-logit-growth")),
    Charge(Cause.VANISHING_GRADIENT, 1.2, warned("vanishing-gradient")),
    Charge(Cause.ZERO_GRADIENT, 1.0, warned("zero-gradient")),
    Charge(Cause.ZERO_GRADIENT, 1.1, signs.idle),
    Charge(Cause.POOR_INITIALISATION, 2.5, signs.weights_at_zero),
    Charge(Cause.LOSS_SCALE_COLLAPSE, 1.0, warned("loss-scale")),
    Charge(Cause.GRADIENT_UNDERFLOW, 2.2, signs.underflow),
    Charge(Cause.CLIPPING_TOO_TIGHT, 1.0, warned("clip-rate")),
    Charge(Cause.SCHEDULE_ERROR, 1.0, warned("learning-rate-bounds")),
    Charge(Cause.SCHEDULE_ERROR, 1.0, warned("learning-rate-creep")),
    Charge(Cause.POISONED_MOMENTS, 1.0, warned("poisoned-moments")),
    Charge(Cause.POISONED_MOMENTS, 1.0, warned("damaged-state")),
    Charge(Cause.LOST_MOMENTS, 1.0, warned("lost-moments")),
    Charge(Cause.DAMAGED_WEIGHTS, 1.0, warned("weight-jump")),
    Charge(Cause.REPEATED_BATCH, 1.0, warned("same-batch")),
    Charge(Cause.POLICY_DRIFT, 1.0, warned("kl-blow-up")),
    Charge(Cause.ENTROPY_COLLAPSE, 1.0, warned("entropy-collapse")),
    Charge(Cause.FLAT_REWARD, 1.0, warned("flat-reward")),
    Charge(Cause.METRIC_OUT_OF_BOUNDS, 1.0, warned("metric-bounds")),
    Charge(Cause.SUSPICIOUS_PERFECTION, 1.5, signs.done),
    Charge(Cause.NO_LEARNING, 1.1, signs.guesses),
    Charge(Cause.NO_LEARNING, 1.2, signs.unchanged),
    Charge(Cause.LEARNING_RATE_TOO_LOW, 1.1, signs.hardly_moves),
    Charge(Cause.UNKNOWN, 1.0, signs.unexplained),
    # a learning rate that is too high shows in many ways
    Charge(Cause.LEARNING_RATE_TOO_HIGH, 1.0, warned("early-divergence"), forgivable=True),
    Charge(Cause.LEARNING_RATE_TOO_HIGH, 1.0, warned("constant-prediction"), forgivable=True),
    Charge(Cause.LEARNING_RATE_TOO_HIGH, 0.8, warned("slow-divergence"), forgivable=True, level=True),
    Charge(Cause.LEARNING_RATE_TOO_HIGH, 1.0, warned("worse-than-best"), forgivable=True, level=True),
    Charge(Cause.LEARNING_RATE_TOO_HIGH, 1.0, step_size.huge_updates),
    Charge(Cause.LEARNING_RATE_TOO_HIGH, 0.4, step_size.large_updates, forgivable=True),
    Charge(Cause.LEARNING_RATE_TOO_HIGH, 0.4, step_size.fell_back, level=True),
    Charge(Cause.LEARNING_RATE_TOO_HIGH, 0.7, step_size.rose, forgivable=True, level=True),
    Charge(Cause.LEARNING_RATE_TOO_HIGH, 0.7, step_size.went_up, level=True),
    Charge(Cause.LEARNING_RATE_TOO_HIGH, 0.7, step_size.never_recovered, level=True),
    Charge(Cause.LEARNING_RATE_TOO_HIGH, 0.4, step_size.leaped),
    Charge(Cause.LEARNING_RATE_TOO_HIGH, 0.6, step_size.sharp_attention),
    Charge(Cause.LEARNING_RATE_TOO_HIGH, 0.3, step_size.climbed, level=True),
    Charge(Cause.LEARNING_RATE_TOO_HIGH, 0.4, step_size.bold_adam),
    Charge(Cause.LEARNING_RATE_TOO_HIGH, 0.3, step_size.reckless_adam),
    Charge(Cause.LEARNING_RATE_TOO_HIGH, 0.3, warned("oscillation"), forgivable=True, level=True),
    Charge(Cause.LEARNING_RATE_TOO_HIGH, 0.3, noted("oscillation"), forgivable=True, level=True),
    Charge(Cause.LEARNING_RATE_TOO_HIGH, 0.4, step_size.spikes, forgivable=True, level=True),
    Charge(Cause.OSCILLATION, 1.0, warned("oscillation"), forgivable=True),
    Charge(Cause.BATCH_SIZE_UNFIT, 1.0, signs.drowned),
    # wrong from the start; inputs of any scale are no fault by themselves
    Charge(Cause.UNSCALED_DATA, 0.6, beginnings.large_inputs),
    Charge(Cause.UNSCALED_DATA, 0.3, beginnings.uneven_inputs),
    Charge(Cause.UNSCALED_DATA, 0.8, beginnings.suffers),
    Charge(Cause.POOR_INITIALISATION, 1.0, beginnings.all_weights_large),
    Charge(Cause.POOR_INITIALISATION, 0.6, beginnings.large_weights),
    Charge(Cause.POOR_INITIALISATION, 0.5, beginnings.high_start),
)

# What a fact rules out, whatever speaks for it.
REFUTED: dict[Cause, Sign] = {Cause.LEARNING_RATE_TOO_HIGH: signs.hardly_moves}

_BLOW_UPS = {
    Cause.NON_FINITE_LOSS,
    Cause.NON_FINITE_GRADIENT,
    Cause.NON_FINITE_BUFFER,
    Cause.FORWARD_OVERFLOW,
    Cause.EXPLODING_GRADIENT,
    Cause.BAD_BATCH,
    Cause.DAMAGED_WEIGHTS,
    Cause.POISONED_MOMENTS,
    Cause.OSCILLATION,
    Cause.DEAD_UNITS,
    Cause.SATURATION,
    Cause.EMBEDDING_GROWTH,
    Cause.ATTENTION_LOGIT_GROWTH,
    Cause.CLIPPING_TOO_TIGHT,
}
_OVERFLOWS = {Cause.NON_FINITE_LOSS, Cause.NON_FINITE_GRADIENT, Cause.FORWARD_OVERFLOW}
_STANDSTILLS = {Cause.ZERO_GRADIENT, Cause.NO_LEARNING, Cause.LEARNING_RATE_TOO_LOW}

# What else a cause accounts for when it is there: those are consequences, and come after it.
CONSEQUENCES: dict[Cause, set[Cause]] = {
    Cause.MISSING_ZERO_GRAD: {*_BLOW_UPS, *_STANDSTILLS, Cause.LEARNING_RATE_TOO_HIGH},
    Cause.UNSCALED_DATA: {*_BLOW_UPS, *_STANDSTILLS, Cause.LEARNING_RATE_TOO_HIGH, Cause.POOR_INITIALISATION},
    Cause.POOR_INITIALISATION: {*_BLOW_UPS, *_STANDSTILLS, Cause.VANISHING_GRADIENT},
    Cause.SCHEDULE_ERROR: {*_BLOW_UPS, *_STANDSTILLS, Cause.LEARNING_RATE_TOO_HIGH},
    Cause.LEARNING_RATE_TOO_HIGH: {*_BLOW_UPS, *_STANDSTILLS, Cause.VANISHING_GRADIENT},
    Cause.DATA_SHIFT: {Cause.LEARNING_RATE_TOO_HIGH},
    Cause.DAMAGED_WEIGHTS: {Cause.NON_FINITE_LOSS, Cause.NON_FINITE_GRADIENT, Cause.NON_FINITE_BUFFER},
    Cause.GRADIENT_UNDERFLOW: {*_STANDSTILLS, Cause.VANISHING_GRADIENT},
    Cause.VANISHING_GRADIENT: {*_STANDSTILLS},
    Cause.SATURATION: {*_STANDSTILLS, Cause.VANISHING_GRADIENT},
    Cause.EMBEDDING_GROWTH: {*_OVERFLOWS, Cause.ATTENTION_LOGIT_GROWTH},
    Cause.ATTENTION_LOGIT_GROWTH: {*_OVERFLOWS},
    Cause.DEAD_UNITS: {*_STANDSTILLS, Cause.VANISHING_GRADIENT},
    Cause.SUSPICIOUS_PERFECTION: {*_STANDSTILLS, Cause.VANISHING_GRADIENT},
}
