"""Who owns the learning rate: with a schedule the guard, without one the user."""

from collections.abc import Callable
from typing import Any, final

from torch import Tensor
from torch.optim import Optimizer

from steadystep.errors import MisuseError

Schedule = Callable[[int], float]


@final
class LearningRate:
    """Sets `lr = base * schedule(updates)` before each update; without a schedule it sets nothing.

    The position is the number of updates contained in the weights, so a refused step does not move it.
    """

    def __init__(self, optimizer: Optimizer, *, start: float | None, schedule: Schedule | None) -> None:
        if schedule is not None and not callable(schedule):
            raise MisuseError(
                f"schedule must be a function from updates to a multiplier, got {type(schedule).__name__}: "
                "step a torch scheduler yourself, next to guard.step()"
            )
        self._optimizer = optimizer
        self._schedule = schedule
        self._sets_start = start is not None
        if start is not None:
            self._restart_from(start)
        self._bases = [_value(group["lr"]) for group in optimizer.param_groups] if schedule else []

    def place(self, updates: int) -> None:
        """The learning rate for the update that follows `updates` others."""
        if self._schedule is None:
            return
        for group in self._optimizer.param_groups[len(self._bases) :]:  # added since
            self._bases.append(_value(group["lr"]))
        multiplier = self._schedule(updates)
        for group, base in zip(self._optimizer.param_groups, self._bases, strict=True):
            _set(group, base * multiplier)

    def _restart_from(self, start: float) -> None:
        """Groups with rates of their own keep their ratios."""
        before = [_value(group["lr"]) for group in self._optimizer.param_groups]
        default = _value(self._optimizer.defaults["lr"])
        base = default if default in before else max(before)
        for group, own in zip(self._optimizer.param_groups, before, strict=True):
            _set(group, start if own == base or base == 0 else start * (own / base))

    def state_dict(self) -> dict[str, Any]:
        """JSON-ready state."""
        return {"bases": list(self._bases), "rates": [_value(group["lr"]) for group in self._optimizer.param_groups]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`. A start value from the config is for new runs: the saved rates take its place."""
        self._bases = [float(base) for base in state["bases"]]
        if self._sets_start:
            for group, rate in zip(self._optimizer.param_groups, state["rates"], strict=True):
                _set(group, float(rate))


def _value(lr: float | Tensor) -> float:
    return float(lr)  # sync: only when a guard is made or saved, or a group is added


def _set(group: dict[str, Any], lr: float) -> None:
    if isinstance(group["lr"], Tensor):
        group["lr"].fill_(lr)
    else:
        group["lr"] = lr
