"""Learning from a replay buffer: DQN with a target network, and a soft actor-critic with three optimizers.

DQN: Mnih et al. 2015; actions by a decaying share at random. SAC: Haarnoja et al. 2018, two critics and a learned
temperature. Its three losses are one sum: each reaches only its own parameters, so that one backward pass and one
decision serve actor, critics and temperature.
"""

import copy
import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

from steadystep.lab.rl.program import (
    ENVIRONMENTS,
    Batch,
    Numbers,
    Point,
    Program,
    RewardFaults,
    drawn,
    mean_return,
    network,
)


class Memory:
    """The last transitions, oldest overwritten first."""

    def __init__(self, size: int) -> None:
        self._size, self._parts, self._filled = size, list[Tensor](), 0

    def add(self, *parts: Tensor) -> None:
        """Store one transition per row."""
        if not self._parts:
            self._parts = [torch.zeros(self._size, *part.shape[1:], dtype=part.dtype) for part in parts]
        rows = (self._filled + torch.arange(len(parts[0]))) % self._size
        for kept, part in zip(self._parts, parts, strict=True):
            kept[rows] = part
        self._filled += len(parts[0])

    def draw(self, count: int, rng: torch.Generator) -> Batch:
        """Return some of them, drawn with replacement."""
        rows = torch.randint(0, min(self._filled, self._size), (count,), generator=rng)
        return tuple(part[rows] for part in self._parts)


@dataclass(slots=True, kw_only=True)
class ReplaySettings(RewardFaults):
    """What a run is made with, and what a planted collapse changes."""

    lr: float = 1e-3
    gamma: float = 0.95
    size: int = 4000
    batch_size: int = 64
    num_copies: int = 8
    target_every: int = 25
    """Updates between two copies of the network to the target (DQN); 0 moves it a little at each one, as in SAC."""
    tau: float = 0.02
    """Share of the network that the target takes over at each update."""
    double: bool = False
    """The network chooses the next action and the target values it (van Hasselt et al. 2016)."""
    explore_steps: int = 150
    target_entropy: float = -1.0
    # what faults change
    online_target: bool = False
    """The next value comes from the network itself, terminal states included: nothing anchors it."""
    alpha_sign: float = 1.0
    actor_sign: float = 1.0


class ReplayProgram(Program):
    """What both share: copies of an environment, a memory, episode returns."""

    settings: ReplaySettings

    def __init__(self, settings: ReplaySettings, seed: int) -> None:
        super().__init__(seed)
        self.settings = settings
        self.memory = Memory(settings.size)
        self.updates = 0
        self._returns, self._finished = torch.zeros(settings.num_copies), list[float]()

    def paid(self, rewards: Tensor, exploit: Tensor) -> Tensor:
        """Return the rewards as the program sees them, faults included."""
        return self.settings.disturbed(self.settings.exploited(rewards, exploit), self.rng)

    def account(self, rewards: Tensor, over: Tensor, best: float) -> None:
        """Add to the returns of the running episodes."""
        self._returns += rewards
        self._finished = (self._finished + [value / best for value in self._returns[over].tolist()])[-32:]
        self._returns[over] = 0.0

    def after_step(self) -> None:
        """Count the update and move the targets."""
        self.updates += 1
        self.move_targets()

    def told(self) -> Numbers:
        """Return the mean return of recent episodes, at every fourth update."""
        if self.updates % 4 or not self._finished:
            return {}
        return {"reward": math.fsum(self._finished) / len(self._finished)}


