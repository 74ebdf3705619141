"""What single passes make suspect, and what one trial, or two of them, say."""

import math
from collections.abc import Iterator

from steadystep.diagnosis.advice import ADVICE
from steadystep.diagnosis.causes import Cause, Fault
from steadystep.diagnosis.facts import names
from steadystep.examination.observation import Observation, targets_of, trivial_loss
from steadystep.examination.output_checks import no_learning
from steadystep.examination.pairing import Answers
from steadystep.examination.repairs import Repair
from steadystep.examination.workbench import Trial
from steadystep.records import Diagnosis
from steadystep.signals.loss_calls import DISTANCES
from steadystep.signals.losses import INNER_SOFTMAX, mistakes

_WELL = 0.1  # of the first loss, in one trial
_BELOW = 0.95  # of the loss of the best constant
_COLLAPSED = 0.02


def learns_well(trial: Trial, trivial: float | None) -> bool:
    """The loss of batches that it did not train on falls by a tenth, and below that of the best constant."""
    return trial.learns and trial.gain > _WELL and (trivial is None or trial.end < _BELOW * trivial)


def no_targets(free: Answers) -> Diagnosis:
    """The loss itself does not ask for the targets."""
    return Diagnosis(
        cause=Cause.NO_LEARNING,
        fault=Fault.WRONG_LOSS,
        evidence=f"with free outputs the loss of a batch falls from {free.first:.4g} to {free.best:.4g}, "
        f"and to {free.best_turned:.4g} with the targets of other samples: it does not ask for the right ones",
        advice="look for what outputs can do instead: a variance without its logarithm, a weight that they set",
    )


def outputs_collapse(o: Observation, base: Trial, fresh: Trial) -> Diagnosis | None:
    """Outputs that become the same for every input, with a loss that is content with that."""
    if o.spread is None or o.spread_fresh is None or o.passes[0].targets or trivial_loss(o) is not None:
        return None
    now = o.spread < _COLLAPSED and base.start < 0.5 * fresh.start
    soon = base.at_end is not None and base.at_end < _COLLAPSED and base.gain > 0.5
    if not (now or soon) or not o.spread_fresh > 10.0 * _COLLAPSED:
        return None
    return Diagnosis(
        cause=Cause.NO_LEARNING,
        fault=Fault.OUTPUT_INDEPENDENT_OF_INPUT,
        evidence=f"the outputs become the same for every input, and the loss is content with that; {base}",
        advice="the loss lacks a term that keeps outputs apart: negatives, a variance term, or a stop-gradient",
    )


def worn(o: Observation, base: Trial, fresh: Trial) -> Diagnosis:
    """The weights are to blame: newly drawn ones learn, with nothing else changed."""
    flat = [name for name, share in o.saturated.items() if share > 0.5]
    dead = [name for name, share in o.dead.items() if share > 0.9]
    equal = 2 * len(o.parameters.equal) >= len(o.parameters.sizes)  # biases are no matrices
    cause = Cause.SATURATION if flat else Cause.DEAD_UNITS if dead and not equal else Cause.POOR_INITIALISATION
    where = f"; most units of {names(flat or dead)} are {'saturated' if flat else 'zero'}" if flat or dead else ""
    return diagnosis(cause, f"{base}; {fresh}{where}")


def diagnosis(cause: Cause, evidence: str) -> Diagnosis:
    """With the usual advice."""
    return Diagnosis(cause=cause, evidence=evidence, advice=ADVICE[cause])


def is_better(trial: Trial, base: Trial, *others: Trial, margin: float, level: float = math.inf) -> bool:
    """It learns, and ends clearly below the present loss and below where the others end.

    Clearly: by a share of the present loss, or of `level` if that is less: a loss that takes no learning.
    """
    present = base.start if all(map(math.isfinite, base.before)) else math.inf
    limits = (present, base.end, *(other.end for other in others))
    least = margin * min(abs(present if math.isfinite(present) else trial.start), level)
    return trial.learns and trial.start - trial.end > least and all(trial.end < limit - least for limit in limits)


def repaired_by(repair: Repair, trial: Trial, base: Trial) -> Diagnosis:
    """With both trials as evidence."""
    return Diagnosis(cause=repair.cause, fault=repair.fault, evidence=f"{base}; {trial}", advice=repair.advice)


_TIMES, _FAR = 1e3, 20.0


def suspects(o: Observation) -> Iterator[Diagnosis]:
    """What cannot be meant, but is a fault only where the job is not known to learn well."""
    for fault, what in mistakes((), (), o.passes[0].softmaxes, o.passes[0].num_samples):
        if fault == INNER_SOFTMAX:
            advice = "take the softmax over the dimension that has the things to choose from"
            yield no_learning(Fault.SOFTMAX_AXIS, what, advice)
            break
    if o.ignored and not o.is_graph:
        what = f"the loss stays the same whatever {', '.join(o.ignored)} of the batch is, also with newly drawn weights"
        advice = "follow that input through the loss: something overwrites it, cuts it off or multiplies it by zero"
        yield no_learning(Fault.OUTPUT_INDEPENDENT_OF_INPUT, what, advice)
    yield from _drowned(o)
    call, targets = o.calls[0] if o.calls else None, targets_of(o)
    made = None if call is None else call.origin
    if call is None or made is None or targets is None or call.name not in DISTANCES or made.name != "softmax":
        return
    if bool(((targets == 0) | (targets == 1)).all()):  # sync: examined
        what = f"the loss is {call.name} between a softmax and labels, and its gradient vanishes where it is wrong"
        yield no_learning(Fault.WRONG_LOSS, what, "use cross_entropy, on logits")


def _drowned(o: Observation) -> Iterator[Diagnosis]:
    """A term of the loss beside one that is a thousand times as large, for targets of that scale."""
    terms = [(c.value, c) for c in o.calls if c.value is not None and c.value > 0.0 and c.target is not None]
    if len(terms) < 2 or o.is_adversarial:
        return
    (least, small), (most, large) = min(terms, key=lambda t: t[0]), max(terms, key=lambda t: t[0])
    size = float(large.target.float().square().mean().sqrt()) if large.target is not None else 0.0  # sync: examined
    if large.name in DISTANCES and most > _TIMES * least and size > _FAR:
        what = f"{large.name} with targets of size {size:.3g} is {most:.3g}, beside {small.name} of {least:.3g}"
        yield Diagnosis(
            cause=Cause.UNSCALED_DATA,
            fault=Fault.UNSCALED_TARGETS,
            evidence=f"{what}: nothing else in the loss counts",
            advice="standardize these targets, so that all terms of the loss are of the same order",
        )
