"""A refused step is run again under hooks, only then, and what was seen is written down."""

import math
from dataclasses import replace
from typing import final

from torch import nn
from torch.optim import Optimizer

from steadystep.accumulation import Passes
from steadystep.buffers import Buffers
from steadystep.incidents.case import Case, as_before, second_look
from steadystep.incidents.incidents import Incidents
from steadystep.incidents.origin import Origin
from steadystep.look import Look
from steadystep.precision import Precision
from steadystep.records import Outcome, Plan, Signals


@final
class Examiner:
    """`open` before something is done about a step, `close` afterwards.

    Without a folder nothing is written, and only steps with NaN or infinity are run again.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        precision: Precision,
        buffers: Buffers,
        passes: Passes,
        incidents: Incidents | None,
    ) -> None:
        self._model = model
        self._optimizer = optimizer
        self._precision = precision
        self._buffers = buffers
        self._passes = passes
        self._incidents = incidents

    def open(self, plan: Plan, look: Look, *, updates: int) -> Case | None:
        """The weights are still those the step started from."""
        if not plan.steps or not Incidents.concerns(plan):
            return None
        signals = look.signals
        work, batch, rng = self._passes.suspect(signals.bad_micro_batches)
        if self._incidents is not None and self._incidents.wants(plan, signals.step):
            return self._incidents.open(
                step=signals.step,
                updates=updates,
                model=self._model,
                optimizer=self._optimizer,
                work=work,
                batch=batch,
                rng=rng,
                precision=self._precision,
                scale=signals.scale,
                buffers=self._buffers,
            )
        if signals.healthy:
            return None
        with as_before(self._buffers):
            found = second_look(self._model, work, batch, rng=rng, precision=self._precision, scale=signals.scale)
        return Case(examination=found, precision="")

    def close(self, outcome: Outcome, case: Case | None) -> Outcome:
        """What was done, with where it began and where that is written."""
        if case is None:
            return outcome
        signals = outcome.signals
        outcome = replace(outcome, origin=_said(case.examination.origin, signals))
        path = None if self._incidents is None else self._incidents.report(outcome, case)
        return outcome if path is None else replace(outcome, incident=str(path))

    def note(self, outcome: Outcome) -> None:
        """One step is over."""
        if self._incidents is not None:
            self._incidents.note(outcome)


def _said(origin: Origin, signals: Signals | None) -> str:
    if origin.phase != "none":
        return f"{origin.place}, {origin.phase}: {origin.what}"
    repeated = origin.what or "run again, nothing is non-finite: it may have been the hardware"
    finite = signals is not None and math.isfinite(signals.loss) and math.isfinite(signals.grad_norm)
    return "" if finite else repeated