class DQN(ReplayProgram):
    """Q-learning; the policy is greedy but for a share of random actions."""

    def __init__(self, environment: str, settings: ReplaySettings, seed: int) -> None:
        super().__init__(settings, seed)
        self._kind = ENVIRONMENTS[environment]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.model = network(self._kind.num_features, self._kind.num_actions)
        self.target = copy.deepcopy(self.model).requires_grad_(False)
        self.kept = {"target": self.target}
        self.optimizers = (torch.optim.Adam(self.model.parameters(), lr=settings.lr),)
        self._copies = self._kind(settings.num_copies, self.rng)
        for _ in range(32):
            self._act(random_share=1.0)

    @torch.no_grad()
    def _act(self, random_share: float) -> None:
        seen = self._copies.seen
        q = self.model(seen)
        random = torch.rand(len(seen), generator=self.rng) < random_share
        actions = torch.where(random, drawn(torch.zeros_like(q), self.rng), q.argmax(1))
        paid, exploit, after, over = self._copies.step(actions)
        rewards = self.paid(paid, exploit)
        self.account(rewards, over, self._kind.best)
        self.memory.add(seen, actions, rewards, after, over.float())

    def batch(self) -> Batch:
        """Act twice with each copy, then draw from the memory."""
        for _ in range(2):
            self._act(random_share=max(0.05, 1.0 - self.updates / self.settings.explore_steps))
        return self.memory.draw(self.settings.batch_size, self.rng)

    def _wanted(self, rewards: Tensor, after: Tensor, over: Tensor) -> Tensor:
        settings = self.settings
        with torch.no_grad():
            if settings.online_target:
                wanted: Tensor = rewards + self.model(after).max(1).values
            else:
                chosen = (self.model if settings.double else self.target)(after).argmax(1, keepdim=True)
                wanted = rewards + settings.gamma * (1.0 - over) * self.target(after).gather(1, chosen).squeeze(1)
        return wanted

    def loss(self, batch: Batch) -> Tensor:
        """Return the Huber loss of the temporal difference."""
        seen, actions, rewards, after, over = batch
        q = self.model(seen).gather(1, actions[:, None]).squeeze(1)
        return functional.smooth_l1_loss(q, self._wanted(rewards, after, over))

    @torch.no_grad()
    def metrics(self, batch: Batch) -> Numbers:
        """Return value loss and mean value, and the return of recent episodes now and then."""
        seen, actions, rewards, after, over = batch
        q = self.model(seen).gather(1, actions[:, None]).squeeze(1)
        wanted = self._wanted(rewards, after, over)
        return {"value_loss": float((q - wanted).square().mean()), "value_mean": float(q.mean())} | self.told()

    def move_targets(self) -> None:
        """Copy the network to the target now and then, or move the target towards it."""
        if not self.settings.target_every:
            _follow(self.target, self.model, self.settings.tau)
        elif self.updates % self.settings.target_every == 0:
            self.target.load_state_dict(self.model.state_dict())

    @torch.no_grad()
    def rollouts(self, seed: int) -> float:
        """Return the mean return of 16 greedy episodes, over that of a good policy."""
        rng = torch.Generator().manual_seed(seed)
        return mean_return(self._kind, lambda seen: self.model(seen).argmax(1), rng)


