"""Rollouts as proof: a rollback of a policy pays where an earlier one earns more, in pairs with equal random numbers.

The loss of a policy says nothing about what it earns, so batches cannot tell. What earns more does so in eight pairs,
and again in eight with other random numbers: the first eight chose it.
"""

import math
import random
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, stdev
from typing import Any, final

import numpy as np
import torch

from steadystep._utils.rng import random_numbers_kept
from steadystep.engine.verdict import Ask, State
from steadystep.records import Counterfactual, DetectorName, Finding, Signals
from steadystep.rl.controls import Controls
from steadystep.snapshots.buffers import Buffers
from steadystep.snapshots.recovery import Recovery

OF_A_POLICY = frozenset(
    {
        *(DetectorName.ENTROPY_COLLAPSE, DetectorName.KL_BLOW_UP, DetectorName.POLICY_MISMATCH),
        *(DetectorName.RATIO_EXPLOSION, DetectorName.REWARD_COLLAPSE, DetectorName.REWARD_HACKING),
        DetectorName.VALUE_DIVERGENCE,
    }
)
_ROLLOUTS = 8
_CERTAIN = 3.0  # standard errors
_APART = 100_003  # between the seeds of two samples

Scores = Sequence[Sequence[float]]


@final
@dataclass(slots=True)
class Rollouts:
    """Plays the policy under the current weights and under those of earlier states; nothing stays changed by it."""

    recovery: Recovery
    buffers: Buffers
    device: torch.device
    alone: bool
    """One process: others would have to play along."""
    controls: Controls | None = None

    def scores(self, states: Sequence[Any], seed: int) -> list[list[float]] | None:
        """What each earns in eight rollouts, the current weights first; None where it cannot be told."""
        evaluate = None if self.controls is None else self.controls.evaluate
        if evaluate is None or not self.alone:
            return None
        try:
            played = [[self._play(evaluate, seed + i) for i in range(_ROLLOUTS)]]
            for state in states:
                with self.recovery.weights_of(state):
                    played.append([self._play(evaluate, seed + i) for i in range(_ROLLOUTS)])
        except Exception:  # the user's code, run at a time they did not expect: whatever it raises means "cannot be"
            return None
        return played if all(math.isfinite(score) for scores in played for score in scores) else None

    def _play(self, evaluate: Any, seed: int) -> float:
        with torch.no_grad(), self.buffers.untouched(), random_numbers_kept(self.device):
            torch.manual_seed(seed)
            random.seed(seed)
            np.random.seed(seed % 2**32)
            return float(evaluate())


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
    agree = sum(value < 0.0 for value in better) <= len(better) // _ROLLOUTS
    return agree and mean > 0.0 and mean >= _CERTAIN * error and mean > 0.02 * abs(fmean(current))


def played(
    signals: Signals, found: tuple[Finding, ...], states: Sequence[State]
) -> Generator[Ask, Any, tuple[Signals, tuple[Finding, ...]]]:
    """A warning about a policy is acted upon where rollouts prove one of `states` better."""
    loud = next((f for f in found if f.detector in OF_A_POLICY and f.severity == "warn"), None)
    known = [state for state in states if state.step >= 0]
    if loud is None or not known or signals.counterfactual is not None:
        return signals, found
    first: Scores | None = yield Ask("scores", states=known, count=signals.step)
    if first is None:
        return signals, found
    current, *olds = first
    better = [(fmean(old), i) for i, old in enumerate(olds) if earns_more(old, current)]
    if not better:
        return signals, found
    best = known[max(better)[1]]
    again: Scores | None = yield Ask("scores", states=[best], count=signals.step + _APART)
    if again is None or not earns_more(again[1], again[0]):
        return signals, found
    tried = Counterfactual(
        step=best.step,
        old_loss=-fmean(again[1]),
        current_loss=-fmean(again[0]),
        lr=best.lr,
        batches=len(again[0]),
        rollouts=True,
    )
    acted = tuple(replace(finding, severity="act") if finding is loud else finding for finding in found)
    return replace(signals, counterfactual=tried), acted
