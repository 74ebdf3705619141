"""The learning rate as it was asked for, as far as the log tells: without what the guard and faults did to it."""

import numpy as np
from numpy.typing import NDArray

from steadystep.track.run import Run

_HELD = 200  # steps after a serious incident in which the guard may hold the learning rate down and lift it again
_ROUNDING = 1e-9
_LEAP = 3.0  # times the step before: no schedule rises like that, once it has begun
_GRADUAL = 0.8  # of a warm-up's rise at most is in one step


def finite_rates(run: Run) -> NDArray[np.float64]:
    """All that were logged."""
    return run.lr.values[np.isfinite(run.lr.values)]


@np.errstate(all="ignore")
def asked_rates(run: Run) -> tuple[NDArray[np.float64], float]:
    """The curve without changes around incidents and without leaps, and the share of the changes left out."""
    known = np.isfinite(run.lr.values) & (run.lr.values > 0)
    steps, rates = run.lr.steps[known], run.lr.values[known]
    if len(rates) < 2:
        return rates, 0.0
    change = np.diff(np.log(rates))
    held = np.zeros(len(change), dtype=bool)
    for incident in run.incidents:
        if incident.severity in ("act", "critical") or not incident.stepped:
            first, last = np.searchsorted(steps[1:], (incident.step, incident.step + _HELD))
            if np.any(np.abs(change[first:last]) > _ROUNDING):  # a refused update alone leaves the rate as it is
                held[first:last] = True
    leapt = False
    for at in np.flatnonzero(~held & (np.abs(change) > np.log(_LEAP))):
        if change[at] > 0 and at > 0:
            held[at] = leapt = True
        elif change[at] < 0 and leapt:
            held[at], leapt = True, False
    change[held] = 0.0
    return rates[0] * np.exp(np.concatenate(([0.0], np.cumsum(change)))), float(held.mean())


def warmup_end(rates: NDArray[np.float64]) -> int | None:
    """Where the rise at the beginning ends; None when there is none, or when it is one leap."""
    rises = np.diff(rates)
    leaps = np.flatnonzero(rates[2:] > _LEAP * np.maximum(rates[1:-1], 1e-300)) + 2
    falls = np.flatnonzero(rises < -1e-6 * np.abs(rates[:-1])) + 1
    end = min(len(rates), *(int(at[0]) for at in (leaps, falls) if len(at)), len(rates))
    top = int(np.argmax(rates[:end]))
    rise = rates[top] - rates[0]
    if top < 2 or rates[0] >= 0.5 * rates[top] or rises[:top].max() > _GRADUAL * rise:
        return None
    return top
