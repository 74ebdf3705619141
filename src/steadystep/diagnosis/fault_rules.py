"""Rules that name the particular fault, from what batches, outputs, parameters and settings have shown.

They count when a diagnosis is asked for, not for the reports during a run: a run that has learned nothing yet may only
be slow to begin.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import final

from steadystep.diagnosis import data_evidence, model_evidence, output_evidence
from steadystep.diagnosis.causes import Cause, Fault
from steadystep.diagnosis.facts import Facts

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


def _seen(cause: Cause, fault: Fault | None, sign: EvidenceTest, weight: float = 3.0) -> EvidenceRule:
    return EvidenceRule(cause, weight, sign, fault=fault, certain=True)


FAULT_RULES: tuple[EvidenceRule, ...] = (
    # seen as it is
    _seen(Cause.ZERO_GRADIENT, Fault.ALL_IGNORED_TARGETS, data_evidence.ignored_targets, 4.0),
    _seen(Cause.FLAT_REWARD, None, data_evidence.flat_reward, 4.0),
    _seen(Cause.NO_LEARNING, Fault.CONSTANT_TARGETS, data_evidence.constant_targets, 3.6),
    _seen(Cause.NO_LEARNING, Fault.UNSHUFFLED_DATA, data_evidence.one_kind_per_batch, 3.5),
    _seen(Cause.NO_LEARNING, Fault.SOFTMAX_AXIS, output_evidence.softmax_over_batch, 3.4),
    _seen(Cause.NO_LEARNING, Fault.SOFTMAX_AXIS, output_evidence.wrong_axis, 3.4),
    _seen(Cause.NO_LEARNING, Fault.WRONG_LOSS, output_evidence.wrong_loss, 3.3),
    _seen(Cause.SUSPICIOUS_PERFECTION, Fault.TARGET_LEAK, data_evidence.copied_target, 3.3),
    _seen(Cause.NO_LEARNING, Fault.WRONG_LOSS, output_evidence.wrong_input_of_loss, 3.3),
    _seen(Cause.NO_LEARNING, Fault.WRONG_LOSS, output_evidence.activation_twice, 3.2),
    _seen(Cause.NO_LEARNING, Fault.BATCH_DEPENDENCE, output_evidence.batch_as_time, 3.1),
    _seen(Cause.NO_LEARNING, Fault.EVAL_MODE, model_evidence.in_eval_mode, 3.0),
    _seen(Cause.NO_LEARNING, Fault.CONSTANT_INPUTS, data_evidence.constant_inputs, 2.9),
    _seen(Cause.NO_LEARNING, Fault.WRONG_OPTIMIZER_PARAMS, model_evidence.in_no_optimizer, 2.8),
    _seen(Cause.NO_LEARNING, Fault.FROZEN_PARAMETERS, model_evidence.outside_the_model, 2.7),
    _seen(Cause.NO_LEARNING, Fault.FROZEN_PARAMETERS, model_evidence.rate_of_zero, 2.6),
    _seen(Cause.NO_LEARNING, Fault.REGULARISATION_TOO_STRONG, model_evidence.strong_dropout, 2.5),
    _seen(Cause.NO_LEARNING, Fault.REGULARISATION_TOO_STRONG, model_evidence.strong_decay, 2.4),
    _seen(Cause.NO_LEARNING, Fault.OUTPUT_INDEPENDENT_OF_INPUT, output_evidence.constant_outputs, 2.3),
    _seen(Cause.ZERO_GRADIENT, Fault.FROZEN_PARAMETERS, model_evidence.never_trained, 2.5),
    _seen(Cause.SCHEDULE_ERROR, None, model_evidence.schedule_stays_at_zero),
    _seen(Cause.SCHEDULE_ERROR, None, model_evidence.schedule_ends_early),
    _seen(Cause.LEARNING_RATE_TOO_LOW, None, model_evidence.rate_always_zero),
    _seen(Cause.REPEATED_BATCH, None, data_evidence.same_batch),
    _seen(Cause.GRADIENT_UNDERFLOW, Fault.PRECISION, model_evidence.half_weights),
    _seen(Cause.UNSCALED_DATA, Fault.UNSCALED_TARGETS, data_evidence.far_targets),
    _seen(Cause.POOR_INITIALISATION, None, model_evidence.equal_weights),
    _seen(Cause.GRADIENT_UNDERFLOW, Fault.PRECISION, model_evidence.rounded_away),
    _seen(Cause.UNSCALED_DATA, Fault.UNSCALED_TARGETS, data_evidence.large_rewards),
    # concluded
    EvidenceRule(Cause.NO_LEARNING, 1.3, output_evidence.faint_outputs, fault=Fault.OUTPUT_INDEPENDENT_OF_INPUT),
    EvidenceRule(Cause.ZERO_GRADIENT, 1.2, output_evidence.cut_graph),
    EvidenceRule(Cause.NO_LEARNING, 1.3, output_evidence.idle_term, fault=Fault.REGULARISATION_TOO_STRONG),
    EvidenceRule(Cause.BATCH_SIZE_UNFIT, 1.5, data_evidence.small_normed_batch),
    EvidenceRule(Cause.UNSCALED_DATA, 1.2, data_evidence.raw_inputs),
    EvidenceRule(Cause.ENTROPY_COLLAPSE, 1.5, data_evidence.certain_policy),
    EvidenceRule(Cause.BATCH_SIZE_UNFIT, 1.5, data_evidence.tiny_batch),
    EvidenceRule(Cause.POOR_INITIALISATION, 1.2, model_evidence.large_biases),
    EvidenceRule(Cause.LEARNING_RATE_TOO_HIGH, 1.0, data_evidence.collapsed),
    EvidenceRule(Cause.LEARNING_RATE_TOO_HIGH, 1.0, data_evidence.ended_above_start),
    EvidenceRule(Cause.LEARNING_RATE_TOO_LOW, 1.2, data_evidence.small_updates),
    EvidenceRule(Cause.NO_LEARNING, 1.4, output_evidence.out_of_reach, fault=Fault.WRONG_LOSS),
    EvidenceRule(Cause.NO_LEARNING, 1.4, output_evidence.negative_loss, fault=Fault.WRONG_LOSS),
    EvidenceRule(Cause.NO_LEARNING, 1.2, output_evidence.collapsed_outputs, fault=Fault.OUTPUT_INDEPENDENT_OF_INPUT),
    EvidenceRule(Cause.SUSPICIOUS_PERFECTION, 1.2, data_evidence.leaked_target, fault=Fault.TARGET_LEAK),
    EvidenceRule(Cause.NO_LEARNING, 1.1, model_evidence.mostly_frozen, fault=Fault.FROZEN_PARAMETERS),
    EvidenceRule(Cause.NO_LEARNING, 1.0, data_evidence.unrelated_targets, fault=Fault.LABELS_SHUFFLED),
)
