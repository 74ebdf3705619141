"""Rollouts as proof: a rollback of a policy pays where an earlier one earns more, in pairs with equal random numbers.

The loss of a policy says nothing about what it earns, so batches cannot tell. What earns more does so in eight pairs,
and again in eight with other random numbers: the first eight chose it. That three times, ten steps apart.
"""

import math
from collections.abc import Generator, Sequence
from dataclasses import replace
from statistics import fmean, stdev
from typing import Any, final

from steadystep.engine.verdict import Ask, State
from steadystep.policy import Limits, Mode
from steadystep.records import Counterfactual, DetectorName, Finding, Signals
from steadystep.rl import Controls

OF_A_POLICY = frozenset(
    {
        *(DetectorName.ENTROPY_COLLAPSE, DetectorName.KL_BLOW_UP, DetectorName.POLICY_MISMATCH),
        *(DetectorName.RATIO_EXPLOSION, DetectorName.REWARD_COLLAPSE, DetectorName.REWARD_HACKING),
        DetectorName.VALUE_DIVERGENCE,
    }
)
ROLLOUTS = 8
_CERTAIN = 3.0  # standard errors
_APART = 100_003  # between the seeds of two samples
_TRIED_EVERY, _TRIED_FOR = 10, 80  # steps after a warning
_PROOFS = 3  # in a row
_HEALING = 0.25  # of the gap

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


@final
class PolicyTrial:
    """A warning about a policy, tried with rollouts at once and again for a while: a policy needs steps to go astray.

    Snapshots do not survive a resume, so neither does an open trial.
    """

    def __init__(self) -> None:
        self.controls: Controls | None = None
        self.due = math.inf
        """The step at which a warning from before is to be tried again; a number, because every step asks for it."""
        self._finding: Finding | None = None
        self._until = 0
        self._proofs: list[Counterfactual] = []

    def play(
        self, signals: Signals, found: tuple[Finding, ...], states: Sequence[State], mode: Mode
    ) -> Generator[Ask, Any, tuple[Signals, tuple[Finding, ...]]]:
        """Act upon a warning about a policy where rollouts prove one of `states` better."""
        if self.controls is None or mode != "autopilot":
            return signals, found
        step = signals.step
        loud = next((f for f in found if f.detector in OF_A_POLICY and f.severity == "warn"), None)
        if loud is not None:
            if self._finding is None:
                self.due, self._proofs = step, []
            self._finding, self._until = loud, step + _TRIED_FOR
        suspected = self._finding
        if suspected is None or step < self.due or signals.counterfactual is not None:
            return signals, found
        self.due = step + _TRIED_EVERY
        if self.due > self._until:
            self._finding, self.due = None, math.inf
        tried = yield from _better(signals, [state for state in states if state.step >= 0])
        self._proofs = [] if tried is None else [*self._proofs, tried]
        if tried is None or not self._lasts():
            return signals, found
        self._finding, self.due = None, math.inf
        acted = replace(suspected, step=step, severity="act")
        return replace(signals, counterfactual=tried), (acted, *(each for each in found if each is not loud))

    def limited(self, limits: Limits) -> Limits:
        """The limits with the coefficients that may be raised."""
        return limits if self.controls is None else replace(limits, coefficients=self.controls.names)

    def _lasts(self) -> bool:
        """Proved three times in a row, and the current policy is not on its way back: a noisy one is, by itself."""
        if len(self._proofs) < _PROOFS:
            return False
        first, last = self._proofs[-_PROOFS], self._proofs[-1]
        return first.current_loss - last.current_loss <= _HEALING * (first.current_loss - first.old_loss)


def _better(signals: Signals, states: Sequence[State]) -> Generator[Ask, Any, Counterfactual | None]:
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
