"""NOTICE ─► EXPLAIN ─► DECIDE for one look. The stages do not know each other; here they meet."""

from dataclasses import dataclass, replace
from typing import final

from steadystep.actions import LearningRate
from steadystep.detectors import Detector
from steadystep.diagnosis import explain, first_sign, needs_witness, weigh
from steadystep.look import Look
from steadystep.policy import Budget, Limits, Mode, decide
from steadystep.records import Diagnosis, Plan
from steadystep.recovery import Recovery

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

    def judge(self, look: Look, *, updates: int, careful: bool = False) -> tuple[Diagnosis, Plan]:
        """`updates` is how many the weights contain: going back to those in place would change nothing."""
        asked = self.steady if look.signals.probe is None else self.detectors
        found = tuple([finding for detector in asked for finding in detector.update(look.signals)])
        if not found:
            return _HEALTHY
        if needs_witness(look.signals, found):
            witness = self.recovery.testify(look.signals, before=first_sign(found))
            look.signals = replace(look.signals, witness=witness)
            found = self.budget.episode.twice(weigh(look.signals, found), heard=witness is not None)
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
