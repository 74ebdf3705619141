"""The proof that an earlier policy earns more than the current one: two samples of rollouts, equal random numbers."""

import math
from collections.abc import Generator, Sequence
from dataclasses import replace
from statistics import fmean, stdev
from typing import Any

from steadystep.engine.verdict import Ask, State
from steadystep.records import Counterfactual, Signals

ROLLOUTS = 8
_CERTAIN = 3.0  # standard errors
_APART = 100_003  # between the seeds of two samples

Scores = Sequence[Sequence[float]]


def earns_more(old: Sequence[float], current: Sequence[float]) -> bool:
    """Whether the old policy earns more than the current one, by more than chance.

    >>> earns_more([1.0, 0.9, 1.0, 0.8, 1.0, 0.9, 1.0, 1.0], [0.2, 0.1, 0.4, 0.2, 0.3, 0.2, 0.9, 0.1])
    True
    >>> earns_more([1.0, 0.0, 1.0, 0.0, 1.0, 0.0, 1.0, 1.0], [0.2, 0.1, 0.4, 0.2, 0.3, 0.2, 0.9, 0.1])
    False
    """
    better = [a - b for a, b in zip(old, current, strict=True)]
    error = stdev(better) / math.sqrt(len(better))
    mean = fmean(better)
    agree = sum(value < 0.0 for value in better) <= len(better) // ROLLOUTS
    return agree and mean > 0.0 and mean >= _CERTAIN * error and mean > 0.02 * abs(fmean(current))


def better_state(signals: Signals, states: Sequence[State]) -> Generator[Ask, Any, Counterfactual | None]:
    """The state whose policy earns most, if it earns more than the current one in two samples."""
    first: Scores | None = (yield Ask("scores", states=states, count=signals.step)) if states else None
    if first is None:
        return None
    current, *olds = first
    better = [(fmean(old), i) for i, old in enumerate(olds) if earns_more(old, current)]
    if not better:
        return None
    best = states[max(better)[1]]
    again: Scores | None = yield Ask("scores", states=[best], count=signals.step + _APART)
    if again is None or not earns_more(again[1], again[0]):
        return None
    old, now = -fmean(again[1]), -fmean(again[0])
    tried = Counterfactual(step=best.step, old_loss=old, current_loss=now, lr=best.lr, batches=len(again[0]))
    return replace(tried, rollouts=True)
