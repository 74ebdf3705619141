"""Schedules as torch's schedulers, and torch's schedulers as schedules."""

import copy
import warnings
from collections.abc import Callable
from typing import Any, Protocol, final, runtime_checkable

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from steadystep._utils.numbers import real
from steadystep.errors import ConfigError, MisuseError
from steadystep.schedule.curves import Schedule


@runtime_checkable
class _Stateful(Protocol):
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def as_torch(schedule: Schedule, optimizer: Optimizer) -> LRScheduler:
    """Return a torch scheduler that sets `lr = initial lr * schedule(steps taken)`.

    Call `step()` after each `optimizer.step()`. Its state holds the position and the state of a `Plateau`; pass a pure
    schedule again on resume.

    Args:
        schedule: the schedule.
        optimizer: whose learning rates it sets.

    >>> from steadystep.schedule import cosine
    >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    >>> scheduler = as_torch(cosine(2), optimizer)
    >>> rates = []
    >>> for _ in range(3):
    ...     rates.append(round(optimizer.param_groups[0]["lr"], 3))
    ...     optimizer.step()
    ...     scheduler.step()
    >>> rates
    [0.1, 0.05, 0.0]
    """
    return _Scheduled(schedule, optimizer)


def from_torch(source: LRScheduler | Callable[[Optimizer], LRScheduler], *, lr: float | None = None) -> Schedule:
    """Return what a torch scheduler does to the learning rate, as a function of the step.

    The scheduler runs on a stand-in optimizer without weights, up to the highest step asked for; its rates are kept in
    a table (8 bytes per step). The real optimizer is not changed; do not call the scheduler's `step()` yourself.

    Not for schedulers that need a metric (use `Plateau`), change momentum too (turn that off), treat groups
    differently, or draw random numbers. A scheduler with an end, such as OneCycleLR, raises beyond it.

    Args:
        source: a function that makes the scheduler for the optimizer it is given (preferred), or a scheduler that has
            not been stepped and has left the optimizer's rates at their initial value; multipliers are then relative to
            each group's `initial_lr`.
        lr: with a function, the learning rate that multipliers are relative to.

    >>> from torch.optim.lr_scheduler import OneCycleLR
    >>> def one_cycle(optimizer):
    ...     return OneCycleLR(optimizer, max_lr=0.1, total_steps=100, cycle_momentum=False)
    >>> schedule = from_torch(one_cycle, lr=0.1)
    >>> [round(schedule(step), 3) for step in (0, 29, 99)]
    [0.04, 1.0, 0.0]
    """
    if isinstance(source, LRScheduler):
        if lr is not None:
            raise ConfigError("from_torch: lr= is for a function; a scheduler uses the rates of its own optimizer")
        return _Replay(_copy(source), [float(g["initial_lr"]) for g in source.optimizer.param_groups])
    if not callable(source):
        raise ConfigError(
            f"from_torch: expected a torch scheduler or a function that creates one, got {type(source).__name__}"
        )
    base = real("from_torch: lr", lr, above=0.0)
    made = source(torch.optim.SGD([torch.nn.Parameter(torch.zeros(()))], lr=base))
    if not isinstance(made, LRScheduler):
        raise ConfigError(f"from_torch: the function returned a {type(made).__name__}, not a torch scheduler")
    return _Replay(_usable(made), [base])


@final
class _Scheduled(LRScheduler):
    def __init__(self, schedule: Schedule, optimizer: Optimizer) -> None:
        self._schedule = schedule
        self._memory = _memory(schedule)
        super().__init__(optimizer)

    def get_lr(self) -> list[float | Tensor]:
        multiplier = self._schedule(self.last_epoch)
        return [base * multiplier for base in self.base_lrs]

    def state_dict(self) -> dict[str, Any]:
        state = {
            "last_epoch": self.last_epoch,
            "step_count": self._step_count,
            "base_lrs": list(self.base_lrs),
            "last_lr": list(self._last_lr),
        }
        if self._memory:
            state["schedule"] = self._memory.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if ("schedule" in state_dict) != bool(self._memory):
            raise ConfigError("the saved schedule and this one are of different kinds: only one of them keeps a state")
        self.last_epoch = int(state_dict["last_epoch"])
        self._step_count = int(state_dict["step_count"])
        self.base_lrs = list(state_dict["base_lrs"])
        self._last_lr = list(state_dict["last_lr"])
        if self._memory:
            self._memory.load_state_dict(state_dict["schedule"])


