"""What an RL program of the lab is, and the control tasks: many copies at once, each begun anew when it is over."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

Batch = tuple[Tensor, ...]
Numbers = dict[str, float]


@dataclass(slots=True, kw_only=True)
class RewardFaults:
    """What a planted collapse may change about the rewards: the part of the settings that all programs share."""

    exploit: float = 0.0
    """Share of the exploit in the reward."""
    reward_mult: float = 1.0
    noise: float = 0.0
    broken: float = 0.0
    """Share of rewards that are replaced by `broken_by`."""
    broken_by: float = math.nan

    def exploited(self, rewards: Tensor, exploit: Tensor) -> Tensor:
        """Return the rewards with the share of what the exploit is paid."""
        return self.reward_mult * ((1.0 - self.exploit) * rewards + self.exploit * exploit)

    def disturbed(self, rewards: Tensor, rng: torch.Generator) -> Tensor:
        """Return the rewards with noise and broken ones; without these faults no random number is drawn."""
        if self.noise:
            rewards = rewards + self.noise * torch.randn(rewards.shape, generator=rng)
        if self.broken:
            broken = torch.rand(rewards.shape, generator=rng) < self.broken
            rewards = torch.where(broken, self.broken_by, rewards)
        return rewards


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
        self.played = 0
        """How often a guard has asked for `evaluate`."""

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
        self.played += 1
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


class Environment(Protocol):
    """Copies of one task, each begun anew when it is over."""

    num_features: ClassVar[int]
    num_actions: ClassVar[int]
    limit: ClassVar[int]
    best: ClassVar[float]
    """Return of a good policy, which scores 1."""

    def __init__(self, count: int, rng: torch.Generator) -> None: ...

    @property
    def seen(self) -> Tensor:
        """Return what the policy sees, [count, num_features]."""
        ...

    def step(self, actions: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return rewards, what an exploit would be paid, what is seen right after, and which episodes ended."""
        ...


class CartPole:
    """Barto, Sutton and Anderson 1983. Pays 1 a step; an exploit is paid for leaning to one side."""

    num_features, num_actions, limit, best = 4, 2, 100, 100.0

    def __init__(self, count: int, rng: torch.Generator) -> None:
        self._rng = rng
        self._state = self._fresh(count)
        self._age = torch.zeros(count, dtype=torch.long)

    def _fresh(self, count: int) -> Tensor:
        return 0.1 * torch.rand(count, 4, generator=self._rng) - 0.05

    @property
    def seen(self) -> Tensor:
        """Return position, speed, angle and spin."""
        return self._state.clone()

    def step(self, actions: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Push left (0) or right (1) for 0.02 s."""
        x, v, angle, spin = self._state.unbind(1)
        push = (20.0 * actions - 10.0 + 0.05 * spin.square() * angle.sin()) / 1.1
        turn = (9.8 * angle.sin() - angle.cos() * push) / (0.5 * (4 / 3 - 0.1 * angle.cos().square() / 1.1))
        pull = push - 0.05 * turn * angle.cos() / 1.1
        self._state = torch.stack([x + 0.02 * v, v + 0.02 * pull, angle + 0.02 * spin, spin + 0.02 * turn], 1)
        self._age += 1
        after = self.seen
        fallen = (after[:, 0].abs() > 2.4) | (after[:, 2].abs() > 12 * math.pi / 180)
        over = fallen | (self._age >= self.limit)
        self._state[over] = self._fresh(int(over.sum()))
        self._age[over] = 0
        return torch.ones(len(over)), (after[:, 2] > 0.05).float(), after, over


class Grid:
    """Five by five cells; a corner pays 1 and ends the episode, an exploit is paid for staying in one column."""

    side: ClassVar[int] = 5
    num_features, num_actions, limit, best = 25, 4, 16, 0.81
    _moves: ClassVar[Tensor] = torch.tensor([[0, 1], [0, -1], [1, 0], [-1, 0]])

    def __init__(self, count: int, rng: torch.Generator) -> None:
        self._rng = rng
        self._at = self._fresh(count)
        self._age = torch.zeros(count, dtype=torch.long)

    def _fresh(self, count: int) -> Tensor:
        return torch.randint(0, 3, (count, 2), generator=self._rng)

    @property
    def seen(self) -> Tensor:
        """Return the cell, one-hot."""
        return nn.functional.one_hot(self._at[:, 0] * self.side + self._at[:, 1], 25).float()

    def step(self, actions: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Move by one cell; walls stop."""
        self._at = (self._at + self._moves[actions]).clamp(0, self.side - 1)
        self._age += 1
        after = self.seen
        goal = (self._at == self.side - 1).all(1)
        idle = self._at[:, 1] == 0
        rewards = goal.float() * (1.0 - 0.5 * self._age / self.limit)
        over = goal | (self._age >= self.limit)
        self._at[over] = self._fresh(int(over.sum()))
        self._age[over] = 0
        return rewards, idle.float(), after, over


class Point:
    """A mass on a line that is pushed towards 0. Pays 1 - distance each step, 0 from a distance of 1 on."""

    num_features, limit, best = 2, 24, 20.5

    def __init__(self, count: int, rng: torch.Generator) -> None:
        self._rng = rng
        self._state, self._age = self._fresh(count), torch.zeros(count, dtype=torch.long)

    def _fresh(self, count: int) -> Tensor:
        side = 2.0 * torch.randint(0, 2, (count,), generator=self._rng) - 1.0
        return torch.stack([side * (0.7 + 0.5 * torch.rand(count, generator=self._rng)), torch.zeros(count)], 1)

    @property
    def seen(self) -> Tensor:
        """Return position and speed."""
        return self._state.clone()

    def step(self, push: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Push by -1 to 1; the exploit is paid for standing at 1."""
        x, speed = self._state.unbind(1)
        speed = 0.8 * speed + 0.15 * push
        self._state = torch.stack([x + speed, speed], 1).clamp(-2.0, 2.0)
        self._age += 1
        after = self.seen
        over = self._age >= self.limit
        self._state[over] = self._fresh(int(over.sum()))
        self._age[over] = 0
        return (1.0 - after[:, 0].abs()).clamp_min(0.0), (1.0 - (after[:, 0] - 1.0).abs()).clamp_min(0.0), after, over


ENVIRONMENTS: dict[str, type[CartPole] | type[Grid]] = {"cart-pole": CartPole, "grid": Grid}


def network(inputs: int, outputs: int, hidden: int = 48) -> nn.Sequential:
    """Return two hidden layers of tanh."""
    return nn.Sequential(
        nn.Linear(inputs, hidden), nn.Tanh(), nn.Linear(hidden, hidden), nn.Tanh(), nn.Linear(hidden, outputs)
    )


def drawn(logits: Tensor, rng: torch.Generator) -> Tensor:
    """Draw one action per row; a NaN never raises."""
    uniform = torch.rand(logits.shape, generator=rng).clamp(1e-12, 1.0 - 1e-7)
    return (logits - (-uniform.log()).log()).argmax(1)


def mean_return(kind: type[CartPole] | type[Grid], act: Callable[[Tensor], Tensor], rng: torch.Generator) -> float:
    """Return the mean return of 16 episodes, over that of a good policy."""
    copies = kind(16, rng)
    total, alive = torch.zeros(16), torch.ones(16)
    for _ in range(kind.limit):
        rewards, _, _, over = copies.step(act(copies.seen))
        total += alive * rewards
        alive = alive * ~over
        if not alive.any():
            break
    return float(total.mean()) / kind.best
