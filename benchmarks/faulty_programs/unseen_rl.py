"""Unseen programs of reinforcement learning: a corridor, a pole to balance and a maze, each stepped many at a time."""

import copy
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from .data import generator
from .program import Setup, program
from .shared import evaluating, mlp

LENGTH, LIMIT = 7, 16  # cells of the corridor, steps of an episode


def walk(policy: nn.Module, g: torch.Generator, runs: int, *, greedy: bool = False) -> dict[str, Tensor]:
    """Walk along a corridor from the middle; the right end pays 1, the left end 0.1, and each ends the episode.

    States are (runs, LIMIT), actions too; `live` tells the steps that were taken, `reward` is per episode.
    """
    place = torch.full((runs,), LENGTH // 2)
    live = torch.ones(runs, dtype=torch.bool)
    states, actions, alive = [], [], []
    for _ in range(LIMIT):
        with torch.no_grad():
            chance = policy(F.one_hot(place, LENGTH).float()).softmax(-1)
        action = chance.argmax(-1) if greedy else torch.multinomial(chance, 1, generator=g).squeeze(1)
        states.append(place)
        actions.append(action)
        alive.append(live)
        place = torch.where(live, (place + 2 * action - 1).clamp(0, LENGTH - 1), place)
        live = live & (place > 0) & (place < LENGTH - 1)
    reward = (place == LENGTH - 1).float() + 0.1 * (place == 0).float()
    return {"state": torch.stack(states, 1), "action": torch.stack(actions, 1), "live": torch.stack(alive, 1)} | {
        "reward": reward
    }


def walks(policy: nn.Module, seed: int, runs: int = 24) -> Iterator[dict[str, Tensor]]:
    g = generator(seed)
    while True:
        yield walk(policy, g, runs)


def paid(policy: nn.Module) -> float:
    with evaluating(policy):
        return float(walk(policy, generator(5), 200)["reward"].mean())


def log_chances(policy: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Return the log-probability of the actions taken, 0 after the end of the episode, as (runs, LIMIT)."""
    scores: Tensor = policy(F.one_hot(batch["state"], LENGTH).float()).log_softmax(-1)
    return scores.gather(-1, batch["action"].unsqueeze(-1)).squeeze(-1) * batch["live"]


@program(
    "rl",
    "wrong-loss",
    "policy-drift",
    "entropy-collapse",
    story="REINFORCE without the minus sign: what pays is made less likely.",
    source="Humbatova et al., Taxonomy of real faults in deep learning systems (ICSE 2020), wrong loss calculation",
    loss_tells=False,
)
def reward_is_descended(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    policy = mlp(LENGTH, 24, 2, act=nn.Tanh)
    sign = 1 if faulty else -1

    def loss(batch: dict[str, Tensor]) -> Tensor:
        advantage = batch["reward"] - 0.4
        return sign * (log_chances(policy, batch).sum(1) * advantage).mean()

    return Setup(
        model=policy,
        optimizer=torch.optim.Adam(policy.parameters(), lr=5e-3),
        loss=loss,
        batches=lambda: walks(policy, seed),
        num_steps=200,
        score=lambda: paid(policy),
    )


@program(
    "rl",
    "flat-reward",
    "zero-gradient",
    story="The mean reward of the group is subtracted, but a group is one episode: every advantage is zero.",
    source="https://github.com/alibaba/ROLL/issues/397",
    loss_tells=False,
)
def groups_of_one(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    policy = mlp(LENGTH, 24, 2)

    def loss(batch: dict[str, Tensor]) -> Tensor:
        reward = batch["reward"].view(-1, 1 if faulty else 8)
        advantage = (reward - reward.mean(1, keepdim=True)).flatten()
        return -(log_chances(policy, batch).sum(1) * advantage).mean()

    return Setup(
        model=policy,
        optimizer=torch.optim.AdamW(policy.parameters(), lr=5e-3),
        loss=loss,
        batches=lambda: walks(policy, seed),
        num_steps=200,
        score=lambda: paid(policy),
    )


SIDE = 4


def moved(cell: Tensor, action: Tensor) -> Tensor:
    """Return the cell of a square maze after moving right, left, down or up."""
    row, column = cell // SIDE, cell % SIDE
    row = (row + (action == 2).long() - (action == 3).long()).clamp(0, SIDE - 1)
    column = (column + (action == 0).long() - (action == 1).long()).clamp(0, SIDE - 1)
    return row * SIDE + column


class _QAgent(nn.Module):
    """Two networks for the values of actions, of which `target` follows `online` every 20 steps."""

    def __init__(self) -> None:
        super().__init__()
        self.online = mlp(SIDE * SIDE, 48, 4)
        self.target = copy.deepcopy(self.online)

    def replay(self, seed: int, pay: float) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield cells, actions and the values to learn; the last cell pays and ends the episode."""
        g, step = generator(seed), 0
        while True:
            if step % 20 == 0:
                self.target.load_state_dict(self.online.state_dict())
            cell = torch.randint(0, SIDE * SIDE - 1, (48,), generator=g)
            action = torch.randint(0, 4, (48,), generator=g)
            after = moved(cell, action)
            end = after == SIDE * SIDE - 1
            with torch.no_grad():
                best = self.target(F.one_hot(after, SIDE * SIDE).float()).amax(-1)
            yield cell, action, torch.where(end, pay, 0.8 * best)
            step += 1

    def chosen(self, cell: Tensor, action: Tensor) -> Tensor:
        """Return the values of the actions as (N, 1)."""
        values: Tensor = self.online(F.one_hot(cell, SIDE * SIDE).float())
        return values.gather(1, action.view(-1, 1))

    def solved(self) -> float:
        """Return the share of cells from which the greedy way is a shortest one."""
        cell = start = torch.arange(SIDE * SIDE - 1)
        with evaluating(self):
            for _ in range(2 * SIDE):
                best = self.online(F.one_hot(cell, SIDE * SIDE).float()).argmax(-1)
                cell = torch.where(cell == SIDE * SIDE - 1, cell, moved(cell, best))
        assert len(start) == len(cell)
        return float((cell == SIDE * SIDE - 1).float().mean())


@program(
    "rl",
    "wrong-loss",
    "output-independent-of-input",
    story="Values of shape (N, 1) are compared with targets of shape (N,): every value with every target.",
    source="https://github.com/hungtuchen/pytorch-dqn/issues/3",
    loss_tells=False,
)
def values_against_all_targets(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    agent = _QAgent()

    def loss(batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        cell, action, target = batch
        error = agent.chosen(cell, action) - (target if faulty else target.unsqueeze(1))
        return torch.where(error.abs() < 1, 0.5 * error.pow(2), error.abs() - 0.5).mean()

    return Setup(
        model=agent,
        optimizer=torch.optim.Adam(agent.online.parameters(), lr=3e-3),
        loss=loss,
        batches=lambda: agent.replay(seed, 1.0),
        num_steps=400,
        score=agent.solved,
    )


@program(
    "rl",
    "wrong-optimizer-params",
    "frozen-parameters",
    story="The optimizer holds the target network, which no gradient reaches, instead of the online network.",
    loss_tells=False,
)
def optimizer_of_the_target_network(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    agent = _QAgent()

    def loss(batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        cell, action, target = batch
        return F.mse_loss(agent.chosen(cell, action).squeeze(1), target)

    trained = agent.target if faulty else agent.online
    return Setup(
        model=agent,
        optimizer=torch.optim.Adam(trained.parameters(), lr=3e-3),
        loss=loss,
        batches=lambda: agent.replay(seed, 1.0),
        num_steps=400,
        score=agent.solved,
    )


@program(
    "rl",
    "unscaled-targets",
    "exploding-gradient",
    "learning-rate-too-high",
    "dead-units",
    story="The goal pays 10,000, and plain gradient descent on the squared error of the values is thrown off.",
    loss_tells=False,
)
def goal_pays_ten_thousand(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    agent = _QAgent()

    def loss(batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        cell, action, target = batch
        return F.mse_loss(agent.chosen(cell, action).squeeze(1), target)

    return Setup(
        model=agent,
        optimizer=torch.optim.SGD(agent.online.parameters(), lr=0.2, momentum=0.9),
        loss=loss,
        batches=lambda: agent.replay(seed, 10_000.0 if faulty else 1.0),
        num_steps=400,
        score=agent.solved,
    )


class _ActorCritic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(2, 32), nn.Tanh())
        self.actor, self.critic = nn.Linear(32, 2), nn.Linear(32, 1)

    def forward(self, state: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.body(state)
        return self.actor(hidden), self.critic(hidden).squeeze(-1)


def balance(agent: _ActorCritic, g: torch.Generator, runs: int, steps: int = 30) -> tuple[Tensor, ...]:
    """Push an unstable pole left or right; return states, actions, the steps still to stand, and a mask."""
    state = 0.4 * torch.rand(runs, 2, generator=g) - 0.2
    up = torch.ones(runs, dtype=torch.bool)
    states, actions, standing = [], [], []
    for _ in range(steps):
        with torch.no_grad():
            chance = agent(state)[0].softmax(-1)
        action = torch.multinomial(chance, 1, generator=g).squeeze(1)
        states.append(state)
        actions.append(action)
        standing.append(up)
        push = 2.0 * action - 1
        speed = state[:, 1] + 0.15 * (3 * state[:, 0] + push)
        state = torch.stack([state[:, 0] + 0.15 * speed, speed], dim=1)
        up = up & (state[:, 0].abs() < 1)
        state = torch.where(up.view(-1, 1), state, torch.zeros_like(state))
    mask = torch.stack(standing).float()
    to_go = mask.flip(0).cumsum(0).flip(0) / steps
    return torch.stack(states), torch.stack(actions), to_go, mask


def balances(agent: _ActorCritic, seed: int) -> Iterator[tuple[Tensor, ...]]:
    g = generator(seed)
    while True:
        yield balance(agent, g, 16)


def stood(agent: _ActorCritic) -> float:
    with evaluating(agent):
        return float(balance(agent, generator(7), 100)[3].mean())


@program(
    "rl",
    "regularisation-too-strong",
    "wrong-loss",
    story="The entropy bonus has the factor 5 instead of 0.005: the policy stays uniform.",
    loss_tells=False,
)
def entropy_is_everything(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    agent = _ActorCritic()
    bonus = 5.0 if faulty else 0.005

    def loss(batch: tuple[Tensor, ...]) -> Tensor:
        states, actions, to_go, mask = (part.flatten(0, 1) for part in batch)
        scores, value = agent(states)
        likely = scores.log_softmax(-1)
        entropy = -(likely * likely.exp()).sum(-1)
        chosen = likely.gather(1, actions.view(-1, 1)).squeeze(1)
        error: Tensor = to_go - value
        gain: Tensor = chosen * error.detach() + bonus * entropy
        return ((error.pow(2) - gain) * mask).sum() / mask.sum()

    return Setup(
        model=agent,
        optimizer=torch.optim.Adam(agent.parameters(), lr=0.01),
        loss=loss,
        batches=lambda: balances(agent, seed),
        num_steps=250,
        score=lambda: stood(agent),
    )


RL = (
    reward_is_descended,
    groups_of_one,
    values_against_all_targets,
    optimizer_of_the_target_network,
    goal_pays_ten_thousand,
    entropy_is_everything,
)
