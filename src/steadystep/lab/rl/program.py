"""What an RL program of the lab is: networks, rollouts, a loss, metrics, and settings that a fault may change."""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

Batch = tuple[Tensor, ...]
Numbers = dict[str, float]


class Program(ABC):
    """One training program, fixed by a seed. Every random number comes from its own generators.

    The loop: `batch = program.batch()`, one update on `program.loss(batch)`, `program.after_step()`.
    """

    settings: Any
    """A dataclass; a planted collapse changes its fields while the run goes on."""
    model: nn.Module
    """All that is trained: policy, critics, temperature."""
    optimizers: tuple[Optimizer, ...]

    def __init__(self, seed: int) -> None:
        self.rng = torch.Generator().manual_seed(seed)
        self.kept: dict[str, nn.Module] = {}
        """Networks that no optimizer updates and that a rollback must restore as well: targets."""
        self.rates: tuple[float, ...] = ()

    @abstractmethod
    def batch(self) -> Batch:
        """Return the next minibatch; a new rollout is drawn with the present policy when none is left."""

    @abstractmethod
    def loss(self, batch: Batch) -> Tensor:
        """Return the loss of a minibatch: no random number, no side effect."""

    @abstractmethod
    def metrics(self, batch: Batch) -> Numbers:
        """Return what a loop would log with this minibatch, by the names of `steadystep.rl`."""

    @abstractmethod
    def rollouts(self, seed: int) -> float:
        """Return the true reward of the present policy on prompts or starts, and with draws, fixed by a seed."""

    def held_out(self) -> float:
        """Return the true reward on the prompts or starts that the run is judged by."""
        return self.rollouts(7)

    def evaluate(self) -> float:
        """Return the true reward of fresh rollouts, drawn with torch's own random numbers."""
        return self.rollouts(int(torch.randint(8, 2**31, ())))  # sync: CPU only

    def after_step(self) -> None:
        """Do what the loop does after an update."""
        self.move_targets()

    def move_targets(self) -> None:  # noqa: B027  # why: most programs have none
        """Update the networks in `kept`."""

    def change(self, changes: Mapping[str, Any]) -> dict[str, Any]:
        """Set fields of the settings and return what they were; `lr_mult` multiplies the first rates."""
        before: dict[str, Any] = {}
        for name, value in changes.items():
            if name == "lr_mult":
                before[name] = 1.0
                self._scale_rates(value)
            else:
                before[name] = getattr(self.settings, name)
                setattr(self.settings, name, value)
        return before

    def _scale_rates(self, mult: float | tuple[float, ...]) -> None:
        groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
        self.rates = self.rates or tuple(group["lr"] for group in groups)
        mults = mult if isinstance(mult, tuple) else (mult,) * len(groups)
        for group, rate, each in zip(groups, self.rates, mults, strict=True):
            group["lr"] = rate * each

    def is_finite(self) -> bool:
        """Whether every parameter is a number."""
        return all(bool(p.isfinite().all()) for p in self.model.parameters())  # sync: CPU only

    def score(self) -> float:
        """Return the held-out reward; NaN once the weights are lost."""
        return self.held_out() if self.is_finite() else math.nan


def clipped_surrogate(ratio: Tensor, advantages: Tensor, clip: float) -> Tensor:
    """Return the loss of PPO per sample (Schulman et al. 2017)."""
    return -torch.minimum(ratio * advantages, ratio.clamp(1.0 - clip, 1.0 + clip) * advantages)
