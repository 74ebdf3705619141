"""From the facts of a run to its causes: a table of rules, each with a weight and with evidence in words.

The weights of the rules that hold are added up for each cause, and a sum of 1 is a diagnosis. So one rule of 1 or
more is enough by itself, and signs that healthy runs show too stay below 1 and count only together.
"""

import math
from collections.abc import Mapping, Sequence
from typing import final

from steadystep.diagnosis import (
    batch_evidence,
    data_evidence,
    graph_evidence,
    learning_evidence,
    model_evidence,
    output_evidence,
    policy_evidence,
    step_size_evidence,
)
from steadystep.diagnosis.advice import advise
from steadystep.diagnosis.causes import CONSEQUENCES, EXPLAINED, Cause, Fault
from steadystep.diagnosis.conclusion import conclude_from_curve
from steadystep.diagnosis.facts import Facts, told
from steadystep.diagnosis.learning import nears_floor
from steadystep.diagnosis.learning_evidence import EvidenceRule, EvidenceTest, noted, warned
from steadystep.records import DetectorName, Diagnosis


def _seen(cause: Cause, fault: Fault | None, sign: EvidenceTest, weight: float = 3.0) -> EvidenceRule:
    return EvidenceRule(cause, weight, sign, fault=fault, certain=True)


def _unless_it_learns(sign: EvidenceTest) -> EvidenceTest:
    """Not where the loss has been halved all the same."""
    return lambda facts: "" if step_size_evidence.has_halved(facts) or nears_floor(facts) else sign(facts)


