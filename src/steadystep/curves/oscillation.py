"""A loss that swings instead of coming down: much of its variance lies at one frequency, or it jumps to and fro."""

import numpy as np

from steadystep.curves.curve import Curve
from steadystep.curves.cycles import cycle
from steadystep.curves.reading import Pattern

_FEWEST = 48  # rates
_LARGE = 0.12

_ADVICE = "lower the learning rate (try a third) or the momentum, or use larger batches"
_PLANNED = "nothing, if the cycles of the learning rate are meant"


def oscillation(curve: Curve) -> list[Pattern]:
    """At most one."""
    found = curve.swing
    if found is None or curve.signed:
        return []
    period, swing = found
    begin = len(curve) // 4
    level = float(np.median(curve.values[begin:]))
    way = curve.progress
    every = max(1, int(np.median(np.diff(curve.steps))))
    step = int(curve.steps[begin])
    evidence = (
        f"from step {step} on the {curve.name} swings by {swing:.3g} around {level:.4g}, once every "
        f"{period * every:.3g} steps"
    )
    if _follows_rate(curve, period * every):
        return [_pattern("oscillation", False, step, f"{evidence}, as the learning rate does", _PLANNED)]
    return [_pattern("oscillation", swing > _LARGE * max(abs(level), 0.5 * way), step, evidence, _ADVICE)]


def _follows_rate(curve: Curve, steps: float) -> bool:
    """The learning rate goes up and down as often."""
    rates = curve.run.lr.values
    rates = rates[np.isfinite(rates)]
    if len(rates) < _FEWEST or rates.max() < 1.5 * rates.min():
        return False
    found = cycle(rates)
    if found is None:
        return False
    every = max(1, int(np.median(np.diff(curve.run.lr.steps))))
    return 0.7 < found[0] * every / steps < 1.4


def _pattern(kind: str, loud: bool, step: int, evidence: str, advice: str) -> Pattern:
    return Pattern(kind=kind, severity="warn" if loud else "info", step=step, evidence=evidence, advice=advice)
