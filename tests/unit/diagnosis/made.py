"""Facts of runs that were never trained: each test sets what it is about."""

from collections.abc import Sequence
from typing import Any

from steadystep.diagnosis.facts import Facts, LossCurve, Occurrences
from steadystep.diagnosis.run_history import Trace
from steadystep.records import Finding, Severity

CALM: dict[str, Any] = {
    "start": 2.0,
    "best": 2.0,
    "late": 2.0,
    "noise": 0.0,
    "settled": True,
    "lowest": 2.0,
    "highest": 2.0,
}


def curve(**changes: Any) -> LossCurve:
    """A loss of 2 that never moves, but for `changes`."""
    return LossCurve(**CALM | changes)


def trace(
    losses: Sequence[float], *, norms: Sequence[float] | None = None, lrs: Sequence[float] | None = None
) -> Trace:
    """One update per loss, from step 0."""
    made = Trace()
    for step, loss in enumerate(losses):
        if made.due():
            made.add(step, loss, 1.0 if norms is None else norms[step], 1e-3 if lrs is None else lrs[step])
    return made


def facts(losses: Sequence[float] = (2.0,) * 256, **changes: Any) -> Facts:
    """A run with these losses in which nothing was found, but for `changes`; `norms` and `lrs` go to the trace."""
    made = trace(losses, norms=changes.pop("norms", None), lrs=changes.pop("lrs", None))
    plain: dict[str, Any] = {
        "trace": made,
        "curve": LossCurve.read(made.first, made.losses),
        "incidents": {},
        "warned": {},
        "noted": {},
        "ratios": (),
        "highest_ratio": 0.0,
        "first_probe": None,
        "probe": None,
        "inputs": None,
        "scaled": False,
    }
    return Facts(**plain | changes)


def finding(detector: str = "mine", severity: Severity = "warn", **more: Any) -> Finding:
    """One finding with a clause of its own."""
    plain = {"step": 100, "value": 1.0, "limit": 0.5, "what": f"something about {detector}"}
    return Finding(detector=detector, severity=severity, **plain | more)


def tally(*found: Finding) -> Occurrences:
    """These findings, counted."""
    made = Occurrences(found[0].step)
    for each in found:
        made.add(each)
    return made


def tallies(*detectors: str, times: int = 1) -> dict[str, Occurrences]:
    """One or more findings of each detector."""
    return {detector: tally(*[finding(detector)] * times) for detector in detectors}