EVIDENCE_RULES: tuple[EvidenceRule, ...] = (
    # one sign is enough
    EvidenceRule(Cause.MISSING_ZERO_GRAD, 1.8, _unless_it_learns(warned(DetectorName.GROWING_GRADIENT))),
    EvidenceRule(Cause.MISSING_ZERO_GRAD, 1.1, learning_evidence.piles_up),
    EvidenceRule(Cause.DEAD_UNITS, 1.3, _unless_it_learns(learning_evidence.dead_units)),
    EvidenceRule(Cause.DEAD_UNITS, 1.0, learning_evidence.dead_layer),
    EvidenceRule(Cause.SATURATION, 1.0, _unless_it_learns(warned(DetectorName.SATURATED_UNITS))),
    EvidenceRule(Cause.EMBEDDING_GROWTH, 1.0, warned(DetectorName.EMBEDDING_GROWTH)),
    EvidenceRule(Cause.ATTENTION_LOGIT_GROWTH, 1.0, warned(DetectorName.ATTENTION_LOGIT_GROWTH)),
    EvidenceRule(Cause.VANISHING_GRADIENT, 1.2, _unless_it_learns(learning_evidence.vanishing)),
    EvidenceRule(Cause.ZERO_GRADIENT, 1.0, learning_evidence.unreached),
    EvidenceRule(Cause.ZERO_GRADIENT, 1.1, learning_evidence.idle),
    EvidenceRule(Cause.POOR_INITIALISATION, 2.5, learning_evidence.weights_at_zero),
    EvidenceRule(Cause.LOSS_SCALE_COLLAPSE, 1.0, warned(DetectorName.LOSS_SCALE)),
    EvidenceRule(Cause.GRADIENT_UNDERFLOW, 2.2, learning_evidence.underflow),
    EvidenceRule(Cause.CLIPPING_TOO_TIGHT, 1.0, learning_evidence.clipped),
    EvidenceRule(Cause.SCHEDULE_ERROR, 1.0, warned(DetectorName.LEARNING_RATE_BOUNDS)),
    EvidenceRule(Cause.SCHEDULE_ERROR, 1.0, warned(DetectorName.LEARNING_RATE_CREEP)),
    EvidenceRule(Cause.POISONED_MOMENTS, 1.0, warned(DetectorName.POISONED_MOMENTS)),
    EvidenceRule(Cause.POISONED_MOMENTS, 1.0, warned(DetectorName.DAMAGED_STATE)),
    EvidenceRule(Cause.LOST_MOMENTS, 1.0, learning_evidence.lost_moments),
    EvidenceRule(Cause.DAMAGED_WEIGHTS, 1.0, _unless_it_learns(warned(DetectorName.WEIGHT_JUMP))),
    EvidenceRule(Cause.REPEATED_BATCH, 1.0, warned(DetectorName.SAME_BATCH)),
    EvidenceRule(Cause.POLICY_DRIFT, 1.0, warned(DetectorName.KL_BLOW_UP)),
    EvidenceRule(Cause.ENTROPY_COLLAPSE, 1.0, warned(DetectorName.ENTROPY_COLLAPSE)),
    EvidenceRule(Cause.POLICY_MISMATCH, 1.1, warned(DetectorName.POLICY_MISMATCH)),
    EvidenceRule(Cause.RATIO_EXPLOSION, 1.05, warned(DetectorName.RATIO_EXPLOSION)),
    EvidenceRule(Cause.REWARD_HACKING, 1.1, warned(DetectorName.REWARD_HACKING)),
    EvidenceRule(Cause.VALUE_DIVERGENCE, 1.05, warned(DetectorName.VALUE_DIVERGENCE)),
    EvidenceRule(Cause.POLICY_COLLAPSE, 1.0, warned(DetectorName.REWARD_COLLAPSE)),
    EvidenceRule(Cause.BAD_ADVANTAGES, 1.05, warned(DetectorName.BAD_ADVANTAGES)),
    EvidenceRule(Cause.DEAD_GROUPS, 1.0, warned(DetectorName.DEAD_GROUPS)),
    EvidenceRule(Cause.FLAT_REWARD, 1.0, warned(DetectorName.FLAT_REWARD)),
    EvidenceRule(Cause.METRIC_OUT_OF_BOUNDS, 1.0, warned(DetectorName.METRIC_BOUNDS)),
    EvidenceRule(Cause.SUSPICIOUS_PERFECTION, 1.5, learning_evidence.done),
    EvidenceRule(Cause.NO_LEARNING, 1.1, learning_evidence.guesses),
    EvidenceRule(Cause.NO_LEARNING, 1.2, learning_evidence.unchanged),
    EvidenceRule(Cause.LEARNING_RATE_TOO_LOW, 1.1, learning_evidence.hardly_moves),
    EvidenceRule(Cause.UNKNOWN, 1.0, learning_evidence.unexplained),
    # a learning rate that is too high shows in many ways
    EvidenceRule(Cause.LEARNING_RATE_TOO_HIGH, 1.0, warned(DetectorName.EARLY_DIVERGENCE), forgivable=True),
    EvidenceRule(Cause.LEARNING_RATE_TOO_HIGH, 1.0, warned(DetectorName.CONSTANT_PREDICTION), forgivable=True),
    EvidenceRule(Cause.LEARNING_RATE_TOO_HIGH, 0.8, warned(DetectorName.SLOW_DIVERGENCE), forgivable=True, level=True),
    EvidenceRule(Cause.LEARNING_RATE_TOO_HIGH, 1.0, warned(DetectorName.WORSE_THAN_BEST), forgivable=True, level=True),
    EvidenceRule(Cause.LEARNING_RATE_TOO_HIGH, 1.0, step_size_evidence.huge_updates),
    EvidenceRule(Cause.LEARNING_RATE_TOO_HIGH, 0.4, step_size_evidence.large_updates, forgivable=True),
    EvidenceRule(Cause.LEARNING_RATE_TOO_HIGH, 0.4, step_size_evidence.fell_back, level=True),
    EvidenceRule(Cause.LEARNING_RATE_TOO_HIGH, 0.7, step_size_evidence.rose, forgivable=True, level=True),
    EvidenceRule(Cause.LEARNING_RATE_TOO_HIGH, 0.7, step_size_evidence.went_up, level=True),
    EvidenceRule(Cause.LEARNING_RATE_TOO_HIGH, 0.7, step_size_evidence.never_recovered, level=True),
    EvidenceRule(Cause.LEARNING_RATE_TOO_HIGH, 0.4, step_size_evidence.leaped),
    EvidenceRule(Cause.LEARNING_RATE_TOO_HIGH, 1.0, step_size_evidence.unsteady),
    EvidenceRule(Cause.LEARNING_RATE_TOO_HIGH, 0.6, step_size_evidence.sharp_attention),
    EvidenceRule(Cause.LEARNING_RATE_TOO_HIGH, 0.3, step_size_evidence.climbed, level=True),
    EvidenceRule(Cause.LEARNING_RATE_TOO_HIGH, 0.4, step_size_evidence.bold_adam),
    EvidenceRule(Cause.LEARNING_RATE_TOO_HIGH, 0.3, step_size_evidence.reckless_adam),
    EvidenceRule(Cause.LEARNING_RATE_TOO_HIGH, 0.3, warned(DetectorName.OSCILLATION), forgivable=True, level=True),
    EvidenceRule(Cause.LEARNING_RATE_TOO_HIGH, 0.3, noted(DetectorName.OSCILLATION), forgivable=True, level=True),
    EvidenceRule(Cause.LEARNING_RATE_TOO_HIGH, 0.4, step_size_evidence.frequent_spikes, forgivable=True, level=True),
    EvidenceRule(Cause.OSCILLATION, 1.0, warned(DetectorName.OSCILLATION), forgivable=True),
    EvidenceRule(Cause.BATCH_SIZE_UNFIT, 1.0, learning_evidence.drowned),
    # wrong from the start; inputs of any scale are no fault by themselves
    EvidenceRule(Cause.UNSCALED_DATA, 0.6, step_size_evidence.large_inputs),
    EvidenceRule(Cause.UNSCALED_DATA, 0.3, step_size_evidence.uneven_inputs),
    EvidenceRule(Cause.UNSCALED_DATA, 0.8, step_size_evidence.suffers),
    EvidenceRule(Cause.POOR_INITIALISATION, 1.0, step_size_evidence.all_weights_large),
    EvidenceRule(Cause.POOR_INITIALISATION, 0.6, step_size_evidence.large_weights),
    EvidenceRule(Cause.POOR_INITIALISATION, 0.5, step_size_evidence.high_start),
)

