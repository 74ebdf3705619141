"""Who owns the learning rate: with a schedule the guard, without one the user."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, final

from torch import Tensor
from torch.optim import Optimizer

from steadystep.actions.ceiling import Ceiling
from steadystep.errors import MisuseError
from steadystep.schedule import Plateau, Schedule

_NUMBERS = (float, int, tuple)  # learning rate, momentum, betas, decay, switches


class Planned(Protocol):
    """Makes a schedule once the learning rate it multiplies is known."""

    def __call__(self, *, base_lr: float) -> Schedule | None:
        """The schedule, or None for none."""
        ...


@final
class LearningRate:
    """Sets `lr = base * schedule(updates)` before each update; without a schedule it sets nothing.

    The position is the number of updates contained in the weights, so a refused step does not move it. In recovery a
    ceiling lies over whatever is asked for; it is applied for the length of one update and taken off again, so that
    schedulers and people see the values they set.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        start: float | None,
        schedule: Schedule | None,
        planned: Planned | None = None,
        times: float = 1.0,
    ) -> None:
        if schedule is not None and not callable(schedule):
            raise MisuseError(
                f"schedule must be a function from updates to a multiplier, got {type(schedule).__name__}: "
                "use steadystep.schedule.from_torch for torch's own"
            )
        self._optimizer = optimizer
        self._sets_start = start is not None or times != 1.0
        if start is not None:
            self._restart_from(start)
        if times != 1.0:
            for group in optimizer.param_groups:
                _set(group, _value(group["lr"]) * times)
        rates = [_value(group["lr"]) for group in optimizer.param_groups]
        self._schedule = planned(base_lr=max(rates)) if schedule is None and planned else schedule
        self._bases = rates if self._schedule else []
        self.ceiling = Ceiling()
        self.announced = max(self._bases, default=0.0)
        """The largest learning rate that the schedule is known to come to: its base, and more where it says more."""
        self._asked: list[float | Tensor] = []

    @property
    def scheduled(self) -> bool:
        """The guard sets the learning rate."""
        return self._schedule is not None

    @property
    def plateau(self) -> Plateau | None:
        """The schedule, if it is the one kind that remembers."""
        return self._schedule if isinstance(self._schedule, Plateau) else None

    def lower(self, asked: float) -> float:
        """Before an update: put the learning rate under the ceiling. Returns the multiplier it used."""
        if not self.ceiling.low:
            self.ceiling.asked = asked
            return 1.0
        multiplier = self.ceiling.multiplier(asked)
        if multiplier < 1.0:
            self._asked = [lr.clone() if isinstance(lr, Tensor) else lr for lr in self._rates()]
            for group, lr in zip(self._optimizer.param_groups, self._asked, strict=True):
                _set(group, lr * multiplier)  # from the copy: groups may share one tensor
        return multiplier

    def _rates(self) -> list[float | Tensor]:
        return [group["lr"] for group in self._optimizer.param_groups]

    def put_back(self) -> None:
        """After it: what was asked for."""
        if self._asked:
            for group, lr in zip(self._optimizer.param_groups, self._asked, strict=True):
                _set(group, lr)
            self._asked = []

    def options(self) -> tuple[dict[str, Any], ...]:
        """The numbers of each group as they are set; nothing where a learning rate is a tensor, and so elsewhere."""
        groups = self._optimizer.param_groups
        if any(not isinstance(group.get("lr"), float | int) for group in groups):
            return ()
        return tuple({k: v for k, v in group.items() if isinstance(v, _NUMBERS)} for group in groups)

    def put(self, options: Sequence[Mapping[str, Any]]) -> None:
        """Set them."""
        for group, numbers in zip(self._optimizer.param_groups, options, strict=False):
            group.update(numbers)

    @contextmanager
    def using(self, options: Sequence[Mapping[str, Any]]) -> Iterator[None]:
        """Other options for a while."""
        before = self.options()
        try:
            self.put(options)
            yield
        finally:
            self.put(before)

    def validated(self, metric: float) -> None:
        """A plateau learns from validation; other schedules do not."""
        if self.plateau is not None:
            self.plateau.update(metric)

    def place(self, updates: int) -> None:
        """The learning rate for the update that follows `updates` others."""
        if self._schedule is None:
            return
        for group in self._optimizer.param_groups[len(self._bases) :]:  # added since
            self._bases.append(_value(group["lr"]))
        multiplier = self._schedule(updates)
        for group, base in zip(self._optimizer.param_groups, self._bases, strict=True):
            _set(group, base * multiplier)
        # why not the whole schedule beforehand: it may be long, or end; and what it says now is a plan by itself
        self.announced = max(self._bases) * max(multiplier, 1.0)

    def _restart_from(self, start: float) -> None:
        """Groups with rates of their own keep their ratios."""
        before = [_value(group["lr"]) for group in self._optimizer.param_groups]
        default = _value(self._optimizer.defaults["lr"])
        base = default if default in before else max(before)
        for group, own in zip(self._optimizer.param_groups, before, strict=True):
            _set(group, start if own == base or base == 0 else start * (own / base))

    def state_dict(self) -> dict[str, Any]:
        """JSON-ready state."""
        rates = [_value(group["lr"]) for group in self._optimizer.param_groups]
        plateau = self._schedule.state_dict() if isinstance(self._schedule, Plateau) else None
        return {
            "bases": list(self._bases),
            "rates": rates,
            "plateau": plateau,
            "ceiling": self.ceiling.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`. A start value from the config is for new runs: the saved rates take its place."""
        self._bases = [float(base) for base in state["bases"]]
        self.ceiling.load_state_dict(state["ceiling"])
        if isinstance(self._schedule, Plateau) and state["plateau"] is not None:
            self._schedule.load_state_dict(state["plateau"])
        if self._sets_start:
            for group, rate in zip(self._optimizer.param_groups, state["rates"], strict=True):
                _set(group, float(rate))


def _value(lr: float | Tensor) -> float:
    return float(lr)  # sync: only when a guard is made or saved, or a group is added


def _set(group: dict[str, Any], lr: float | Tensor) -> None:
    if isinstance(group["lr"], Tensor):
        group["lr"].copy_(lr) if isinstance(lr, Tensor) else group["lr"].fill_(lr)
    else:
        group["lr"] = lr