@final
class _Replay:
    """A scheduler's multipliers, played on demand and never twice."""

    def __init__(self, scheduler: LRScheduler, bases: list[float]) -> None:
        self._scheduler = scheduler
        self._bases = bases
        self._momenta = _momenta(scheduler.optimizer)
        self._table: list[float] = []
        self._note()

    def __call__(self, step: int) -> float:
        while len(self._table) <= step:
            self._play()
        return self._table[max(step, 0)]

    def _play(self) -> None:
        kind = type(self._scheduler).__name__
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # why: it misses optimizer.step(), and the stand-in has nothing to step
                self._scheduler.step()
        except ValueError as error:
            raise MisuseError(
                f"{kind} has no step {len(self._table)} ({error}): make it longer, or continue it with then()"
            ) from error
        if _momenta(self._scheduler.optimizer) != self._momenta:
            raise ConfigError(f"{kind} also changes momentum, which a schedule cannot: set cycle_momentum=False")
        self._note()

    def _note(self) -> None:
        rates = [float(group["lr"]) for group in self._scheduler.optimizer.param_groups]
        found = [rate / base for rate, base in zip(rates, self._bases, strict=True) if base]
        if not found:
            raise ConfigError("from_torch: every group's learning rate is 0, so there is no base rate")
        if max(found) - min(found) > 1e-6 * max(found):
            raise ConfigError(
                f"{type(self._scheduler).__name__} treats groups differently (multipliers {found} at step "
                f"{len(self._table)}), which one schedule cannot: step it in your own loop"
            )
        self._table.append(found[0])


def _copy(scheduler: LRScheduler) -> LRScheduler:
    _usable(scheduler)
    kind, groups = type(scheduler).__name__, scheduler.optimizer.param_groups
    if _stepped(scheduler):
        raise ConfigError(f"from_torch: this {kind} has already been stepped: pass a function that creates a new one")
    for group in groups:
        if float(group["lr"]) != float(group["initial_lr"]):
            raise ConfigError(
                f"from_torch: {kind} has set the learning rate from {group['initial_lr']} to {group['lr']}, which "
                "would be taken as the base: pass a function that creates it, from_torch(lambda optimizer: ..., "
                "lr=...), or reset it first"
            )
    stand_in = torch.optim.SGD([_without_weights(group) for group in groups], lr=1.0)
    return copy.deepcopy(scheduler, {id(scheduler.optimizer): stand_in})


def _stepped(scheduler: LRScheduler) -> bool:
    known = vars(scheduler)  # why: ChainedScheduler has no last_epoch of its own
    return known.get("last_epoch", 0) > 0 or any(_stepped(part) for part in known.get("_schedulers", ()))


def _usable(scheduler: LRScheduler) -> LRScheduler:
    if isinstance(scheduler, ReduceLROnPlateau):
        raise ConfigError("ReduceLROnPlateau follows a metric, not the step: use steadystep.schedule.Plateau")
    return scheduler


def _memory(schedule: object) -> _Stateful | None:
    return schedule if isinstance(schedule, _Stateful) else None


def _without_weights(group: dict[str, Any]) -> dict[str, Any]:
    settings = {key: value for key, value in group.items() if key not in ("params", "param_names")}
    return {**copy.deepcopy(settings), "params": [torch.nn.Parameter(torch.zeros(()))]}


def _momenta(optimizer: Optimizer) -> list[tuple[Any, Any]]:
    return [(group.get("momentum"), group.get("betas")) for group in optimizer.param_groups]
