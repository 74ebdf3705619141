"""An update that somebody else takes: what comes before it, and what comes after."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn, final

from torch import nn
from torch.optim import Optimizer

from steadystep.actions.apply import REFUSALS, Updater
from steadystep.errors import MisuseError
from steadystep.records import Diagnosis, Outcome, Plan

if TYPE_CHECKING:
    from steadystep.engine.learning_rate import LearningRate
    from steadystep.signals.gradients import GradientView, Probing


@final
@dataclass(frozen=True, slots=True)
class Around:
    """Carries out a plan around a step of the loop's own.

    A refused step is one without gradients: torch's optimizers leave alone what has none, weight decay and moments
    included.
    """

    optimizer: Optimizer
    updater: Updater
    learning_rate: "LearningRate"
    probing: "Probing"

    def before(self, plan: Plan, view: "GradientView", diagnosis: Diagnosis, *, shrunk: bool) -> Outcome:
        """Everything up to the step; what is reported holds once the step has been called.

        `shrunk` says that the loop has clipped these gradients after they were measured. A rollback is not for here.
        """
        self.updater.prepare(plan)
        if not REFUSALS.isdisjoint(plan.actions):
            view.grads.clear()
            self.drop()
            return self.updater.report(plan, view, diagnosis, stepped=False)
        clipped = self.updater.clip_(view, limit=plan.norm, again=shrunk)
        lr_mult = self.learning_rate.lower(view.signals.lr)
        if self.probing.due(view.signals.step):
            self.probing.before()
        return Outcome.of(plan, view.signals, diagnosis, stepped=True, clipped=clipped, lr_mult=lr_mult)

    def after(self, outcome: Outcome) -> None:
        """The step has been called, and did what `before` let it do."""
        self.abandon()
        if not outcome.stepped or outcome.signals is None:
            return
        if self.learning_rate.ceiling.low:
            self.learning_rate.ceiling.updated(outcome.signals.lr)
        if self.probing.due(outcome.step):
            self.probing.after(outcome.step)
        self.updater.runner.close()

    def abandon(self) -> None:
        """The learning rate is the user's again; also when the step raised."""
        self.learning_rate.put_back()

    def drop(self) -> None:
        """Leave the step that follows no gradient."""
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None


BY_HAND_USAGE = (
    "Guard(model, None) has no optimizer to step: call loss.backward(), then plan = guard.inspect(loss); update "
    "the weights yourself if plan.proceeds, then call guard.commit(stepped=plan.proceeds)"
)


@final
class ByHand(Optimizer):
    """Stands for the loop's own arithmetic: it knows which parameters are trained, and never steps."""

    def __init__(self, model: nn.Module) -> None:
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        if not trained:
            raise MisuseError("Guard(model, None): no parameter of this model requires a gradient")
        super().__init__(trained, {"lr": 0.0})

    def step(self, closure: Any = None) -> NoReturn:
        """Raise: there is nothing to step."""
        raise MisuseError(BY_HAND_USAGE)


def by_hand(model: nn.Module, schedule: Any, learning_rate: Any, scheduler: Any) -> ByHand:
    """Return what stands for an optimizer in `Guard(model, None)`; a learning rate would have nobody to use it."""
    if schedule is not None or learning_rate is not None or scheduler is not None:
        raise MisuseError(
            "Guard(model, None): a learning rate or a schedule has no effect without an optimizer: remove it"
        )
    return ByHand(model)
