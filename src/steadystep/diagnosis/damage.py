"""How far the trouble reached: the response is chosen by this."""

import math

from steadystep.records import Damage, Finding, Signals, Witness

# Refused updates in a row from which bad data alone becomes unlikely.
_IN_A_ROW = 2
# What older weights may do better on one batch by chance.
_FORGIVEN = 0.02


def reach(signals: Signals, findings: tuple[Finding, ...]) -> Damage:
    """What the findings claim. Weights are damaged where that is certain, or where older ones do better."""
    asked = {f.detector for f in findings if f.severity in ("act", "critical")}
    if asked & {"odd-replica", "weight-jump", "early-divergence"}:
        return Damage.WEIGHTS
    stuck = signals.refused_in_a_row >= _IN_A_ROW and signals.input_finite is not False
    stuck = stuck and any(f.severity == "critical" for f in findings)
    accused = bool(asked & {"not-healing", "slow-divergence"}) or stuck
    if accused and signals.witness is not None and is_worse(signals.witness):
        return Damage.WEIGHTS
    # why: nothing could be run again, but weights that jumped and give nothing finite since are not the data's doing
    if stuck and signals.witness is None and any(f.detector == "weight-jump" for f in findings):
        return Damage.WEIGHTS
    return Damage.MOMENTS if asked & {"poisoned-moments", "damaged-state"} else Damage.NONE


def acquitted(signals: Signals) -> bool:
    """Older weights were tried on this batch, and do no better."""
    return signals.witness is not None and not is_worse(signals.witness)


def is_worse(witness: Witness) -> bool:
    """True when the present weights do worse than the older ones by more than chance.

    A batch that is not finite under older weights either is the data's fault.
    """
    if not math.isfinite(witness.then):
        return False
    return not witness.now - witness.then <= _FORGIVEN * abs(witness.then)
