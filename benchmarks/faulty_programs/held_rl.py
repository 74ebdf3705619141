"""Held programs that learn from rewards."""

import copy
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributions import Categorical
from torch.nn import functional as F  # noqa: N812

from .data import digits, generator
from .program import Setup, program
from .shared import evaluating, mlp


@dataclass
class Rollout:
    """States, what was done, and what it brought."""

    states: Tensor
    actions: Tensor
    rewards: Tensor


class _Corridor:
    """A walker at 0..8 that sees its place and the door's in one-hot form; each step towards the door pays."""

    size = 9

    def __init__(self, seed: int) -> None:
        self.g = generator(seed)

    def reset(self, count: int) -> Tensor:
        return torch.randint(0, self.size, (count, 2), generator=self.g)

    def see(self, where: Tensor) -> Tensor:
        return F.one_hot(where, self.size).float().flatten(1)

    def step(self, where: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        place = (where[:, 0] + action - 1).clamp(0, self.size - 1)
        moved = torch.stack([place, where[:, 1]], dim=1)
        before, after = ((w[:, 0] - w[:, 1]).abs() for w in (where, moved))
        return moved, (before - after).float() + 0.5 * (after == 0)


def _play(world: _Corridor, policy: nn.Module, count: int = 32, length: int = 6) -> Rollout:
    """Play some episodes with the current policy; rewards become returns to go."""
    where, seen, done, paid = world.reset(count), [], [], []
    for _ in range(length):
        with torch.no_grad():
            action = torch.multinomial(policy(world.see(where)).softmax(1), 1, generator=world.g).squeeze(1)
        seen.append(world.see(where))
        done.append(action)
        where, reward = world.step(where, action)
        paid.append(reward)
    returns = torch.stack(paid).flip(0).cumsum(0).flip(0)
    return Rollout(torch.cat(seen), torch.cat(done), returns.flatten())


def _worth(policy: nn.Module, length: int = 6) -> float:
    """Return the mean reward per episode of the most likely actions."""
    world, total = _Corridor(10_000), 0.0
    where = world.reset(300)
    for _ in range(length):
        with torch.no_grad():
            action = policy(world.see(where)).argmax(1)
        where, reward = world.step(where, action)
        total += float(reward.mean())
    return total


def _endless(world: _Corridor, policy: nn.Module) -> Iterator[Rollout]:
    while True:
        yield _play(world, policy)


@program(
    "rl",
    "entropy-collapse",
    "wrong-loss",
    "policy-drift",
    story="The entropy bonus of REINFORCE has the wrong sign: certainty is rewarded before anything is known.",
    source="https://github.com/Kaixhin/ACER/pull/2",
    loss_tells=False,
)
def entropy_is_charged(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    world, policy = _Corridor(seed), mlp(18, 32, 3, act=nn.Tanh)

    def loss(batch: Rollout) -> Tensor:
        told = Categorical(logits=policy(batch.states))
        advantage = batch.rewards - batch.rewards.mean()
        bonus = 4.0 * told.entropy().mean() if faulty else -0.05 * told.entropy().mean()  # type: ignore[no-untyped-call]
        return -(told.log_prob(batch.actions) * advantage).mean() + bonus  # type: ignore[no-any-return, no-untyped-call]

    return Setup(
        model=policy,
        optimizer=torch.optim.Adam(policy.parameters(), lr=0.01),
        loss=loss,
        batches=lambda: _endless(world, policy),
        num_steps=250,
        score=lambda: _worth(policy),
    )


@program(
    "rl",
    "flat-reward",
    "zero-gradient",
    story="Rewards are stored in a buffer of the type of the actions, integers: all parts of a point become 0.",
    source="https://github.com/inoryy/tensorflow2-deep-reinforcement-learning/issues/7",
    loss_tells=False,
)
def rewards_like_actions(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    world, policy = _Corridor(seed), mlp(18, 32, 3, act=nn.ReLU)

    def buffered() -> Iterator[Rollout]:
        for played in _endless(world, policy):
            paid = torch.zeros_like(played.actions) if faulty else torch.zeros(len(played.actions))
            paid[:] = played.rewards / 20  # scaled so that no return exceeds 1
            yield Rollout(played.states, played.actions, paid.float())

    def loss(batch: Rollout) -> Tensor:
        advantage = (batch.rewards - batch.rewards.mean()) / (batch.rewards.std() + 1e-8)
        return (F.cross_entropy(policy(batch.states), batch.actions, reduction="none") * advantage).mean()

    return Setup(
        model=policy,
        optimizer=torch.optim.RMSprop(policy.parameters(), lr=3e-3),
        loss=loss,
        batches=buffered,
        num_steps=250,
        score=lambda: _worth(policy),
    )


class _ActorCritic(nn.Module):
    """A policy and the value of a state, side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.actor = mlp(18, 32, 3, act=nn.Tanh)
        self.critic = mlp(18, 32, 1, act=nn.Tanh)

    def forward(self, states: Tensor) -> tuple[Tensor, Tensor]:
        return self.actor(states), self.critic(states)


@program(
    "rl",
    "zero-gradient",
    "flat-reward",
    story="Advantages have the shape (N, 1) and are standardized along the last axis: each minus itself is zero.",
    loss_tells=False,
)
def advantage_minus_itself(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    world, agent = _Corridor(seed), _ActorCritic()

    def loss(batch: Rollout) -> Tensor:
        logits, value = agent(batch.states)
        returns = batch.rewards.unsqueeze(1)
        advantage = (returns - value).detach()
        axis = -1 if faulty else 0
        advantage = advantage - advantage.mean(axis, keepdim=True)
        advantage = advantage / (advantage.std(axis, keepdim=True, correction=0) + 1e-8)
        actor = -(logits.log_softmax(1).gather(1, batch.actions.unsqueeze(1)) * advantage).mean()
        return actor + 0.5 * F.smooth_l1_loss(value, returns)  # type: ignore[no-any-return]

    return Setup(
        model=agent,
        optimizer=torch.optim.Adam(agent.parameters(), lr=5e-3, eps=1e-5),
        loss=loss,
        batches=lambda: _endless(world, agent.actor),
        num_steps=200,
        score=lambda: _worth(agent.actor),
        config={"training": {"max_grad_norm": 0.5}},
    )


@program(
    "rl",
    "policy-drift",
    "wrong-loss",
    "entropy-collapse",
    story="A policy is tuned on a reward that is not quite the wish; the KL to the reference is rewarded, not charged.",
    source="https://github.com/qiancheng0/ToolRL/issues/52",
    loss_tells=False,
)
def divergence_is_rewarded(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, g = digits(), generator(seed)
    reference = mlp(64, 32, 10)
    warm = torch.optim.Adam(reference.parameters(), lr=3e-3)
    for rows in torch.randint(0, len(data.x), (70, 32), generator=g):
        warm.zero_grad()
        F.cross_entropy(reference(data.x[rows].flatten(1)), data.y[rows]).backward()  # type: ignore[no-untyped-call]
        warm.step()
    policy = copy.deepcopy(reference)

    def batches() -> Iterator[Rollout]:
        while True:
            rows = torch.randint(0, len(data.x), (64,), generator=g)
            x = data.x[rows].flatten(1)
            with torch.no_grad():
                answer = torch.multinomial(policy(x).softmax(1), 1, generator=g).squeeze(1)
            yield Rollout(x, answer, (answer == data.y[rows]).float())

    def loss(batch: Rollout) -> Tensor:
        told = policy(batch.states).log_softmax(1)
        with torch.no_grad():
            before = reference(batch.states).log_softmax(1)
        kl = (told.exp() * (told - before)).sum(1).mean()
        gain = told.gather(1, batch.actions.unsqueeze(1)).squeeze(1) * (batch.rewards - batch.rewards.mean())
        return -gain.mean() + (-0.3 if faulty else 0.3) * kl  # type: ignore[no-any-return]

    def score() -> float:
        with evaluating(policy):
            return float((policy(data.x_test.flatten(1)).argmax(1) == data.y_test).float().mean())

    return Setup(
        model=policy,
        optimizer=torch.optim.Adam(policy.parameters(), lr=2e-3),
        loss=loss,
        batches=batches,
        num_steps=250,
        score=score,
    )


RL = (
    entropy_is_charged,
    rewards_like_actions,
    advantage_minus_itself,
    divergence_is_rewarded,
)
