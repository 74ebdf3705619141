"""How far the trouble reached: the response is chosen by this."""

import math

from steadystep.records import GRAVE, Counterfactual, Damage, DetectorName, Finding, Signals

# Refused updates in a row from which bad data alone becomes unlikely.
_IN_A_ROW = 2


# What older weights may do better on one batch by chance.
_FORGIVEN = 0.02


def reach(signals: Signals, findings: tuple[Finding, ...]) -> Damage:
    """What the findings claim. Weights are damaged where that is certain, or where older ones do better."""
    asked = {f.detector for f in findings if f.severity in GRAVE}
    if asked & {DetectorName.ODD_REPLICA, DetectorName.WEIGHT_JUMP, DetectorName.EARLY_DIVERGENCE}:
        return Damage.WEIGHTS
    stuck = signals.refused_in_a_row >= _IN_A_ROW and signals.input_finite is not False
    stuck = stuck and any(f.severity == "critical" for f in findings)
    accused = bool(asked & {DetectorName.NOT_HEALING, DetectorName.SLOW_DIVERGENCE}) or stuck
    if accused and signals.counterfactual is not None and is_worse(signals.counterfactual):
        return Damage.WEIGHTS
    # why: nothing could be run again, but weights that jumped and give nothing finite since are not the data's doing
    if stuck and signals.counterfactual is None and any(f.detector == DetectorName.WEIGHT_JUMP for f in findings):
        return Damage.WEIGHTS
    return Damage.MOMENTS if asked & {DetectorName.POISONED_MOMENTS, DetectorName.DAMAGED_STATE} else Damage.NONE


def is_cleared(signals: Signals) -> bool:
    """Older weights were tried on this batch, and do no better."""
    return signals.counterfactual is not None and not is_worse(signals.counterfactual)


def is_worse(counterfactual: Counterfactual) -> bool:
    """True when the present weights do worse than the older ones by more than chance.

    A batch that is not finite under older weights either is the data's fault.
    """
    if not math.isfinite(counterfactual.old_loss):
        return False
    return not counterfactual.current_loss - counterfactual.old_loss <= _FORGIVEN * abs(counterfactual.old_loss)