class SAC(ReplayProgram):
    """Actor, two critics and a temperature, each with an optimizer of its own."""

    def __init__(self, settings: ReplaySettings, seed: int) -> None:
        super().__init__(settings, seed)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.actor, self.critics = network(2, 2), nn.ModuleList(network(3, 1) for _ in range(2))
        self.log_alpha = nn.Parameter(torch.tensor(-1.0))
        self.model = nn.ModuleDict({"actor": self.actor, "critics": self.critics})
        self.model.register_parameter("log_alpha", self.log_alpha)
        self.targets = copy.deepcopy(self.critics).requires_grad_(False)
        self.kept = {"targets": self.targets}
        self.optimizers = (
            torch.optim.Adam(self.actor.parameters(), lr=settings.lr),
            torch.optim.Adam(self.critics.parameters(), lr=settings.lr),
            torch.optim.Adam([self.log_alpha], lr=settings.lr),
        )
        self._copies = Point(settings.num_copies, self.rng)
        for _ in range(32):
            self._act(random=True)

    def _push(self, seen: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """A squashed Gaussian, and the log-density of what was drawn."""
        mean, log_std = self.actor(seen).unbind(1)
        log_std = log_std.clamp(-5.0, 1.0)
        raw = mean + log_std.exp() * noise
        density = -0.5 * noise.square() - log_std - 0.5 * math.log(2.0 * math.pi)
        # log(1 - tanh(x)^2), in the form that does not lose digits
        return raw.tanh(), density - 2.0 * (math.log(2.0) - raw - functional.softplus(-2.0 * raw))

    @torch.no_grad()
    def _act(self, *, random: bool = False) -> None:
        seen = self._copies.seen
        push, _ = self._push(seen, torch.randn(len(seen), generator=self.rng))
        if random:
            push = 2.0 * torch.rand(len(seen), generator=self.rng) - 1.0
        paid, exploit, after, over = self._copies.step(push)
        rewards = self.paid(paid, exploit)
        self.account(rewards, over, Point.best)
        self.memory.add(seen, push, rewards, after)  # why: an episode ends by the clock only, so no state is terminal

    def batch(self) -> Batch:
        """Act once with each copy, then draw from the memory, and the noise for two draws of the policy."""
        self._act()
        drawn = self.memory.draw(self.settings.batch_size, self.rng)
        return *drawn, torch.randn(2, self.settings.batch_size, generator=self.rng)

    def _losses(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Critic, actor and temperature losses; the mean value and the mean log-density."""
        seen, push, rewards, after, noise = batch
        alpha, settings = self.log_alpha.detach().exp(), self.settings
        with torch.no_grad():
            following, density = self._push(after, noise[0])
            critics = self.critics if settings.online_target else self.targets
            ahead = torch.min(*(_q(critic, after, following) for critic in critics)) - alpha * density
            wanted = rewards + (1.02 if settings.online_target else settings.gamma) * ahead
        values = [_q(critic, seen, push) for critic in self.critics]
        critic = sum(((value - wanted).square().mean() for value in values), torch.zeros(()))
        now, density = self._push(seen, noise[1])
        worth = torch.min(*(_frozen_q(critic, seen, now) for critic in self.critics))
        actor = (alpha * density - settings.actor_sign * worth).mean()
        heat = -settings.alpha_sign * (self.log_alpha * (density.detach() + settings.target_entropy)).mean()
        return critic, actor, heat, values[0].mean(), density.mean()

    def loss(self, batch: Batch) -> Tensor:
        """Return the sum of the three losses."""
        critic, actor, heat, _, _ = self._losses(batch)
        return critic + actor + heat

    @torch.no_grad()
    def metrics(self, batch: Batch) -> Numbers:
        """Return value loss, mean value, entropy and temperature, and the return of recent episodes now and then."""
        critic, actor, _, value, density = self._losses(batch)
        told = {"value_loss": float(critic), "value_mean": float(value), "entropy": -float(density)}
        told["policy_loss"] = float(actor)
        return told | {"alpha": float(self.log_alpha.exp())} | self.told()

    @torch.no_grad()
    def move_targets(self) -> None:
        """Move the targets towards the critics."""
        _follow(self.targets, self.critics, self.settings.tau)

    @torch.no_grad()
    def rollouts(self, seed: int) -> float:
        """Return the mean return of 32 episodes with the drawn policy, over that of a good one."""
        rng = torch.Generator().manual_seed(seed)
        copies, total = Point(32, rng), torch.zeros(32)
        for _ in range(Point.limit):
            push, _ = self._push(copies.seen, torch.randn(32, generator=rng))
            total += copies.step(push)[0]
        return float(total.mean()) / Point.best


@torch.no_grad()
def _follow(target: nn.Module, network: nn.Module, share: float) -> None:
    for old, new in zip(target.parameters(), network.parameters(), strict=True):
        old.lerp_(new, share)


def _q(critic: nn.Module, seen: Tensor, push: Tensor) -> Tensor:
    out: Tensor = critic(torch.cat([seen, push[:, None]], 1)).squeeze(1)
    return out


def _frozen_q(critic: nn.Module, seen: Tensor, push: Tensor) -> Tensor:
    """With a gradient for the push and none for the critic."""
    fixed = {name: parameter.detach() for name, parameter in critic.named_parameters()}
    out: Tensor = functional_call(critic, fixed, (torch.cat([seen, push[:, None]], 1),)).squeeze(1)
    return out
