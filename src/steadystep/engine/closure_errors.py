"""Exceptions of a closure, where the settings say that so many of them are no reason to stop."""

import math
from dataclasses import dataclass, replace
from typing import final

from steadystep.actions.apply import Updater
from steadystep.diagnosis import exception_in_step
from steadystep.engine.learning_rate import LearningRate
from steadystep.errors import SteadystepError
from steadystep.policy import Budget, Limits, Mode
from steadystep.records import Action, Outcome, Plan

_HALVED = 0.5


@final
@dataclass(frozen=True, slots=True)
class ClosureErrors:
    """Skips the step that raised and halves the learning rate; the one exception too many is for the caller."""

    budget: Budget
    updater: Updater
    learning_rate: LearningRate
    limits: Limits
    mode: Mode
    most: int
    """In 1,000 steps; 0 catches none."""

    def outcome(self, error: Exception, *, step: int) -> Outcome | None:
        """What became of the step; None when `error` is to be raised.

        Micro-batches that came before it in its group are kept, where they can be run again.
        """
        ours = isinstance(error, SteadystepError) or not self.updater.runner.failed_collecting
        if not self.most or self.mode == "observe" or ours:
            return None
        count = self.budget.raised(step)
        if count > self.most:
            error.add_note(
                f"steadystep: {count} exceptions in the last 1,000 steps, and recovery.max_exceptions = {self.most}; "
                "no update was taken from those steps, and the weights are those of the last accepted one"
            )
            return None
        plan = Plan(actions=(Action.SKIP_STEP,))
        asked = max((float(options["lr"]) for options in self.learning_rate.options()), default=0.0)
        if self.mode == "autopilot" and self.limits.rolls_back and asked > 0.0:
            in_use = asked * self.learning_rate.ceiling.multiplier(asked)
            lr = max(_HALVED * in_use, self.limits.lr_floor_mult * asked)
            plan = Plan(actions=(Action.SKIP_STEP, Action.CUT_LR), lr=lr)
        self.updater.prepare(plan)
        diagnosis = exception_in_step(error)
        if self.updater.runner.group.members:
            plan = replace(plan, reason=diagnosis.cause)
            return Outcome(step=step, reading=math.nan, stepped=False, pending=True, plan=plan, diagnosis=diagnosis)
        return self.updater.drop(step, diagnosis, plan=plan)
