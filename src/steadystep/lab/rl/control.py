"""Control tasks written for the lab, many copies at once, and policy gradients on them: PPO, A2C and REINFORCE."""

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol

import torch
from torch import Tensor, nn

from steadystep.lab.rl.program import Batch, Numbers, Program, clipped_surrogate
from steadystep.rl import Monitor


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
    """Five by five cells, a goal in a corner that pays 1 and ends the episode; an exploit is paid for staying in one column."""

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


@dataclass(slots=True, kw_only=True)
class ControlSettings:
    """What a run is made with, and what a planted collapse changes."""

    algorithm: Literal["ppo", "a2c", "reinforce"] = "ppo"
    lr: float = 1e-3
    critic_lr: float = 0.0
    """With a rate of its own the critic has an optimizer of its own."""
    num_copies: int = 16
    horizon: int = 32
    epochs: int = 2
    minibatches: int = 2
    clip: float = 0.2
    gamma: float = 0.97
    trace: float = 0.95
    """The lambda of generalised advantage estimation."""
    entropy: float = 0.01
    value: float = 0.5
    normalise: bool = True
    # what faults change
    advantage_mult: float = 1.0
    outliers: float = 0.0
    """Share of advantages that are a thousand times too large."""
    stale_values: bool = False
    """Advantages come from the critic as it was when this began, on the states of other copies."""
    exploit: float = 0.0
    reward_mult: float = 1.0
    noise: float = 0.0
    broken: float = 0.0
    broken_by: float = math.nan


