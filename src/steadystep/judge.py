"""NOTICE ─► EXPLAIN ─► DECIDE for one look. The stages do not know each other; here they meet."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import final

from steadystep.actions import LearningRate
from steadystep.detectors import Detector, WeightJump
from steadystep.diagnosis import explain, first_sign, needs_witness, weigh
from steadystep.look import Look
from steadystep.policy import Budget, Limits, Mode, decide
from steadystep.records import Diagnosis, Finding, Plan, Signals
from steadystep.recovery import Recovery

_GRAVE = ("act", "critical")
_HEALTHY = (Diagnosis(), Plan())  # what nearly every step comes to; made once


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Judge:
    """From what was measured to what is to be done about it."""

    detectors: tuple[Detector, ...]
    budget: Budget
    recovery: Recovery
    learning_rate: LearningRate
    limits: Limits
    mode: Mode
    steady: tuple[Detector, ...]
    """Those that want to see every step; the others only look at probes."""
    weigh: Callable[[Signals], Signals]
    """Adds the norms of the weights, which healthy steps are not asked for."""

    def judge(self, look: Look, *, updates: int, careful: bool = False) -> tuple[Diagnosis, Plan]:
        """`updates` is how many the weights contain: going back to those in place would change nothing."""
        asked = self.steady if look.signals.probe is None else self.detectors
        found = tuple([finding for detector in asked for finding in detector.update(look.signals)])
        if not found:
            return _HEALTHY
        if not look.signals.weight_norms and any(finding.severity in _GRAVE for finding in found):
            found += self._about_weights(look)
        if needs_witness(look.signals, found):
            witness = self.recovery.testify(look.signals, before=first_sign(found))
            look.signals = replace(look.signals, witness=witness)
            if witness is not None:
                found = self.budget.episode.twice(found, weigh(look.signals, found))
        diagnosis = explain(look.signals, found)
        self.budget.see(diagnosis)
        return diagnosis, decide(
            look.signals,
            diagnosis,
            budget=self.budget,
            mode="careful" if careful and self.mode == "autopilot" else self.mode,
            states=[state for state in self.recovery.states if state.updates < updates],
            limits=self.limits,
            ceiling=self.learning_rate.ceiling.lr,
        )

    def _about_weights(self, look: Look) -> tuple[Finding, ...]:
        """What looks like a bad batch may be the weights: then they are looked at now, and not at the next cadence."""
        look.signals = self.weigh(look.signals)
        asked = [detector for detector in self.steady if detector.name == WeightJump.name]
        return tuple(finding for detector in asked for finding in detector.update(look.signals))
