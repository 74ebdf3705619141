"""CartPole by hand, and PPO and DQN as CleanRL writes them, small enough to train in seconds."""

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributions import Categorical
from torch.nn import functional

from tests.seen.tasks import generators, mlp
from tests.seen.twins import Drive


class CartPole:
    """`count` poles at once; an episode ends when one falls, leaves the track, or after 500 steps."""

    def __init__(self, count: int, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.state = self._fresh(count)
        self.age = np.zeros(count, dtype=int)
        self.lengths: list[int] = []
        """Of the episodes that have ended: what an agent earned."""

    def _fresh(self, count: int) -> np.ndarray:
        return self.rng.uniform(-0.05, 0.05, (count, 4))

    def step(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Push each cart left or right; gives the states and which episodes ended, those begun anew."""
        x, speed, angle, turning = self.state.T
        force = np.where(actions == 1, 10.0, -10.0)
        cos, sin = np.cos(angle), np.sin(angle)
        push = (force + 0.05 * turning**2 * sin) / 1.1
        spin = (9.8 * sin - cos * push) / (0.5 * (4.0 / 3.0 - 0.1 * cos**2 / 1.1))
        slide = push - 0.05 * spin * cos / 1.1
        moved = np.stack([x + 0.02 * speed, speed + 0.02 * slide, angle + 0.02 * turning, turning + 0.02 * spin], 1)
        self.age += 1
        done = (np.abs(moved[:, 0]) > 2.4) | (np.abs(moved[:, 2]) > 12 * math.pi / 180) | (self.age >= 500)
        self.lengths += self.age[done].tolist()
        moved[done] = self._fresh(int(done.sum()))
        self.age[done] = 0
        self.state = moved
        return moved, done


def _earned(act: nn.Module, episodes: int = 8) -> float:
    """What the greedy policy loses to a perfect one: 0 is best, as with a loss."""
    env = CartPole(episodes, seed=12_345)
    for _ in range(500):
        env.step(act(torch.from_numpy(env.state).float()).argmax(1).numpy())
        if len(env.lengths) >= episodes:
            break
    return 1.0 - float(np.mean([*env.lengths, *env.age[env.age >= 500]] or [500])) / 500


class Agent(nn.Module):
    """Two tanh nets with orthogonal weights, as in ppo.py."""

    def __init__(self) -> None:
        super().__init__()
        self.actor, self.critic = mlp(4, 64, 64, 2, act=nn.Tanh), mlp(4, 64, 64, 1, act=nn.Tanh)
        for net, last in ((self.actor, 0.01), (self.critic, 1.0)):
            layers = [layer for layer in net if isinstance(layer, nn.Linear)]
            for layer in layers:
                nn.init.orthogonal_(layer.weight, last if layer is layers[-1] else math.sqrt(2))
                nn.init.zeros_(layer.bias)


@dataclass(frozen=True)
class PPO:
    """ppo.py: 4 environments, 128 steps, 4 epochs of 4 minibatches, lr 2.5e-4 annealed, clip 0.2, norm 0.5, Adam."""

    iterations: int = 40
    lr: float = 2.5e-4

    def __call__(self, seed: int, drive: Drive) -> None:
        rng = torch.Generator().manual_seed(seed)
        agent, env = Agent(), CartPole(4, seed)
        optimizer = torch.optim.Adam(agent.parameters(), lr=self.lr, eps=1e-5)
        drive.ends(lambda: _earned(agent.actor), agent)
        update = drive.over(agent, optimizer, clip=0.5)
        for iteration in range(self.iterations):
            optimizer.param_groups[0]["lr"] = (1.0 - iteration / self.iterations) * self.lr
            seen = self._roll_out(agent, env, rng)
            for _ in range(4):
                for rows in torch.randperm(512, generator=rng).split(128):
                    update(lambda b: self._loss(agent, *b), tuple(part[rows] for part in seen))

    @torch.no_grad()
    def _roll_out(self, agent: Agent, env: CartPole, rng: torch.Generator) -> tuple[Tensor, ...]:
        obs, acts, logs, values, ends = (torch.zeros(128, 4, *more) for more in ((4,), (), (), (), ()))
        done = np.zeros(4)
        for t in range(128):
            obs[t], ends[t] = torch.from_numpy(env.state), torch.from_numpy(done.astype(float))
            policy = agent.actor(obs[t]).log_softmax(1)
            action = torch.multinomial(policy.exp(), 1, generator=rng).squeeze(1)
            acts[t], logs[t] = action, policy.gather(1, action[:, None]).squeeze(1)
            values[t] = agent.critic(obs[t]).squeeze(1)
            _, done = env.step(action.numpy())
        after, over = agent.critic(torch.from_numpy(env.state).float()).squeeze(1), torch.from_numpy(done.astype(float))
        gains, last = torch.zeros(128, 4), torch.zeros(4)
        for t in reversed(range(128)):
            alive = 1.0 - (over if t == 127 else ends[t + 1])
            ahead = after if t == 127 else values[t + 1]
            last = 1.0 + 0.99 * ahead * alive - values[t] + 0.99 * 0.95 * alive * last
            gains[t] = last.float()
        flat = (obs.reshape(-1, 4), acts.reshape(-1), logs.reshape(-1), gains.reshape(-1), values.reshape(-1))
        return (*flat, flat[3] + flat[4])

    def _loss(
        self, agent: Agent, obs: Tensor, acts: Tensor, logs: Tensor, gains: Tensor, values: Tensor, returns: Tensor
    ) -> Tensor:
        policy = Categorical(logits=agent.actor(obs), validate_args=False)
        ratio = (policy.log_prob(acts) - logs).exp()
        gains = (gains - gains.mean()) / (gains.std() + 1e-8)
        policy_loss = torch.max(-gains * ratio, -gains * ratio.clamp(0.8, 1.2)).mean()
        value = agent.critic(obs).squeeze(1)
        near = values + (value - values).clamp(-0.2, 0.2)
        value_loss = 0.5 * torch.max((value - returns).square(), (near - returns).square()).mean()
        return policy_loss - 0.01 * policy.entropy().mean() + 0.5 * value_loss


@dataclass(frozen=True)
class DQN:
    """dqn.py: 120-84 ReLU, Adam 2.5e-4, batches of 128 from a replay buffer, a target network copied now and then."""

    steps: int = 1200
    copy_every: int = 100
    lr: float = 1e-3

    def __call__(self, seed: int, drive: Drive) -> None:
        rng, _ = generators(seed)
        dice = np.random.default_rng(seed)
        model, target = mlp(4, 120, 84, 2), mlp(4, 120, 84, 2)
        target.load_state_dict(model.state_dict())
        optimizer = torch.optim.Adam(model.parameters(), lr=self.lr)
        drive.ends(lambda: _earned(model), model)
        update = drive.over(model, optimizer)
        env, kept = CartPole(1, seed), _Replay(10_000)
        start, total = 500, 500 + 2 * self.steps
        for t in range(total):
            before = env.state
            greedy = dice.random() >= max(0.05, 1.0 - 0.95 * t / (0.5 * total))
            with torch.no_grad():
                best = int(model(torch.from_numpy(before).float()).argmax()) if greedy else int(dice.integers(2))
            after, done = env.step(np.array([best]))
            kept.add(before[0], best, after[0], done[0])
            if t < start or t % 2:
                continue
            update(lambda b: self._loss(model, target, *b), kept.sample(128, rng))
            if t // 2 % self.copy_every == 0:
                target.load_state_dict(model.state_dict())

    def _loss(
        self, model: nn.Module, target: nn.Module, obs: Tensor, acts: Tensor, after: Tensor, done: Tensor
    ) -> Tensor:
        with torch.no_grad():
            goal = 1.0 + 0.99 * target(after).max(1).values * (1.0 - done)
        return functional.mse_loss(model(obs).gather(1, acts[:, None]).squeeze(1), goal)


class _Replay:
    def __init__(self, size: int) -> None:
        self.obs, self.after = torch.zeros(size, 4), torch.zeros(size, 4)
        self.acts, self.done = torch.zeros(size, dtype=torch.long), torch.zeros(size)
        self.count = 0

    def add(self, obs: np.ndarray, act: int, after: np.ndarray, done: bool) -> None:
        at = self.count % len(self.done)
        self.obs[at], self.after[at] = torch.from_numpy(obs), torch.from_numpy(after)
        self.acts[at], self.done[at] = act, float(done)
        self.count += 1

    def sample(self, size: int, rng: torch.Generator) -> tuple[Tensor, ...]:
        rows = torch.randint(min(self.count, len(self.done)), (size,), generator=rng)
        return self.obs[rows], self.acts[rows], self.after[rows], self.done[rows]
