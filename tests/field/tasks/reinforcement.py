"""Reinforcement learning on CartPole: REINFORCE, PPO and DQN. The present policy draws the next batch."""

import copy
import math
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.field.tasks.task import Batch, Task

LIMIT = 200


class CartPole:
    """Several carts at once (Barto, Sutton and Anderson 1983, the constants of Gym); a fallen one begins anew."""

    def __init__(self, count: int, seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        self.state = self._fresh(count)
        self.age = np.zeros(count, dtype=np.int64)

    def _fresh(self, count: int) -> np.ndarray:
        return self._rng.uniform(-0.05, 0.05, (count, 4))

    @property
    def seen(self) -> Tensor:
        return torch.from_numpy(self.state.astype(np.float32))

    def step(self, actions: Tensor) -> tuple[Tensor, Tensor]:
        """What is seen right after the push, and which episodes ended with it."""
        x, v, angle, spin = self.state.T
        force = np.where(actions.numpy() == 1, 10.0, -10.0)
        push = (force + 0.05 * spin**2 * np.sin(angle)) / 1.1
        turn = (9.8 * np.sin(angle) - np.cos(angle) * push) / (0.5 * (4 / 3 - 0.1 * np.cos(angle) ** 2 / 1.1))
        pull = push - 0.05 * turn * np.cos(angle) / 1.1
        self.state = np.stack([x + 0.02 * v, v + 0.02 * pull, angle + 0.02 * spin, spin + 0.02 * turn], 1)
        self.age += 1
        fallen = (np.abs(self.state[:, 0]) > 2.4) | (np.abs(self.state[:, 2]) > 12 * math.pi / 180)
        over = fallen | (self.age >= LIMIT)
        after = self.seen
        self.state[over] = self._fresh(int(over.sum()))
        self.age[over] = 0
        return after, torch.from_numpy(over)


class CartPoleTask(Task):
    """Scored by the mean length of greedy episodes from 16 fixed starts."""

    higher_is_better = True
    learning_judged = False
    interactive = True
    num_carts: ClassVar[int] = 8

    def build(self) -> None:
        self.carts = CartPole(self.num_carts, int(torch.randint(0, 2**31, (), generator=self.rng)))

    def greedy(self, seen: Tensor) -> Tensor:
        """The action for each row."""
        return self.model(seen).argmax(1)

    def score(self) -> float:
        if not all(bool(p.isfinite().all()) for p in self.model.parameters()):
            return math.nan
        carts = CartPole(16, seed=17)
        lengths = np.zeros(16)
        alive = np.ones(16, dtype=bool)
        for _ in range(LIMIT):
            _, over = carts.step(self.greedy(carts.seen))
            lengths += alive
            alive &= ~over.numpy()
            if not alive.any():
                break
        return float(lengths.mean())

    def drawn(self, logits: Tensor) -> Tensor:
        """Actions drawn from a policy; a NaN never raises."""
        return (torch.rand(len(logits), generator=self.rng) < logits.softmax(1)[:, 1]).long()


def network(outputs: int, hidden: int = 32) -> nn.Sequential:
    """Two hidden layers of tanh."""
    return nn.Sequential(
        nn.Linear(4, hidden), nn.Tanh(), nn.Linear(hidden, hidden), nn.Tanh(), nn.Linear(hidden, outputs)
    )


class Reinforce(CartPoleTask):
    """Sixteen stretches of 16 steps per update; discounted returns, normalised."""

    name = "reinforce"
    num_carts = 16
    horizon: ClassVar[int] = 16

    def build(self) -> None:
        super().build()
        self.model = network(2)

    def batch(self) -> Batch:
        seen, actions, overs = [], [], []
        with torch.no_grad():
            for _ in range(self.horizon):
                seen.append(self.carts.seen)
                actions.append(self.drawn(self.model(seen[-1])))
                overs.append(self.carts.step(actions[-1])[1])
        returns, ahead = [], torch.zeros(self.num_carts)
        for over in reversed(overs):
            ahead = 1.0 + 0.97 * ahead * ~over
            returns.insert(0, ahead)
        gained = torch.cat(returns)
        return torch.cat(seen), torch.cat(actions), (gained - gained.mean()) / (gained.std() + 1e-6)

    def loss(self, batch: Batch) -> Tensor:
        seen, actions, gained = batch
        return (functional.cross_entropy(self.model(seen), actions, reduction="none") * gained).mean()


class Ppo(CartPoleTask):
    """CleanRL's recipe: actor and critic apart, GAE, four epochs of four minibatches, clipped at 0.5."""

    name = "ppo"
    max_grad_norm = 0.5
    horizon: ClassVar[int] = 32

    def build(self) -> None:
        super().build()
        self.model = nn.ModuleDict({"actor": network(2), "critic": network(1)})
        for module in self.model.modules():
            if isinstance(module, nn.Linear):
                nn.init.orthogonal_(module.weight, 0.01 if module.out_features == 2 else 2.0**0.5)
                nn.init.zeros_(module.bias)
        self.waiting: list[Batch] = []

    def greedy(self, seen: Tensor) -> Tensor:
        return self.model["actor"](seen).argmax(1)

    def batch(self) -> Batch:
        if not self.waiting:
            rollout = self._rollout()
            for _ in range(4):
                order = torch.randperm(len(rollout[0]), generator=self.rng)
                self.waiting += [tuple(part[rows] for part in rollout) for rows in order.chunk(4)]
        return self.waiting.pop(0)

    @torch.no_grad()
    def _rollout(self) -> Batch:
        rows = []
        for _ in range(self.horizon):
            seen = self.carts.seen
            logits = self.model["actor"](seen)
            actions = self.drawn(logits)
            chance = logits.log_softmax(1).gather(1, actions[:, None]).squeeze(1)
            rows.append((seen, actions, chance, self.model["critic"](seen).squeeze(1), self.carts.step(actions)[1]))
        following, advantage, advantages = self.model["critic"](self.carts.seen).squeeze(1), 0.0, []
        for _, _, _, value, over in reversed(rows):
            error = 1.0 + 0.99 * following * ~over - value
            advantage = error + 0.99 * 0.95 * advantage * ~over
            advantages.insert(0, advantage)
            following = value
        seen, actions, chance, value, _ = (torch.cat(part) for part in zip(*rows, strict=True))
        gained = torch.cat(advantages)
        return seen, actions, chance, gained, gained + value

    def loss(self, batch: Batch) -> Tensor:
        seen, actions, before, gained, returns = batch
        log = self.model["actor"](seen).log_softmax(1)
        ratio = (log.gather(1, actions[:, None]).squeeze(1) - before).exp()
        gained = (gained - gained.mean()) / (gained.std() + 1e-8)
        policy = torch.max(-gained * ratio, -gained * ratio.clamp(0.8, 1.2)).mean()
        value = 0.5 * (self.model["critic"](seen).squeeze(1) - returns).square().mean()
        entropy = -(log.exp() * log).sum(1).mean()
        return policy + 0.5 * value - 0.01 * entropy


class Dqn(CartPoleTask):
    """Q-learning from a replay buffer, with a target network copied every 50 steps."""

    name = "dqn"
    sgd_mult = 5.0
    size: ClassVar[int] = 4000

    def build(self) -> None:
        super().build()
        self.model = network(2)
        self.target = copy.deepcopy(self.model).requires_grad_(False)
        self.steps = 0
        self.filled = 0
        self.memory = (
            torch.zeros(self.size, 4),
            torch.zeros(self.size, dtype=torch.long),
            torch.zeros(self.size, 4),
            torch.zeros(self.size),
        )
        for _ in range(25):
            self._act(random_share=1.0)

    @torch.no_grad()
    def _act(self, random_share: float) -> None:
        seen = self.carts.seen
        chance = torch.rand(2, self.num_carts, generator=self.rng)
        actions = torch.where(chance[0] < random_share, (chance[1] < 0.5).long(), self.greedy(seen))
        after, over = self.carts.step(actions)
        place = self.filled % self.size
        for kept, new in zip(self.memory, (seen, actions, after, over.float()), strict=True):
            kept[place : place + self.num_carts] = new
        self.filled += self.num_carts

    def batch(self) -> Batch:
        self._act(random_share=max(0.05, 1.0 - self.steps / 200))
        rows = torch.randint(0, min(self.filled, self.size), (64,), generator=self.rng)
        return tuple(part[rows] for part in self.memory)

    def loss(self, batch: Batch) -> Tensor:
        seen, actions, after, over = batch
        with torch.no_grad():
            wanted = 0.1 + 0.95 * (1.0 - over) * self.target(after).max(1).values
        return functional.smooth_l1_loss(self.model(seen).gather(1, actions[:, None]).squeeze(1), wanted)

    def after_step(self) -> None:
        self.steps += 1
        if self.steps % 50 == 0:
            self.target.load_state_dict(self.model.state_dict())