FAULT_RULES: tuple[EvidenceRule, ...] = (
    # seen as it is
    _seen(Cause.MISSING_ZERO_GRAD, None, learning_evidence.carries_over, 3.5),
    _seen(Cause.LOST_MOMENTS, None, learning_evidence.forgets, 3.4),
    _seen(Cause.ZERO_GRADIENT, Fault.ALL_IGNORED_TARGETS, data_evidence.ignored_targets, 4.0),
    _seen(Cause.FLAT_REWARD, None, policy_evidence.flat_reward, 4.0),
    _seen(Cause.NO_LEARNING, Fault.CONSTANT_TARGETS, data_evidence.constant_targets, 3.6),
    _seen(Cause.NO_LEARNING, Fault.UNSHUFFLED_DATA, batch_evidence.one_kind_per_batch, 3.5),
    _seen(Cause.NO_LEARNING, Fault.SOFTMAX_AXIS, output_evidence.softmax_over_batch, 3.4),
    _seen(Cause.NO_LEARNING, Fault.SOFTMAX_AXIS, output_evidence.wrong_axis, 3.4),
    _seen(Cause.NO_LEARNING, Fault.WRONG_LOSS, output_evidence.wrong_loss, 3.3),
    _seen(Cause.NO_LEARNING, Fault.SOFTMAX_AXIS, graph_evidence.inner_axis, 3.3),
    _seen(Cause.NO_LEARNING, Fault.WRONG_LOSS, data_evidence.outside_of_domain, 3.3),
    _seen(Cause.SUSPICIOUS_PERFECTION, Fault.TARGET_LEAK, data_evidence.copied_target, 3.3),
    _seen(Cause.NO_LEARNING, Fault.WRONG_LOSS, output_evidence.wrong_input_of_loss, 3.3),
    _seen(Cause.NO_LEARNING, Fault.WRONG_LOSS, output_evidence.activation_twice, 3.2),
    _seen(Cause.NO_LEARNING, Fault.WRONG_LOSS, output_evidence.rectified_scores, 3.1),
    _seen(Cause.NO_LEARNING, Fault.BATCH_DEPENDENCE, graph_evidence.batch_as_time, 3.1),
    _seen(Cause.NO_LEARNING, Fault.EVAL_MODE, model_evidence.in_eval_mode, 3.0),
    _seen(Cause.NO_LEARNING, Fault.CONSTANT_INPUTS, data_evidence.constant_inputs, 2.9),
    _seen(Cause.NO_LEARNING, Fault.WRONG_OPTIMIZER_PARAMS, graph_evidence.in_no_optimizer, 2.8),
    _seen(Cause.NO_LEARNING, Fault.FROZEN_PARAMETERS, graph_evidence.outside_the_model, 2.7),
    _seen(Cause.NO_LEARNING, Fault.FROZEN_PARAMETERS, model_evidence.rate_of_zero, 2.6),
    _seen(Cause.ZERO_GRADIENT, None, graph_evidence.behind_no_grad, 2.6),
    _seen(Cause.ZERO_GRADIENT, None, graph_evidence.severed, 2.6),
    _seen(Cause.ZERO_GRADIENT, None, learning_evidence.always_zero, 2.6),
    _seen(Cause.NO_LEARNING, Fault.OUTPUT_INDEPENDENT_OF_INPUT, graph_evidence.faint_part, 2.5),
    _seen(Cause.REPEATED_BATCH, None, batch_evidence.few_samples),
    _seen(Cause.NO_LEARNING, Fault.WRONG_LOSS, output_evidence.bottomless),
    _seen(Cause.NO_LEARNING, Fault.CONSTANT_INPUTS, batch_evidence.few_inputs, 2.8),
    _seen(Cause.NO_LEARNING, Fault.CONSTANT_TARGETS, batch_evidence.constant_part, 3.6),
    _seen(Cause.NO_LEARNING, Fault.REGULARISATION_TOO_STRONG, model_evidence.quick_decay, 2.4),
    _seen(Cause.NO_LEARNING, Fault.REGULARISATION_TOO_STRONG, output_evidence.mostly_penalty, 2.4),
    _seen(Cause.SCHEDULE_ERROR, None, model_evidence.growing_rate),
    _seen(Cause.NO_LEARNING, Fault.REGULARISATION_TOO_STRONG, model_evidence.strong_dropout, 2.5),
    _seen(Cause.NO_LEARNING, Fault.REGULARISATION_TOO_STRONG, model_evidence.strong_decay, 2.4),
    _seen(Cause.NO_LEARNING, Fault.OUTPUT_INDEPENDENT_OF_INPUT, output_evidence.constant_outputs, 2.3),
    _seen(Cause.ZERO_GRADIENT, Fault.FROZEN_PARAMETERS, graph_evidence.never_trained, 2.5),
    _seen(Cause.SCHEDULE_ERROR, None, model_evidence.schedule_stays_at_zero),
    _seen(Cause.SCHEDULE_ERROR, None, model_evidence.schedule_ends_early),
    _seen(Cause.SCHEDULE_ERROR, None, model_evidence.still_warming_up),
    _seen(Cause.LEARNING_RATE_TOO_LOW, None, model_evidence.rate_always_zero),
    _seen(Cause.REPEATED_BATCH, None, batch_evidence.same_batch),
    _seen(Cause.GRADIENT_UNDERFLOW, Fault.PRECISION, model_evidence.half_weights),
    _seen(Cause.UNSCALED_DATA, Fault.UNSCALED_TARGETS, data_evidence.far_targets),
    _seen(Cause.POOR_INITIALISATION, None, model_evidence.equal_weights),
    _seen(Cause.GRADIENT_UNDERFLOW, Fault.PRECISION, model_evidence.rounded_away),
    _seen(Cause.UNSCALED_DATA, Fault.UNSCALED_TARGETS, policy_evidence.large_rewards),
    # concluded
    EvidenceRule(Cause.NO_LEARNING, 1.5, output_evidence.distance_of_shares, fault=Fault.WRONG_LOSS),
    EvidenceRule(Cause.NO_LEARNING, 1.3, output_evidence.content_rivals, fault=Fault.WRONG_LOSS),
    EvidenceRule(Cause.NO_LEARNING, 1.3, policy_evidence.falling_reward, fault=Fault.WRONG_LOSS),
    EvidenceRule(Cause.NO_LEARNING, 1.3, policy_evidence.uniform_policy, fault=Fault.REGULARISATION_TOO_STRONG),
    EvidenceRule(Cause.ZERO_GRADIENT, 1.3, policy_evidence.no_signal),
    EvidenceRule(Cause.VANISHING_GRADIENT, 1.3, graph_evidence.starved_layers),
    EvidenceRule(Cause.VANISHING_GRADIENT, 1.05, graph_evidence.fading),
    EvidenceRule(Cause.LEARNING_RATE_TOO_LOW, 1.2, graph_evidence.slow_layers),
    EvidenceRule(Cause.SATURATION, 1.2, graph_evidence.sharp_softmax),
    EvidenceRule(Cause.POOR_INITIALISATION, 1.1, graph_evidence.high_first_loss),
    EvidenceRule(Cause.LEARNING_RATE_TOO_HIGH, 1.0, step_size_evidence.died),
    EvidenceRule(Cause.EXPLODING_GRADIENT, 1.3, graph_evidence.infinite_at_once),
    EvidenceRule(Cause.EXPLODING_GRADIENT, 1.1, graph_evidence.far_above),
    EvidenceRule(Cause.BATCH_SIZE_UNFIT, 1.0, policy_evidence.single_visits),
    EvidenceRule(Cause.POOR_INITIALISATION, 1.6, model_evidence.unusual_gains),
    EvidenceRule(Cause.EXPLODING_GRADIENT, 1.3, graph_evidence.loud_start),
    EvidenceRule(Cause.EXPLODING_GRADIENT, 1.1, graph_evidence.loud_gradients),
    EvidenceRule(Cause.NO_LEARNING, 1.2, output_evidence.contracted, fault=Fault.WRONG_LOSS),
    EvidenceRule(Cause.UNSCALED_DATA, 1.0, output_evidence.far_from_outputs, fault=Fault.UNSCALED_TARGETS),
    EvidenceRule(Cause.UNSCALED_DATA, 1.5, data_evidence.tiny_targets, fault=Fault.UNSCALED_TARGETS),
    EvidenceRule(Cause.UNSCALED_DATA, 1.4, data_evidence.wide_targets, fault=Fault.UNSCALED_TARGETS),
    EvidenceRule(Cause.NO_LEARNING, 1.3, output_evidence.faint_outputs, fault=Fault.OUTPUT_INDEPENDENT_OF_INPUT),
    EvidenceRule(Cause.ZERO_GRADIENT, 1.2, graph_evidence.cut_graph),
    EvidenceRule(Cause.NO_LEARNING, 1.3, output_evidence.idle_term, fault=Fault.REGULARISATION_TOO_STRONG),
    EvidenceRule(Cause.BATCH_SIZE_UNFIT, 1.5, batch_evidence.small_normed_batch),
    EvidenceRule(Cause.UNSCALED_DATA, 1.2, data_evidence.raw_inputs),
    EvidenceRule(Cause.ENTROPY_COLLAPSE, 1.5, policy_evidence.certain_policy),
    EvidenceRule(Cause.BATCH_SIZE_UNFIT, 1.5, batch_evidence.tiny_batch),
    EvidenceRule(Cause.POOR_INITIALISATION, 1.2, model_evidence.large_biases),
    EvidenceRule(Cause.LEARNING_RATE_TOO_HIGH, 1.0, data_evidence.collapsed),
    EvidenceRule(Cause.LEARNING_RATE_TOO_HIGH, 1.0, data_evidence.ended_above_start),
    EvidenceRule(Cause.LEARNING_RATE_TOO_LOW, 1.2, data_evidence.small_updates),
    EvidenceRule(Cause.NO_LEARNING, 1.4, output_evidence.out_of_reach, fault=Fault.WRONG_LOSS),
    EvidenceRule(Cause.NO_LEARNING, 1.4, output_evidence.negative_loss, fault=Fault.WRONG_LOSS),
    EvidenceRule(Cause.NO_LEARNING, 1.4, output_evidence.below_zero, fault=Fault.WRONG_LOSS),
    EvidenceRule(Cause.NO_LEARNING, 1.2, data_evidence.numbered_classes, fault=Fault.WRONG_LOSS),
    EvidenceRule(Cause.NO_LEARNING, 1.2, output_evidence.collapsed_outputs, fault=Fault.OUTPUT_INDEPENDENT_OF_INPUT),
    EvidenceRule(Cause.SUSPICIOUS_PERFECTION, 1.2, data_evidence.leaked_target, fault=Fault.TARGET_LEAK),
    EvidenceRule(Cause.NO_LEARNING, 1.1, model_evidence.mostly_frozen, fault=Fault.FROZEN_PARAMETERS),
    EvidenceRule(Cause.NO_LEARNING, 1.05, model_evidence.frozen_head, fault=Fault.FROZEN_PARAMETERS),
    EvidenceRule(Cause.NO_LEARNING, 1.0, data_evidence.unrelated_targets, fault=Fault.LABELS_SHUFFLED),
)
"""Rules that name the particular fault. They count when a diagnosis is asked for, not for reports during a run."""

