"""Who owns the learning rate: with a schedule the guard, without one the user."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, final

import torch
from torch import Tensor
from torch.optim import Optimizer

from steadystep._utils.text import warn
from steadystep._utils.tree import put_into, same_values
from steadystep.errors import MisuseError
from steadystep.optimizers import SET_BY_LOOPS
from steadystep.schedule import Plateau, Schedule
from steadystep.schedule.learning_rate_cut import Ceiling
from steadystep.signals.gradients import NO_PARAMETERS


class Planned(Protocol):
    """Makes a schedule once the learning rate it multiplies is known."""

    def __call__(self, *, base_lr: float) -> Schedule | None:
        """The schedule, or None for none."""
        ...


def check_rates(optimizer: Optimizer) -> None:
    """Learning rates that one can multiply; a NaN among them is a finding. Asked in each step: it may cost nothing.

    And something that they are for: with empty groups the whole backward pass would come to nothing.
    """
    holds_some = False
    for position, group in enumerate(optimizer.param_groups):
        holds_some = holds_some or bool(group["params"])
        rate = group.get("lr", 0.0)
        if type(rate) is not float and not isinstance(rate, float | int | Tensor):
            raise MisuseError(
                f"the learning rate of parameter group {position} is {rate!r}: "
                f"set optimizer.param_groups[{position}]['lr'] to a number"
            )
    if not holds_some:
        raise MisuseError(NO_PARAMETERS)


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
                "schedule must be a function from the number of updates to a multiplier, got "
                f"{type(schedule).__name__}: wrap a torch scheduler in steadystep.schedule.from_torch"
            )
        self._optimizer = optimizer
        self._start = start
        self._sets_start = start is not None or times != 1.0
        if start is not None:
            self._restart_from(start)
        if times != 1.0:
            for group in optimizer.param_groups:
                _set(group, _rate(group) * times)
        rates = [_rate(group) for group in optimizer.param_groups]
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
        return [group.get("lr", 0.0) for group in self._optimizer.param_groups]

    def put_back(self) -> None:
        """After it: what was asked for."""
        if self._asked:
            for group, lr in zip(self._optimizer.param_groups, self._asked, strict=True):
                _set(group, lr)
            self._asked = []

    def options(self) -> tuple[dict[str, Any], ...]:
        """What each group has been set to: learning rate, decay, momentum, betas, eps."""
        groups = self._optimizer.param_groups
        return tuple([{key: _kept(group[key]) for key in SET_BY_LOOPS if key in group} for group in groups])

    @staticmethod
    def times(options: Sequence[Mapping[str, Any]], mult: float) -> tuple[Mapping[str, Any], ...]:
        """The same with another learning rate."""
        return tuple([{**group, "lr": group["lr"] * mult} if "lr" in group else group for group in options])

    @torch.no_grad()
    def put(
        self, options: Sequence[Mapping[str, Any]], *, in_place_of: Sequence[Mapping[str, Any]] | None = None
    ) -> None:
        """Set them; with `in_place_of` only those that are still so: the rest was set by the optimizer itself."""
        known = options if in_place_of is None else in_place_of
        for group, values, others in zip(self._optimizer.param_groups, options, known, strict=False):
            for key, value in values.items():
                if in_place_of is None or same_values(group.get(key), others.get(key)):
                    group[key] = put_into(group.get(key), value)

    @contextmanager
    def using(self, options: Sequence[Mapping[str, Any]]) -> Iterator[None]:
        """Other options for a while."""
        before = self.options()
        try:
            self.put(options)
            yield
        finally:
            self.put(before, in_place_of=options)

    def validated(self, metric: float) -> None:
        """A plateau learns from validation; other schedules do not."""
        if self.plateau is not None:
            self.plateau.update(metric)

    def place(self, updates: int) -> None:
        """The learning rate for the update that follows `updates` others."""
        if self._schedule is None:
            return
        for group in self._optimizer.param_groups[len(self._bases) :]:  # added since
            self._bases.append(_rate(group))
        multiplier = self._schedule(updates)
        for group, base in zip(self._optimizer.param_groups, self._bases, strict=True):
            _set(group, base * multiplier)
        # why not the whole schedule beforehand: it may be long, or end; and what it says now is a plan by itself
        self.announced = max(self._bases) * max(multiplier, 1.0)

    def _restart_from(self, start: float) -> None:
        """Groups with rates of their own keep their ratios."""
        before = [_rate(group) for group in self._optimizer.param_groups]
        default = _rate(self._optimizer.defaults)
        base = default if default in before else max(before)
        for group, own in zip(self._optimizer.param_groups, before, strict=True):
            _set(group, start if own == base or base == 0 else start * (own / base))

    def state_dict(self) -> dict[str, Any]:
        """Return the state, ready for JSON."""
        rates = [_rate(group) for group in self._optimizer.param_groups]
        plateau = self._schedule.state_dict() if isinstance(self._schedule, Plateau) else None
        return {
            "bases": list(self._bases),
            "rates": rates,
            "plateau": plateau,
            "ceiling": self.ceiling.state_dict(),
            "start": self._start,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`. A start value that is another one now is used, in proportion to what became of it."""
        groups = len(self._optimizer.param_groups)
        if len(state["bases"]) > groups or (self._sets_start and len(state["rates"]) != groups):
            raise MisuseError(f"it has learning rates for a different number of parameter groups than {groups}")
        times = self._changed(state)
        if self._schedule is not None:
            self._bases = [float(base) * times for base in state["bases"]]
        self.ceiling.load_state_dict(state["ceiling"])
        if isinstance(self._schedule, Plateau) and state["plateau"] is not None:
            self._schedule.load_state_dict(state["plateau"])
        if self._sets_start:
            for group, rate in zip(self._optimizer.param_groups, state["rates"], strict=True):
                _set(group, float(rate) * times)

    def _changed(self, state: dict[str, Any]) -> float:
        """What the saved rates are to be multiplied by; a change is said."""
        then, now = state.get("start"), self._start  # a state from before this was saved does not have it
        if then is None or now is None or then == now:
            return 1.0
        warn(f"training.learning_rate is {now:g} but was {then:g} when the checkpoint was written: using {now:g}")
        return now / float(then)


def _kept(option: Any) -> Any:
    if type(option) is float:
        return option
    if isinstance(option, Tensor):
        return option.detach().clone()
    if type(option) is tuple and all(type(each) is float for each in option):
        return option
    return type(option)([_kept(each) for each in option]) if type(option) in (tuple, list) else option


def _rate(group: Mapping[str, Any]) -> float:
    """0 where there is none: some optimizers find their own."""
    return float(group.get("lr", 0.0))  # sync: only when a guard is made or saved, or a group is added


def _set(group: dict[str, Any], lr: float | Tensor) -> None:
    if isinstance(group.get("lr"), Tensor):
        group["lr"].copy_(lr) if isinstance(lr, Tensor) else group["lr"].fill_(lr)
    elif "lr" in group:
        group["lr"] = lr
