"""How far the trouble reached: the response is chosen by this."""

import math

from steadystep.records import Damage, Finding, Signals, Witness

# Refused updates in a row from which bad data alone becomes unlikely.
_IN_A_ROW = 2
# What a healthy run may lose on an old batch: forgetting and rounding.
_FORGIVEN = 0.02


def reach(signals: Signals, findings: tuple[Finding, ...]) -> Damage:
    """What the findings claim; a witness may overrule the claim that the weights are damaged."""
    asked = {f.detector for f in findings if f.severity in ("act", "critical")}
    stuck = signals.refused_in_a_row >= _IN_A_ROW and signals.input_finite is not False
    critical = any(f.severity == "critical" for f in findings)
    if ("not-healing" in asked or (stuck and critical)) and not acquitted(signals):
        return Damage.WEIGHTS
    if "slow-divergence" in asked and not unmoved(signals):
        return Damage.WEIGHTS
    return Damage.MOMENTS if "poisoned-moments" in asked else Damage.NONE


def acquitted(signals: Signals) -> bool:
    """A witness was heard, and says that the weights do not explain this loss."""
    return signals.witness is not None and not is_worse(signals.witness, signals.loss)


def unmoved(signals: Signals) -> bool:
    """A witness was heard, and is no worse than it was.

    For a loss that creeps: it has risen by less than batches differ, so the loss of this step is no measure for it.
    """
    witness = signals.witness
    return witness is not None and witness.now - witness.then <= _FORGIVEN * abs(witness.then)


def is_worse(witness: Witness, loss: float) -> bool:
    """True when the old batch has become worse by an amount that can explain `loss`.

    Damaged weights are bad on any batch, so the old one must show a good part of the elevation: half of it. The batch
    of this step may be an outlier by itself, and must not hide a loss that has doubled: then a twentieth is enough.
    """
    then, now = witness.then, witness.now
    if not (math.isfinite(then) and math.isfinite(now)):
        return True
    size = abs(then)
    elevation = loss - then
    # why: with a loss of NaN there is no elevation to compare with; weights that cause it do at least twice as badly
    share = min(elevation / 2, max(size, elevation / 20)) if math.isfinite(elevation) else size
    return now - then > max(_FORGIVEN * size, share)