# What a fact rules out, whatever speaks for it.
REFUTED: dict[Cause, EvidenceTest] = {
    Cause.LEARNING_RATE_TOO_HIGH: learning_evidence.hardly_moves,
    Cause.MISSING_ZERO_GRAD: learning_evidence.clears,
}

_VAGUE = (Cause.NO_LEARNING.value, "")
_ENOUGH, _INCIDENT, _FORGIVEN = 1.0, 1.2, 0.5


def rank(facts: Facts, *, live: bool = False) -> tuple[Diagnosis, ...]:
    """Every cause with enough against it, else what can be said of a run without one.

    Args:
        facts: what is known about the run.
        live: the run is under way and nobody has asked: leave out rules that need the whole run.
    """
    book = _Book()
    for name, seen in facts.incidents.items():
        book.since[name] = seen.first
        book.count(Cause(name), None, _INCIDENT + 0.1 * min(math.log2(seen.count), 5.0), told(seen), blames=True)
    for rule in EVIDENCE_RULES if live else (*EVIDENCE_RULES, *FAULT_RULES):
        text = rule.sign(facts)
        if text:
            weight = rule.weight * (_FORGIVEN if rule.forgivable and facts.going_well else 1.0)
            book.count(rule.cause, rule.fault, weight, text, blames=not rule.level, certain=rule.certain)
    for cause, refutes in REFUTED.items():
        if refutes(facts):
            book.drop(cause)
    return tuple(
        Diagnosis(cause=cause, fault=fault, evidence=evidence, advice=_advice(Cause(cause), fault, facts))
        for cause, fault, evidence in book.named()
    ) or (conclude_from_curve(facts, live=live),)


