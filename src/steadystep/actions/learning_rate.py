"""Who owns the learning rate: with a schedule the guard, without one the user."""

from collections.abc import Callable
from typing import Any, final

from torch import Tensor
from torch.optim import Optimizer

Schedule = Callable[[int], float]


@final
class LearningRate:
    """Sets `lr = base * schedule(updates)` before each update; without a schedule it sets nothing.

    The position is the number of updates contained in the weights, so a refused step does not move it.
    """

    def __init__(self, optimizer: Optimizer, *, start: float | None, schedule: Schedule | None) -> None:
        self._optimizer = optimizer
        self._schedule = schedule
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
        """Groups with a rate of their own keep their ratio to the optimizer's default."""
        default = _value(self._optimizer.defaults["lr"])
        for group in self._optimizer.param_groups:
            own = _value(group["lr"])
            _set(group, start if own == default or default == 0 else start * (own / default))

    def state_dict(self) -> dict[str, Any]:
        """JSON-ready state."""
        return {"bases": list(self._bases)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        self._bases = [float(base) for base in state["bases"]]


def _value(lr: float | Tensor) -> float:
    return float(lr)  # sync: only when a guard is made or a group is added


def _set(group: dict[str, Any], lr: float) -> None:
    if isinstance(group["lr"], Tensor):
        group["lr"].fill_(lr)
    else:
        group["lr"] = lr
