"""Policy gradients on control tasks: PPO, A2C and REINFORCE, with an actor and a critic."""

import copy
import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from steadystep.lab.rl.program import (
    ENVIRONMENTS,
    Batch,
    Numbers,
    Program,
    RewardFaults,
    clipped_surrogate,
    drawn,
    mean_return,
    network,
)
from steadystep.rl import Monitor


@dataclass(slots=True, kw_only=True)
class ControlSettings(RewardFaults):
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
            list(self.actor.parameters())[-2].mul_(0.01)  # the weights of the last layer: begin undecided
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

    @torch.no_grad()
    def _rollout(self) -> Batch:
        settings, rows = self.settings, []
        for _ in range(settings.horizon):
            seen = self._copies.seen
            logits = self.actor(seen)
            actions = drawn(logits, self.rng)
            log = logits.log_softmax(1).gather(1, actions[:, None]).squeeze(1)
            paid, exploit, _, over = self._copies.step(actions)
            rewards = settings.disturbed(settings.exploited(paid, exploit), self.rng)
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
        return mean_return(self._kind, lambda seen: drawn(self.actor(seen), rng), rng)
