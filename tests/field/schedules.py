"""Twelve ways to set the learning rate, four of them the guard's own."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim import Optimizer, lr_scheduler

from steadystep.schedule import Plateau, Schedule, named, wsd

VALIDATE_EVERY = 50


@dataclass(slots=True)
class Rate:
    """The learning rate of one optimizer: set before a step, or by a scheduler of torch's after it."""

    optimizer: Optimizer
    by_hand: Callable[[int], float] | None = None
    """Step -> multiplier of the optimizer's learning rate, set by the loop itself."""
    scheduler: Any = None
    owned: Schedule | None = None
    """Updates -> multiplier. A guard sets this one; the plain twin does it by hand."""
    config: dict[str, Any] | None = None
    """The same as settings of a guard, where it is said by name."""
    bases: list[float] = field(init=False)

    def __post_init__(self) -> None:
        self.bases = [group["lr"] for group in self.optimizer.param_groups]

    def before(self, step: int, *, guarded: bool) -> None:
        """Set what the loop sets."""
        multiplier = self.by_hand if self.owned is None or guarded else self.owned
        if multiplier is not None:
            for group, base in zip(self.optimizer.param_groups, self.bases, strict=True):
                group["lr"] = base * multiplier(step)

    def after(self) -> None:
        """Step the scheduler."""
        if self.scheduler is not None:
            self.scheduler.step()

    @property
    def plateau(self) -> Plateau | None:
        """The schedule that wants validation losses."""
        return self.owned if isinstance(self.owned, Plateau) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleInfo:
    """How to make one for an optimizer and a number of steps."""

    make: Callable[[Optimizer, int], Rate]
    owned: bool = False
    validates: bool = False


def _constant(optimizer: Optimizer, num_steps: int) -> Rate:
    return Rate(optimizer)


def _cosine(optimizer: Optimizer, num_steps: int) -> Rate:
    settings = {"lr_scheduler": "cosine", "warmup_steps": 0.05, "total_steps": num_steps}
    schedule = named("cosine", total_steps=num_steps, warmup_steps=0.05, floor=0.0)
    return Rate(optimizer, owned=schedule, config={"training": settings})


def _linear(optimizer: Optimizer, num_steps: int) -> Rate:
    return Rate(optimizer, owned=named("linear", total_steps=num_steps, floor=0.1))


def _wsd(optimizer: Optimizer, num_steps: int) -> Rate:
    rise, fall = num_steps // 20, num_steps // 5
    return Rate(optimizer, owned=wsd(rise, num_steps - rise - fall, fall))


def _plateau(optimizer: Optimizer, num_steps: int) -> Rate:
    return Rate(optimizer, owned=Plateau(factor=0.5, patience=2))


def _lambda(optimizer: Optimizer, num_steps: int) -> Rate:
    rise = max(1, num_steps // 10)
    return Rate(
        optimizer,
        scheduler=lr_scheduler.LambdaLR(
            optimizer, lambda step: min((step + 1) / rise, (num_steps - step) / (num_steps - rise))
        ),
    )


def _by_hand(optimizer: Optimizer, num_steps: int) -> Rate:
    rise = max(1, num_steps // 10)
    return Rate(optimizer, by_hand=lambda step: (step + 1) / rise if step < rise else (rise / (step + 1)) ** 0.5)


def _one_cycle(optimizer: Optimizer, num_steps: int) -> Rate:
    top = optimizer.param_groups[0]["lr"]
    cycles = _has_momentum(optimizer)
    return Rate(
        optimizer,
        scheduler=lr_scheduler.OneCycleLR(optimizer, max_lr=top, total_steps=num_steps + 1, cycle_momentum=cycles),
    )


def _restarts(optimizer: Optimizer, num_steps: int) -> Rate:
    period = max(10, num_steps // 7)
    return Rate(optimizer, scheduler=lr_scheduler.CosineAnnealingWarmRestarts(optimizer, T_0=period, T_mult=2))


def _cyclic(optimizer: Optimizer, num_steps: int) -> Rate:
    top = optimizer.param_groups[0]["lr"]
    scheduler = lr_scheduler.CyclicLR(
        optimizer,
        base_lr=0.1 * top,
        max_lr=top,
        step_size_up=max(5, num_steps // 12),
        cycle_momentum=_has_momentum(optimizer),
    )
    return Rate(optimizer, scheduler=scheduler)


def _huggingface(optimizer: Optimizer, num_steps: int) -> Rate:
    from transformers import get_cosine_schedule_with_warmup

    return Rate(optimizer, scheduler=get_cosine_schedule_with_warmup(optimizer, num_steps // 20, num_steps))


def _step(optimizer: Optimizer, num_steps: int) -> Rate:
    return Rate(optimizer, scheduler=lr_scheduler.StepLR(optimizer, max(1, num_steps // 3), gamma=0.2))


def _has_momentum(optimizer: Optimizer) -> bool:
    """Cycling it would otherwise give a momentum to an optimizer that was made without one."""
    defaults = optimizer.defaults
    beta_of_adam = "betas" in defaults and isinstance(optimizer, torch.optim.Adam | torch.optim.AdamW)
    return beta_of_adam or bool(defaults.get("momentum"))


SCHEDULES: dict[str, ScheduleInfo] = {
    "constant": ScheduleInfo(make=_constant),
    "own-cosine": ScheduleInfo(make=_cosine, owned=True),
    "own-linear": ScheduleInfo(make=_linear, owned=True),
    "own-wsd": ScheduleInfo(make=_wsd, owned=True),
    "own-plateau": ScheduleInfo(make=_plateau, owned=True, validates=True),
    "lambda": ScheduleInfo(make=_lambda),
    "by-hand": ScheduleInfo(make=_by_hand),
    "one-cycle": ScheduleInfo(make=_one_cycle),
    "restarts": ScheduleInfo(make=_restarts),
    "cyclic": ScheduleInfo(make=_cyclic),
    "hf-cosine": ScheduleInfo(make=_huggingface),
    "step": ScheduleInfo(make=_step),
}