def proven(facts: Facts) -> frozenset[tuple[str, str]]:
    """Cause and fault of all that was seen as it is: no experiment can refute it."""
    certain = [rule for rule in (*EVIDENCE_RULES, *FAULT_RULES) if rule.certain and rule.sign(facts)]
    idle = [(Cause.ZERO_GRADIENT.value, "")] if learning_evidence.idle(facts) else []
    return frozenset([*((rule.cause.value, str(rule.fault or "")) for rule in certain), *idle])


@final
class _Book:
    """Weights and evidence by cause and fault."""

    def __init__(self) -> None:
        self.since: dict[str, int] = {}
        """The step of the first incident of each cause."""
        self._scores: dict[tuple[str, str], float] = {}
        self._evidence: dict[tuple[str, str], dict[str, str]] = {}
        self._blamed: set[tuple[str, str]] = set()
        self._certain: set[tuple[str, str]] = set()

    def count(
        self, cause: Cause, fault: Fault | None, weight: float, text: str, *, blames: bool, certain: bool = False
    ) -> None:
        """One piece of evidence."""
        key = cause.value, "" if fault is None else fault.value
        self._scores[key] = self._scores.get(key, 0.0) + weight
        # the same thing only once
        self._evidence.setdefault(key, {}).setdefault(text.rpartition(",")[0] or text, text)
        self._blamed |= {key} if blames else set()
        self._certain |= {key} if certain else set()

    def drop(self, cause: Cause) -> None:
        """Something rules it out."""
        self._scores = {key: score for key, score in self._scores.items() if key[0] != cause}

    def named(self) -> list[tuple[str, str, str]]:
        """Cause, fault and evidence where there is enough: what was seen, other causes, consequences."""
        named = [key for key, score in self._scores.items() if score >= _ENOUGH and key in self._blamed]
        forced = self._effects(named, EXPLAINED)
        effects = self._effects(named, CONSEQUENCES)
        named.sort(key=lambda k: (k == _VAGUE, k in forced, k not in self._certain, k in effects, -self._scores[k]))
        return [(*key, "; ".join(self._evidence[key].values())) for key in named]

    def _effects(self, named: Sequence[tuple[str, str]], table: Mapping[str, set[str]]) -> set[tuple[str, str]]:
        """What another one of them accounts for, unless that came later."""
        return {
            effect
            for effect in named
            for by in named
            if _name(effect) in table.get(_name(by), ()) and not self._is_later(_name(by), _name(effect))
        }

    def _is_later(self, cause: str, effect: str) -> bool:
        return effect in self.since and self.since.get(cause, -1) > self.since[effect]


def _name(key: tuple[str, str]) -> str:
    return key[1] or key[0]


def _advice(cause: Cause, fault: str, facts: Facts) -> str:
    done = facts.done.get(cause)
    if done is None:
        return advise(cause, facts.setup, fault=fault)
    return advise(cause, facts.setup, done.plan, earlier=frozenset(done.actions), fault=fault)
