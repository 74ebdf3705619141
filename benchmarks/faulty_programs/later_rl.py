"""Later programs of reinforcement learning: corridors of doors, a chain with delayed reward, offers."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from .data import generator
from .program import Setup, program
from .shared import evaluating


def _doors(seed: int) -> Tensor:
    """Return the hidden rule: the right door of a room with features x is the largest of x @ rule."""
    return torch.randn(6, 4, generator=generator(seed + 50))


def _act(logits: Tensor) -> Tensor:
    """Draw an action of each room."""
    chances = torch.softmax(logits, dim=-1)
    return torch.multinomial(chances.flatten(0, -2), 1).view(logits.shape[:-1])


def _log_prob(logits: Tensor, action: Tensor) -> Tensor:
    return torch.log_softmax(logits, dim=-1).gather(-1, action.unsqueeze(-1)).squeeze(-1)


def _policy() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 4))


def _right_doors(policy: nn.Module, rule: Tensor) -> float:
    rooms = torch.randn(1000, 6, generator=generator(1))
    with evaluating(policy):
        return float((policy(rooms).argmax(1) == (rooms @ rule).argmax(1)).float().mean())


@program(
    "rl",
    "wrong-loss",
    story="The mean log-probability of an episode is multiplied by the sum of its returns: no step gets credit.",
    source="Farama-Foundation/Gymnasium#1336",
    loss_tells=False,
)
def mean_of_the_log_probabilities(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    policy, rule = _policy(), _doors(seed)

    def batches() -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        while True:
            rooms = torch.randn(4, 16, 6)  # four episodes of sixteen rooms
            with torch.no_grad():
                action = _act(policy(rooms))
            reward = (action == (rooms @ rule).argmax(-1)).float() - 0.25
            yield rooms, action, reward

    def loss(batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        rooms, action, reward = batch
        log_probs = _log_prob(policy(rooms), action)
        if faulty:
            return -(log_probs.mean(1, keepdim=True) * reward).mean()
        return -(log_probs * reward).mean()

    return Setup(
        model=policy,
        optimizer=torch.optim.Adam(policy.parameters(), lr=1e-2),
        loss=loss,
        batches=batches,
        num_steps=300,
        score=lambda: _right_doors(policy, rule),
    )


@program(
    "rl",
    "flat-reward",
    "zero-gradient",
    story="The reward is scaled with an integer division: 1 // 2 and 0 // 2 are both 0.",
    loss_tells=False,
)
def reward_divided_as_integers(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    policy, rule = _policy(), _doors(seed)

    def batches() -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        while True:
            rooms = torch.randn(64, 6)
            with torch.no_grad():
                action = _act(policy(rooms))
            points = (action == (rooms @ rule).argmax(-1)).long()
            yield rooms, action, (points // 2).float() if faulty else points / 2

    def loss(batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        rooms, action, reward = batch
        advantage = reward - reward.mean()
        return -(_log_prob(policy(rooms), action) * advantage).mean()

    return Setup(
        model=policy,
        optimizer=torch.optim.Adam(policy.parameters(), lr=1e-2),
        loss=loss,
        batches=batches,
        num_steps=250,
        score=lambda: _right_doors(policy, rule),
    )


@program(
    "rl",
    "entropy-collapse",
    "unscaled-targets",
    "saturation",
    "learning-rate-too-high",
    story="Rewards of 50 and 51 without a baseline: whatever is tried first is reinforced, and nothing else tried.",
    loss_tells=False,
)
def rewards_never_below_fifty(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    policy, rule = _policy(), _doors(seed)

    def batches() -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        while True:
            rooms = torch.randn(32, 6)
            with torch.no_grad():
                action = _act(policy(rooms))
            yield rooms, action, 50 + (action == (rooms @ rule).argmax(-1)).float()

    def loss(batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        rooms, action, reward = batch
        advantage = reward if faulty else reward - reward.mean()
        return -(_log_prob(policy(rooms), action) * advantage).mean()

    return Setup(
        model=policy,
        optimizer=torch.optim.Adam(policy.parameters(), lr=2e-2),
        loss=loss,
        batches=batches,
        num_steps=300,
        score=lambda: _right_doors(policy, rule),
    )


LENGTH = 8  # rooms of the chain; the reward waits in the last one


def _transitions(seed: int, count: int = 3000) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return states, actions (0 left, 1 right), rewards and next states of a random walk, with 20 at the end."""
    g = generator(seed)
    state = torch.randint(0, LENGTH, (count,), generator=g)
    action = torch.randint(0, 2, (count,), generator=g)
    after = (state + 2 * action - 1).clamp(0, LENGTH - 1)
    reward = torch.where((after == LENGTH - 1) & (action == 1), 20.0, -0.5)
    return state, action, reward, after


@program(
    "rl",
    "zero-gradient",
    "unscaled-targets",
    "wrong-loss",
    story="The temporal difference is clamped to one before it is squared: large errors have no gradient.",
    source="devsisters/DQN-tensorflow#16",
    loss_tells=False,
)
def difference_clamped_before_the_square(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    q = nn.Sequential(nn.Linear(LENGTH, 32), nn.ReLU(), nn.Linear(32, 2))
    state, action, reward, after = _transitions(seed)
    one_hot = torch.eye(LENGTH)
    g = generator(seed)

    def batches() -> Iterator[tuple[Tensor, ...]]:
        while True:
            i = torch.randint(0, len(state), (64,), generator=g)
            yield state[i], action[i], reward[i], after[i]

    def loss(batch: tuple[Tensor, ...]) -> Tensor:
        s, a, r, s2 = batch
        with torch.no_grad():
            target = r + 0.8 * q(one_hot[s2]).max(1).values
        delta = target - q(one_hot[s]).gather(1, a.unsqueeze(1)).squeeze(1)
        return delta.clamp(-1, 1).pow(2).mean() if faulty else F.huber_loss(delta, torch.zeros_like(delta))

    def score() -> float:
        """Return how well the values agree with those of the best policy: 1 is perfect."""
        best = torch.zeros(LENGTH, 2)
        for _ in range(200):
            value = best.max(1).values
            rooms = torch.arange(LENGTH)
            right = (rooms + 1).clamp(max=LENGTH - 1)
            gain = torch.where(right == LENGTH - 1, 20.0, -0.5)
            left = -0.5 + 0.8 * value[(rooms - 1).clamp(min=0)]
            best = torch.stack([left, gain + 0.8 * value[right]], dim=1)
        with evaluating(q):
            error = (q(one_hot) - best).pow(2).mean() / (best - best.mean()).pow(2).mean()
        return max(-1.0, 1 - float(error))

    return Setup(
        model=q,
        optimizer=torch.optim.Adam(q.parameters(), lr=1e-2),
        loss=loss,
        batches=batches,
        num_steps=600,
        score=score,
    )


RL = (
    mean_of_the_log_probabilities,
    reward_divided_as_integers,
    rewards_never_below_fifty,
    difference_clamped_before_the_square,
)
