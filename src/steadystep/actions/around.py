"""An update that somebody else takes: what comes before it, and what comes after."""

from dataclasses import dataclass
from typing import final

from torch.optim import Optimizer

from steadystep.actions.catch_up import LookAgain
from steadystep.actions.learning_rate import LearningRate
from steadystep.actions.update import REFUSALS, Update
from steadystep.look import Look, Probing
from steadystep.records import Diagnosis, Outcome, Plan


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Around:
    """Carries out a plan around a step of the loop's own.

    A refused step is one without gradients: torch's optimizers leave alone what has none, weight decay and moments
    included.
    """

    optimizer: Optimizer
    update: Update
    learning_rate: LearningRate
    probing: Probing

    def before(
        self, plan: Plan, look: Look, diagnosis: Diagnosis, *, shrunk: bool, look_again: LookAgain | None = None
    ) -> Outcome:
        """Everything up to the step; what is reported holds once the step has been called.

        `shrunk` says that the loop has clipped these gradients, after they were measured; `look_again` measures those
        of an update that is made again.
        """
        if "rollback" in plan.steps:
            outcome = self.update.go_back(plan, look, diagnosis, look_again=look_again)
            self._drop()
            return outcome
        self.update.prepare(plan)
        if not REFUSALS.isdisjoint(plan.steps):
            look.grads.clear()
            self._drop()
            return self.update.report(plan, look, diagnosis, stepped=False)
        clipped = self.update.clip_(look, limit=plan.norm, again=shrunk)
        lr_mult = self.learning_rate.lower(look.signals.lr)
        if self.probing.due(look.signals.step):
            self.probing.before()
        return Outcome(
            step=look.signals.step,
            reading=look.signals.loss,
            stepped=True,
            plan=plan,
            diagnosis=diagnosis,
            signals=look.signals,
            clipped=clipped,
            lr_mult=lr_mult,
        )

    def after(self, outcome: Outcome) -> None:
        """The step has been called, and did what `before` let it do."""
        self.abandon()
        if not outcome.stepped or outcome.signals is None:
            return
        if self.learning_rate.ceiling.low:
            self.learning_rate.ceiling.updated(outcome.signals.lr)
        if self.probing.due(outcome.step):
            self.probing.after(outcome.step)
        self.update.passes.close()

    def abandon(self) -> None:
        """The learning rate is the user's again; also when the step raised."""
        self.learning_rate.put_back()

    def _drop(self) -> None:
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None