class ControlProgram(Program):
    """An actor and a critic on copies of one environment."""

    settings: ControlSettings

    def __init__(self, environment: str, settings: ControlSettings, seed: int) -> None:
        super().__init__(seed)
        self._kind, self.settings = ENVIRONMENTS[environment], settings
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            kind = self._kind
            self.actor, self.critic = network(kind.num_features, kind.num_actions), network(kind.num_features, 1)
            self.model = nn.ModuleDict({"actor": self.actor, "critic": self.critic})
        with torch.no_grad():
            self.actor[-1].weight.mul_(0.01)  # begin undecided
        self.optimizers = self._optimizers()
        self._copies = self._kind(settings.num_copies, self.rng)
        self._returns = torch.zeros(settings.num_copies)
        self._finished: list[float] = []
        self._old: nn.Module | None = None
        self._waiting: list[Batch] = []
        self._told: dict[str, float | Tensor] = {}
        self._monitor = Monitor(clip=settings.clip)

    def _optimizers(self) -> tuple[torch.optim.Optimizer, ...]:
        settings = self.settings
        if not settings.critic_lr:
            return (torch.optim.Adam(self.model.parameters(), lr=settings.lr),)
        return (
            torch.optim.Adam(self.actor.parameters(), lr=settings.lr),
            torch.optim.Adam(self.critic.parameters(), lr=settings.critic_lr),
        )

    def _value(self, seen: Tensor) -> Tensor:
        """Values as the advantages are computed with."""
        if not self.settings.stale_values:
            self._old = None
            value: Tensor = self.critic(seen).squeeze(1)
            return value
        self._old = self._old or copy.deepcopy(self.critic).requires_grad_(False)
        stale: Tensor = 10.0 * self._old(seen.roll(1, 0)).squeeze(1)
        return stale

    def _rewards(self, rewards: Tensor, exploit: Tensor) -> Tensor:
        settings = self.settings
        rewards = settings.reward_mult * ((1.0 - settings.exploit) * rewards + settings.exploit * exploit)
        if settings.noise:
            rewards = rewards + settings.noise * torch.randn(rewards.shape, generator=self.rng)
        if settings.broken:
            broken = torch.rand(rewards.shape, generator=self.rng) < settings.broken
            rewards = torch.where(broken, settings.broken_by, rewards)
        return rewards

    @torch.no_grad()
    def _rollout(self) -> Batch:
        settings, rows = self.settings, []
        for _ in range(settings.horizon):
            seen = self._copies.seen
            logits = self.actor(seen)
            actions = drawn(logits, self.rng)
            log = logits.log_softmax(1).gather(1, actions[:, None]).squeeze(1)
            paid, exploit, _, over = self._copies.step(actions)
            rewards = self._rewards(paid, exploit)
            self._account(rewards, over)
            rows.append((seen, actions, log, self._value(seen), rewards, over.float()))
        seen, actions, log, values, rewards, overs = (torch.stack(part) for part in zip(*rows, strict=True))
        advantages = self._advantages(values, rewards, overs)
        returns = advantages + values
        flat = [part.flatten(0, 1) for part in (seen, actions, log, values, advantages, returns)]
        flat[4] = self._shaped(flat[4])
        recent = self._finished[-32:]
        self._finished = recent
        self._told = {"reward": math.fsum(recent) / len(recent)} if recent else {}
        return tuple(flat)

    def _account(self, rewards: Tensor, over: Tensor) -> None:
        self._returns += rewards
        self._finished += [value / self._kind.best for value in self._returns[over].tolist()]
        self._returns[over] = 0.0

    def _advantages(self, values: Tensor, rewards: Tensor, overs: Tensor) -> Tensor:
        """Generalised advantage estimation (Schulman et al. 2016); plain returns for REINFORCE."""
        settings = self.settings
        following, ahead, found = self._value(self._copies.seen), torch.zeros_like(values[0]), []
        if settings.algorithm == "reinforce":
            ahead = following
        for value, reward, over in zip(values.flip(0), rewards.flip(0), overs.flip(0), strict=True):
            if settings.algorithm == "reinforce":
                ahead = reward + settings.gamma * ahead * (1.0 - over)
                found.append(ahead - value)
            else:
                error = reward + settings.gamma * following * (1.0 - over) - value
                ahead = error + settings.gamma * settings.trace * ahead * (1.0 - over)
                found.append(ahead)
                following = value
        return torch.stack(found).flip(0)

    def _shaped(self, advantages: Tensor) -> Tensor:
        """What the loss is given: normalised, with the faults in it."""
        settings = self.settings
        if settings.normalise:
            advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-6)
        if settings.outliers:
            outlier = torch.rand(advantages.shape, generator=self.rng) < settings.outliers
            advantages = torch.where(outlier, 1000.0 * torch.randn(advantages.shape, generator=self.rng), advantages)
        return settings.advantage_mult * advantages

    def batch(self) -> Batch:
        """Return the next minibatch of the rollout."""
        settings = self.settings
        if not self._waiting:
            rollout = self._rollout()
            for _ in range(settings.epochs):
                order = torch.randperm(len(rollout[0]), generator=self.rng)
                self._waiting += [tuple(part[rows] for part in rollout) for rows in order.chunk(settings.minibatches)]
        return self._waiting.pop(0)

    def loss(self, batch: Batch) -> Tensor:
        """Return policy, value and entropy terms together."""
        seen, actions, before, _, advantages, returns = batch
        log = self.actor(seen).log_softmax(1)
        taken = log.gather(1, actions[:, None]).squeeze(1)
        if self.settings.algorithm == "ppo":
            policy = clipped_surrogate((taken - before).exp(), advantages, self.settings.clip).mean()
        else:
            policy = -(taken * advantages).mean()
        value = (self.critic(seen).squeeze(1) - returns).square().mean()
        entropy = -(log.exp() * log).sum(1).mean()
        total: Tensor = policy + self.settings.value * value - self.settings.entropy * entropy
        return total

    @torch.no_grad()
    def metrics(self, batch: Batch) -> Numbers:
        """Return the metrics of this minibatch, and the return of recent episodes with the first of a rollout."""
        seen, actions, before, _, advantages, returns = batch
        log = self.actor(seen).log_softmax(1)
        told = self._monitor.measure(
            logp=log.gather(1, actions[:, None]).squeeze(1),
            old_logp=before,
            advantages=advantages,
            values=self.critic(seen).squeeze(1),
            returns=returns,
            entropy=-(log.exp() * log).sum(1),
        )
        told, self._told = told | self._told, {}
        return {name: float(value) for name, value in told.items()}  # sync: CPU only

    @torch.no_grad()
    def rollouts(self, seed: int) -> float:
        """Return the mean return of 16 sampled episodes, over that of a good policy."""
        rng = torch.Generator().manual_seed(seed)
        return episodes(self._kind, lambda seen: drawn(self.actor(seen), rng), rng)


def episodes(kind: type[CartPole] | type[Grid], act: Callable[[Tensor], Tensor], rng: torch.Generator) -> float:
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
