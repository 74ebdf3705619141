"""What else may be wrong with a run whose first diagnosis was concluded, not seen: causes that look alike.

A candidate has no evidence of its own. It comes after the causes that have some, where nothing that is known about the
run rules it out, and never for a healthy run.
"""

from collections.abc import Callable, Iterator, Sequence

from steadystep.diagnosis.advice import advise
from steadystep.diagnosis.causes import Cause, Fault
from steadystep.diagnosis.facts import Facts
from steadystep.diagnosis.learning import has_learned, is_judged, raw_inputs_of, supervised
from steadystep.diagnosis.ranking import proven
from steadystep.diagnosis.step_size_evidence import has_halved
from steadystep.records import DetectorName, Diagnosis

NOT_RULED_OUT = "not ruled out"
"""How the evidence of a candidate begins."""
_MOST = 3
_NOTICEABLE, _SMALL = 3e-3, 3e-3  # of the weights, per update

_ALIKE: dict[str, tuple[str, ...]] = {
    Fault.LABELS_SHUFFLED: (Fault.OUTPUT_INDEPENDENT_OF_INPUT, Cause.VANISHING_GRADIENT),
    Fault.OUTPUT_INDEPENDENT_OF_INPUT: (Cause.VANISHING_GRADIENT, Fault.LABELS_SHUFFLED),
    Cause.NO_LEARNING: (Fault.LABELS_SHUFFLED, Cause.LEARNING_RATE_TOO_LOW, Cause.VANISHING_GRADIENT),
    Fault.WRONG_LOSS: (Fault.LABELS_SHUFFLED, Fault.UNSCALED_TARGETS),
    Fault.REGULARISATION_TOO_STRONG: (Fault.WRONG_LOSS, Fault.UNSCALED_TARGETS),
    Fault.FROZEN_PARAMETERS: (Cause.ZERO_GRADIENT, Fault.WRONG_OPTIMIZER_PARAMS),
    Fault.UNSCALED_TARGETS: (Cause.LEARNING_RATE_TOO_LOW, Fault.WRONG_LOSS),
    Cause.ZERO_GRADIENT: (Fault.FROZEN_PARAMETERS, Fault.WRONG_LOSS),
    Cause.VANISHING_GRADIENT: (Cause.POOR_INITIALISATION, Cause.SATURATION),
    Cause.SATURATION: (Cause.POOR_INITIALISATION, Cause.UNSCALED_DATA),
    Cause.DEAD_UNITS: (Cause.LEARNING_RATE_TOO_HIGH, Cause.POOR_INITIALISATION),
    Cause.LEARNING_RATE_TOO_HIGH: (Cause.POOR_INITIALISATION, Cause.EXPLODING_GRADIENT, Cause.UNSCALED_DATA),
    Cause.LEARNING_RATE_TOO_LOW: (Cause.SCHEDULE_ERROR, Cause.VANISHING_GRADIENT),
    Cause.EXPLODING_GRADIENT: (Cause.POOR_INITIALISATION, Cause.LEARNING_RATE_TOO_HIGH),
    Cause.POOR_INITIALISATION: (Cause.EXPLODING_GRADIENT, Cause.LEARNING_RATE_TOO_HIGH),
    Cause.UNSCALED_DATA: (Cause.SATURATION, Cause.POOR_INITIALISATION),
    Cause.BATCH_SIZE_UNFIT: (Cause.LEARNING_RATE_TOO_HIGH, Fault.LABELS_SHUFFLED),
    Cause.OSCILLATION: (Cause.LEARNING_RATE_TOO_HIGH, Cause.BATCH_SIZE_UNFIT),
    Cause.NON_FINITE_GRADIENT: (Cause.EXPLODING_GRADIENT, Cause.LEARNING_RATE_TOO_HIGH),
    Cause.NON_FINITE_LOSS: (Cause.EXPLODING_GRADIENT, Cause.LEARNING_RATE_TOO_HIGH),
    Cause.POLICY_DRIFT: (Cause.ENTROPY_COLLAPSE, Fault.WRONG_LOSS),
    Cause.ENTROPY_COLLAPSE: (Cause.POLICY_DRIFT, Fault.WRONG_LOSS),
}
"""By cause or fault: what gives the same curves and outputs, the likeliest first."""


def with_candidates(found: Sequence[Diagnosis], facts: Facts) -> tuple[Diagnosis, ...]:
    """The causes with evidence, and up to three in all where the first of them was concluded."""
    first = found[0]
    if first.cause in (Cause.HEALTHY, Cause.UNKNOWN) or len(found) >= _MOST:
        return tuple(found)
    if (first.cause, first.fault) in proven(facts):
        return tuple(found)
    return (*found, *_others(found, facts))[:_MOST]


def _others(found: Sequence[Diagnosis], facts: Facts) -> Iterator[Diagnosis]:
    named = {one.fault or one.cause for one in found}
    for one in found:
        for name in _ALIKE.get(one.fault or one.cause, ()):
            possible = _POSSIBLE.get(name)
            if name in named or (possible is not None and not possible(facts)):
                continue
            named.add(name)
            yield _candidate(name, one, facts)


def _candidate(name: str, like: Diagnosis, facts: Facts) -> Diagnosis:
    cause, fault = (Cause(name), "") if name in set(Cause) else (_CAUSE_OF.get(Fault(name), Cause.NO_LEARNING), name)
    return Diagnosis(
        cause=cause.value,
        fault=fault,
        evidence=f"{NOT_RULED_OUT}: {name} would look like {like.fault or like.cause}",
        advice=advise(cause, facts.setup, fault=fault),
    )


_CAUSE_OF = {Fault.UNSCALED_TARGETS: Cause.UNSCALED_DATA, Fault.FROZEN_PARAMETERS: Cause.ZERO_GRADIENT}


def _is_large(facts: Facts) -> bool:
    ratio = max(facts.ratios, default=None)
    return ratio is None or ratio >= _NOTICEABLE


def _is_small(facts: Facts) -> bool:
    return facts.ratio is None or facts.ratio < _SMALL


def _has_raw_inputs(facts: Facts) -> bool:
    inputs = raw_inputs_of(facts)
    return inputs is None or max(abs(inputs.mean), inputs.std) > 5.0


def _has_known_target(facts: Facts) -> bool:
    return supervised(facts) or not facts.measured.outputs.count


_POSSIBLE: dict[str, Callable[[Facts], bool]] = {
    Cause.LEARNING_RATE_TOO_HIGH: _is_large,
    Cause.LEARNING_RATE_TOO_LOW: _is_small,
    Cause.UNSCALED_DATA: _has_raw_inputs,
    Cause.EXPLODING_GRADIENT: lambda facts: not has_halved(facts),
    Cause.SATURATION: lambda facts: facts.probe is None or max(facts.probe.saturated, default=0.0) > 0.2,
    Cause.SCHEDULE_ERROR: lambda facts: bool(facts.structure.announced) or not facts.structure.trained,
    Fault.LABELS_SHUFFLED: lambda facts: is_judged(facts) and not has_learned(facts),
    Fault.OUTPUT_INDEPENDENT_OF_INPUT: lambda facts: not has_learned(facts),
    Fault.FROZEN_PARAMETERS: lambda facts: bool(facts.structure.frozen or facts.measured.untouched(facts.structure)),
    Fault.UNSCALED_TARGETS: lambda facts: DetectorName.CLIP_RATE in facts.warned or _has_known_target(facts),
}
"""What has to be so for a candidate to be consistent with the run; the others always are."""
