"""What one trial, or two of them, say: whether it learns, whether it is better, and what that means."""

import math

from steadystep.diagnosis.advice import ADVICE
from steadystep.diagnosis.causes import Cause, Fault
from steadystep.diagnosis.facts import names
from steadystep.examination.answers import Answers
from steadystep.examination.observation import Observation, trivial_loss
from steadystep.examination.repairs import Repair
from steadystep.examination.workbench import Trial
from steadystep.records import Diagnosis

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


def collapsed(o: Observation, base: Trial, fresh: Trial) -> Diagnosis | None:
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
