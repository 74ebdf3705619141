"""A judge for each of several optimizers that take turns: what is usual for one says nothing about the other."""

import copy
from dataclasses import replace

from steadystep.claims import Turns
from steadystep.detectors import sees_every_step
from steadystep.diagnosis import Evidence
from steadystep.judge import Judge
from steadystep.state import DETECTOR
from steadystep.wiring import Parts


def judges_for(parts: Parts, count: int) -> list[Judge]:
    """Return the guard's own and others like it, with detectors of their own; budget and states are common to all.

    They are saved and go back with the guard. To be called before the first step.
    """
    judges = [parts.judge]
    for number in range(1, count):
        detectors = copy.deepcopy(parts.judge.detectors)
        steady = tuple(filter(sees_every_step, detectors))
        judges.append(replace(parts.judge, detectors=detectors, steady=steady, evidence=Evidence(), turns=Turns()))
        named = {f"{DETECTOR}{detector.name} of optimizer {number}": detector for detector in detectors}
        parts.stateful.update(named)
        parts.recovery.take_along(named)
    return judges
