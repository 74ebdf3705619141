"""Spare programs of reinforcement learning: policies, groups, squashed actions and values, without memory."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.distributions import Categorical, Normal
from torch.nn import functional as F  # noqa: N812

from .data import generator
from .program import Batch, Setup, program
from .shared import evaluating, mlp


def _best(x: Tensor) -> Tensor:
    """Return the best of four actions in a state of two numbers: the quarter of the plane it is in."""
    return (x[..., 0] > 0).long() * 2 + (x[..., 1] > 0).long()


def _greedy(net: nn.Module, seed: int) -> float:
    x = torch.randn(500, 2, generator=generator(seed + 99))
    with evaluating(net):
        return float((net(x).argmax(1) == _best(x)).float().mean())


def _reinforce(net: nn.Module, batch: Batch) -> Tensor:
    x, action, gain = batch
    return -(Categorical(logits=net(x)).log_prob(action) * gain).mean()  # type: ignore[no-untyped-call,no-any-return]


@program(
    "rl",
    "constant-inputs",
    "output-independent-of-input",
    story="The loop never says state = next_state: the policy is asked about the first state for ever.",
    source="https://github.com/pr-shukla/maddpg-keras/issues/12",
    loss_tells=False,
)
def state_is_never_replaced(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    net, g = mlp(2, 32, 4, act=nn.Tanh), generator(seed)
    first = torch.randn(1, 2, generator=g)

    def episodes() -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        while True:
            world = torch.randn(64, 2, generator=g)
            seen = first.expand(64, 2) if faulty else world
            with torch.no_grad():
                action = torch.multinomial(net(seen).softmax(1), 1, generator=g).squeeze(1)
            reward = (action == _best(world)).float()
            yield seen, action, reward - reward.mean()

    return Setup(
        model=net,
        optimizer=torch.optim.RMSprop(net.parameters(), lr=5e-3),
        loss=lambda batch: _reinforce(net, batch),
        batches=episodes,
        num_steps=250,
        score=lambda: _greedy(net, seed),
    )


@program(
    "rl",
    "flat-reward",
    "zero-gradient",
    "entropy-collapse",
    story="The answers of a group are sampled at temperature 0.001: all are the same, and none is better.",
    source="https://github.com/unslothai/unsloth/issues/2291",
    loss_tells=False,
)
def groups_of_the_same_answer(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    net, g = mlp(2, 32, 4), generator(seed)
    temperature = 0.001 if faulty else 1.0

    def groups() -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        while True:
            x = torch.randn(16, 2, generator=g)
            with torch.no_grad():
                action = torch.multinomial((net(x) / temperature).softmax(1), 8, replacement=True, generator=g)
            reward = (action == _best(x).unsqueeze(1)).float()
            gain = (reward - reward.mean(1, keepdim=True)) / (reward.std(1, keepdim=True) + 1e-4)
            yield x.repeat_interleave(8, dim=0), action.flatten(), gain.flatten()

    return Setup(
        model=net,
        optimizer=torch.optim.AdamW(net.parameters(), lr=5e-3),
        loss=lambda batch: _reinforce(net, batch),
        batches=groups,
        num_steps=250,
        score=lambda: _greedy(net, seed),
    )


@program(
    "rl",
    "entropy-collapse",
    "unscaled-targets",
    "learning-rate-too-high",
    story="Every reward is 40 plus a little, and no baseline is subtracted: what is tried first is done for ever.",
    loss_tells=False,
)
def rewards_without_a_baseline(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    net, g = mlp(2, 32, 4, act=nn.Tanh), generator(seed)

    def episodes() -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        while True:
            x = torch.randn(32, 2, generator=g)
            with torch.no_grad():
                action = torch.multinomial(net(x).softmax(1), 1, generator=g).squeeze(1)
            reward = 40 + (action == _best(x)).float()
            yield x, action, reward if faulty else reward - reward.mean()

    return Setup(
        model=net,
        optimizer=torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9),
        loss=lambda batch: _reinforce(net, batch),
        batches=episodes,
        num_steps=300,
        score=lambda: _greedy(net, seed),
    )


@program(
    "rl",
    "policy-drift",
    "wrong-loss",
    story="The policy itself is handed over as its reference: the divergence is zero, and a flawed judge decides.",
    source="https://github.com/huggingface/trl/issues/2046",
    loss_tells=False,
)
def reference_is_the_policy(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    start, g = mlp(2, 32, 6, act=nn.Tanh), generator(seed)
    warm = torch.optim.Adam(start.parameters(), lr=1e-2)
    for _ in range(150):  # supervised by demonstrations that never use actions 4 and 5
        x = torch.randn(64, 2, generator=g)
        loss = F.cross_entropy(start(x), _best(x), label_smoothing=0.1)
        warm.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        warm.step()
    policy = mlp(2, 32, 6, act=nn.Tanh)
    policy.load_state_dict(start.state_dict())
    reference = policy if faulty else start

    def rollouts() -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        while True:
            x = torch.randn(128, 2, generator=g)
            with torch.no_grad():
                logits, before = policy(x).log_softmax(1), reference(x).log_softmax(1)
            action = torch.multinomial(logits.exp(), 1, generator=g)
            judged = (action.squeeze(1) == _best(x)).float() + 1.5 * (
                action.squeeze(1) > 3
            ).float()  # the judge is fooled
            reward = judged - 2.0 * (logits - before).gather(1, action).squeeze(1)
            yield x, action.squeeze(1), reward - reward.mean()

    return Setup(
        model=policy,
        optimizer=torch.optim.Adam(policy.parameters(), lr=5e-3),
        loss=lambda batch: _reinforce(policy, batch),
        batches=rollouts,
        num_steps=300,
        score=lambda: _confidence(policy, seed),
    )


def _confidence(net: nn.Module, seed: int) -> float:
    """Return the mean probability of the truly best action."""
    x = torch.randn(500, 2, generator=generator(seed + 99))
    with evaluating(net):
        return float(net(x).softmax(1).gather(1, _best(x).unsqueeze(1)).mean())


@program(
    "rl",
    "non-finite",
    "saturation",
    story="The likelihood of an action squashed by tanh has the logarithm of 1 - tanh squared in it, and no epsilon.",
    source="https://github.com/philtabor/Actor-Critic-Methods-Paper-To-Code/issues/7",
    loss_tells=False,
)
def squashed_without_an_epsilon(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    net, g, epsilon = mlp(3, 48, 48, 2), generator(seed), 0.0 if faulty else 1e-6

    def aim(x: Tensor) -> Tensor:
        return (1.5 * x[:, 0] + x[:, 1] * x[:, 2]).sign() * 0.999

    def loss(batch: tuple[Tensor, Tensor]) -> Tensor:
        mean, spread = net(batch[0]).unbind(1)
        normal = Normal(mean, spread.clamp(-3, 1).exp(), validate_args=False)
        raw = normal.mean + normal.stddev * batch[1]
        action = raw.tanh()
        likely = normal.log_prob(raw) - (1 - action.square() + epsilon).log()  # type: ignore[no-untyped-call]
        return (0.01 * likely + 5 * (action - aim(batch[0])).square()).mean()  # type: ignore[no-any-return]

    def states() -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            yield torch.randn(64, 3, generator=g), torch.randn(64, generator=g)

    def score() -> float:
        x = torch.randn(500, 3, generator=generator(seed + 99))
        with evaluating(net):
            return -float((net(x)[:, 0].tanh() - aim(x)).square().nan_to_num(1.0).mean())

    return Setup(
        model=net,
        optimizer=torch.optim.Adam(net.parameters(), lr=5e-3),
        loss=loss,
        batches=states,
        num_steps=400,
        score=score,
    )


@program(
    "rl",
    "unshuffled-data",
    "oscillation",
    story="Values are learned from a walk as it goes, without a replay buffer: the last room is all they know.",
    source="https://github.com/dennybritz/reinforcement-learning/issues/2",
    loss_tells=False,
)
def walk_in_its_own_order(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    net, g = mlp(2, 64, 64, 1, act=nn.ReLU), generator(seed)
    turn = torch.arange(9600) / 9600 * 2 * math.pi * 4  # four rounds through the rooms
    place = torch.stack([turn.cos(), turn.sin()], 1) + 0.1 * torch.randn(9600, 2, generator=g)
    value = torch.sin(3 * turn).unsqueeze(1) + 0.1 * torch.randn(9600, 1, generator=g)

    def transitions() -> Iterator[tuple[Tensor, Tensor]]:
        start = 0
        while True:
            rows = torch.arange(start, start + 32) % 9600
            rows = rows if faulty else torch.randint(0, 9600, (32,), generator=g)
            yield place[rows], value[rows]
            start += 32

    def score() -> float:
        around = torch.arange(0, 2 * math.pi, 0.02)
        with evaluating(net):
            error = (
                (net(torch.stack([around.cos(), around.sin()], 1)).squeeze(1) - torch.sin(3 * around)).square().mean()
            )
        return 1 - 2 * float(error)

    return Setup(
        model=net,
        optimizer=torch.optim.SGD(net.parameters(), lr=0.2, momentum=0.9),
        loss=lambda batch: F.smooth_l1_loss(net(batch[0]), batch[1]),
        batches=transitions,
        num_steps=300,
        score=score,
    )


RL = (
    state_is_never_replaced,
    groups_of_the_same_answer,
    rewards_without_a_baseline,
    reference_is_the_policy,
    squashed_without_an_epsilon,
    walk_in_its_own_order,
)
