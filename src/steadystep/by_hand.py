"""Updates without an optimizer: `Guard(model, None)` judges with `inspect` and hears of them with `commit`."""

from typing import Any, NoReturn, final

from torch import nn
from torch.optim import Optimizer

from steadystep.errors import MisuseError

HOW = (
    "Guard(model, None) has no optimizer to step: call loss.backward(), then plan = guard.inspect(loss); update the "
    "weights yourself where plan.proceeds, and end with guard.commit(stepped=plan.proceeds)"
)


@final
class ByHand(Optimizer):
    """Stands for the loop's own arithmetic: it knows which parameters are trained, and never steps."""

    def __init__(self, model: nn.Module) -> None:
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        if not trained:
            raise MisuseError("Guard(model, None): no parameter of this model takes a gradient")
        super().__init__(trained, {"lr": 0.0})

    def step(self, closure: Any = None) -> NoReturn:
        """Raise: there is nothing to step."""
        raise MisuseError(HOW)


def check_settings(schedule: Any, learning_rate: Any, scheduler: Any) -> None:
    """A learning rate has nobody to use it."""
    if schedule is not None or learning_rate is not None or scheduler is not None:
        raise MisuseError(
            "Guard(model, None): a learning rate or a schedule does nothing without an optimizer; leave it out"
        )
