"""Fresh programs of reinforcement learning: a cart to be kept in the middle, offers, answers in a format."""

import copy
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from .data import generator
from .program import Setup, program
from .shared import mlp

Rollout = dict[str, Tensor]


def _move(state: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
    """Push carts (N, 2) left (0), not at all (1) or right (2); the reward falls with the distance from the middle."""
    speed = 0.9 * state[:, 1] + 0.15 * (action - 1)
    place = (state[:, 0] + 0.5 * speed).clamp(-2, 2)
    return torch.stack([place, speed], dim=1), 1 - place.abs()


def _sampled(logits: Tensor, g: torch.Generator) -> Tensor:
    noise = torch.rand(logits.shape, generator=g).clamp(1e-9, 1 - 1e-7)
    return (logits - (-noise.log()).log()).argmax(-1)


def _starts(count: int, g: torch.Generator) -> Tensor:
    return torch.rand(count, 2, generator=g) * torch.tensor([3.0, 0.2]) - torch.tensor([1.5, 0.1])


@torch.no_grad()
def _drive(act: Callable[[Tensor], Tensor], g: torch.Generator, count: int, length: int = 14) -> Rollout:
    """Drive carts with a policy; returns are discounted by 0.9. Everything is (length, N, ...)."""
    state, rows = _starts(count, g), []
    for _ in range(length):
        action = _sampled(act(state), g)
        after, reward = _move(state, action)
        rows.append((state, action, reward, after))
        state = after
    states, actions, rewards, nexts = (torch.stack(column) for column in zip(*rows, strict=True))
    returns, later = torch.zeros_like(rewards), torch.zeros(count)
    for step in reversed(range(length)):
        later = rewards[step] + 0.9 * later
        returns[step] = later
    return {"state": states, "action": actions, "reward": rewards, "return": returns, "next": nexts}


@torch.no_grad()
def _kept(act: Callable[[Tensor], Tensor]) -> float:
    """Return the mean reward of the most probable action on fixed starts."""
    state, total = _starts(64, generator(99)), 0.0
    for _ in range(14):
        state, reward = _move(state, act(state).argmax(-1))
        total += float(reward.mean())
    return total / 14


class _ActorCritic(nn.Module):
    """One trunk, two heads."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(2, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh())
        self.actor, self.critic = nn.Linear(width, 3), nn.Linear(width, 1)

    def forward(self, state: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.trunk(state)
        return self.actor(hidden), self.critic(hidden).squeeze(-1)


def _chosen(logits: Tensor, action: Tensor) -> Tensor:
    return logits.log_softmax(-1).gather(-1, action.unsqueeze(-1)).squeeze(-1)


@program(
    "rl",
    "non-finite",
    "batch-size-unfit",
    story="65 transitions are cut into minibatches of 16; the deviation of the advantages in the last one of 1 is NaN.",
    source="DLR-RM/stable-baselines3#325",
    loss_tells=False,
)
def minibatch_of_one(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    model = _ActorCritic()

    def batches() -> Iterator[Rollout]:
        g = generator(seed)
        while True:
            rolled = {name: t.flatten(0, 1) for name, t in _drive(lambda s: model(s)[0], g, 5, 13).items()}
            for rows in torch.split(torch.randperm(65, generator=g), 16):
                yield {name: t[rows] for name, t in rolled.items()}

    def loss(batch: Rollout) -> Tensor:
        logits, value = model(batch["state"])
        advantage = (batch["return"] - value).detach()
        if faulty or len(advantage) > 1:
            advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
        policy = -(_chosen(logits, batch["action"]) * advantage).mean()
        return F.mse_loss(value, batch["return"]).add(policy)

    return Setup(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=5e-3),
        loss=loss,
        batches=batches,
        num_steps=400,
        score=lambda: _kept(lambda s: model(s)[0]),
    )


def _reinforce(
    model: nn.Module, seed: int, count: int, change: Callable[[Rollout], Rollout] = lambda r: r
) -> tuple[Callable[[], Iterator[Rollout]], Callable[[Rollout], Tensor]]:
    """Return the batches and the loss of REINFORCE with the mean over the carts as baseline."""

    def batches() -> Iterator[Rollout]:
        g = generator(seed)
        while True:
            yield change(_drive(model, g, count))

    def loss(batch: Rollout) -> Tensor:
        gain = batch["return"] - (batch["return"].mean(1, keepdim=True) if count > 1 else 0)
        return -(_chosen(model(batch["state"]), batch["action"]) * gain).mean()

    return batches, loss


@program(
    "rl",
    "flat-reward",
    "zero-gradient",
    story="The reward is a score from 40 to 100 and is clipped to [-1, 1], as for other games: it is always 1.",
    source="Mnih et al., Human-level control through deep reinforcement learning (Nature 2015): rewards clipped at 1",
    loss_tells=False,
)
def every_reward_is_clipped(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    model = mlp(2, 32, 32, 3, act=nn.Tanh)

    def paid(rolled: Rollout) -> Rollout:
        points = 40 + 20 * (rolled["reward"] + 1)
        reward = points.clamp(-1, 1) if faulty else points / 60
        returns = torch.stack([(reward[t:] * 0.9 ** torch.arange(14 - t).view(-1, 1)).sum(0) for t in range(14)])
        return {**rolled, "reward": reward, "return": 4 * returns}

    batches, loss = _reinforce(model, seed, 24, paid)
    return Setup(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=5e-3),
        loss=loss,
        batches=batches,
        num_steps=250,
        score=lambda: _kept(model),
    )


@program(
    "rl",
    "poor-initialisation",
    "vanishing-gradient",
    story="The gain of 0.01, meant for the last layer of the policy, is used for every layer.",
    same_start=False,
    loss_tells=False,
)
def gain_of_the_last_layer(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    model = _ActorCritic()
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            nn.init.orthogonal_(module.weight, 0.01 if faulty or name == "actor" else 2**0.5)
            nn.init.zeros_(module.bias)

    def batches() -> Iterator[Rollout]:
        g = generator(seed)
        while True:
            yield _drive(lambda s: model(s)[0], g, 24)

    def loss(batch: Rollout) -> Tensor:
        logits, value = model(batch["state"])
        advantage = (batch["return"] - value).detach()
        entropy = -(logits.softmax(-1) * logits.log_softmax(-1)).sum(-1).mean()
        policy = -(_chosen(logits, batch["action"]) * advantage).mean()
        total: Tensor = policy + 0.5 * F.mse_loss(value, batch["return"]) - 0.003 * entropy
        return total

    return Setup(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
        loss=loss,
        batches=batches,
        num_steps=250,
        score=lambda: _kept(lambda s: model(s)[0]),
    )


@program(
    "rl",
    "repeated-batch",
    story="Replay draws its indices below the size of a batch instead of the size of the memory: 16 old transitions.",
    loss_tells=False,
)
def replay_of_the_first_rows(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    model = mlp(2, 48, 48, 3)
    target = copy.deepcopy(model).requires_grad_(False)

    def batches() -> Iterator[Rollout]:
        g = generator(seed)
        memory = {
            n: t.transpose(0, 1).flatten(0, 1) for n, t in _drive(lambda s: torch.zeros(len(s), 3), g, 200).items()
        }
        step = 0
        while True:
            if step % 20 == 0:
                target.load_state_dict(model.state_dict())
            step += 1
            rows = torch.randint(0, 16 if faulty else 2800, (16,), generator=g)
            yield {n: t[rows] for n, t in memory.items()}

    def loss(batch: Rollout) -> Tensor:
        goal = batch["reward"] + 0.9 * target(batch["next"]).max(-1).values
        return F.smooth_l1_loss(model(batch["state"]).gather(1, batch["action"].unsqueeze(1)).squeeze(1), goal)

    return Setup(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=3e-3),
        loss=loss,
        batches=batches,
        num_steps=500,
        score=lambda: _kept(model),
    )


@program(
    "imitation",
    "constant-inputs",
    story="The simulator returns the same array at every step; all stored observations show the next start.",
    source="openai/baselines#418",
)
def observations_share_memory(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    model = mlp(2, 24, 3)

    def expert(state: Tensor) -> Tensor:
        push = -state[:, 0] - 1.5 * state[:, 1]
        return (push > 0.2).long() - (push < -0.2).long() + 1

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        g = generator(seed)
        while True:
            shown, seen, done = torch.zeros(2), [], []
            for moment in range(64):
                if moment % 2 == 0:
                    state = _starts(1, g)
                shown.copy_(state[0])
                seen.append(shown if faulty else shown.clone())
                done.append(expert(state))
                state, _ = _move(state, _sampled(torch.zeros(1, 3), g))
            shown.copy_(_starts(1, g)[0])  # the next episode begins
            yield torch.stack(seen), torch.cat(done)

    def score() -> float:
        state = _starts(400, generator(5))
        with torch.no_grad():
            return float((model(state).argmax(-1) == expert(state)).float().mean())

    return Setup(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=1e-2),
        loss=lambda batch: F.cross_entropy(model(batch[0]), batch[1]),
        batches=batches,
        num_steps=200,
        score=score,
    )


CART = (
    minibatch_of_one,
    every_reward_is_clipped,
    gain_of_the_last_layer,
    replay_of_the_first_rows,
    observations_share_memory,
)
