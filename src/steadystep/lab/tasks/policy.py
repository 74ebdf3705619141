"""Policy gradients on a contextual bandit: losses of both signs around zero that say nothing about progress.

The surrogate of PPO (Schulman et al. 2017) with one update per rollout: the gradient is REINFORCE's, and the loss is
minus the mean advantage. With advantages centred in the batch, as in GRPO (Shao et al. 2024), that is only rounding.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from steadystep.lab.tasks.evaluating import evaluating
from steadystep.lab.tasks.task import Task, TaskInfo

_NUM_FEATURES, _NUM_ACTIONS = 8, 5

Rollout = tuple[Tensor, Tensor, Tensor, Tensor]


def _task(seed: int, *, centred: bool) -> Task:
    torch.manual_seed(seed)
    policy = nn.Sequential(nn.Linear(_NUM_FEATURES, 32), nn.Tanh(), nn.Linear(32, _NUM_ACTIONS))
    worth = torch.randn(_NUM_FEATURES, _NUM_ACTIONS, generator=torch.Generator().manual_seed(12345))
    rng = torch.Generator().manual_seed(seed)
    tests = torch.randn(1000, _NUM_FEATURES, generator=torch.Generator().manual_seed(-1))

    def batch() -> Rollout:
        """32 rollouts, made with the policy as it is; rewards are noisy."""
        states = torch.randn(32, _NUM_FEATURES, generator=rng)
        with torch.no_grad():
            chances = functional.log_softmax(policy(states), -1)
        actions = torch.multinomial(chances.exp(), 1, generator=rng)
        rewards = (states @ worth).gather(1, actions) + torch.randn(32, 1, generator=rng)
        expected = (chances.exp() * (states @ worth)).sum(-1, keepdim=True)
        advantages = rewards - (rewards.mean() if centred else expected)
        return states, actions, chances.gather(1, actions), advantages

    def loss(rollout: Rollout) -> Tensor:
        states, actions, then, advantages = rollout
        now = functional.log_softmax(policy(states), -1).gather(1, actions)
        return -((now - then).exp() * advantages).mean()

    def held_out() -> float:
        with evaluating(policy):
            rewards = tests @ worth
            regret = rewards.max(-1).values - (policy(tests).softmax(-1) * rewards).sum(-1)
            return float(regret.mean())  # sync: when the held-out loss is asked for

    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-3)
    return Task(model=policy, optimizer=optimizer, batch=batch, loss=loss, held_out=held_out)


def make(seed: int) -> Task:
    """Advantages over the expected reward: a loss of pure noise."""
    return _task(seed, centred=False)


def make_centred(seed: int) -> Task:
    """Advantages over the batch's mean: a loss of zero."""
    return _task(seed, centred=True)


POLICY = TaskInfo(name="policy", about="policy gradient, loss around zero, Adam 1e-3", num_steps=2000, make=make)
GRPO = TaskInfo(name="grpo", about="centred advantages, loss zero, Adam 1e-3", num_steps=2000, make=make_centred)
