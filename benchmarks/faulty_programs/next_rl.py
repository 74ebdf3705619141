"""Next programs of reinforcement learning: contextual bandits, a line world, an actor that steers, a reward model."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from .data import generator
from .program import Setup, program
from .shared import evaluating, mlp

ACTIONS = 5


def contexts(seed: int, size: int = 64) -> Iterator[Tensor]:
    """Yield the states of a batch of rounds."""
    g = generator(seed)
    while True:
        yield torch.randn(size, 6, generator=g)


def best_arm(state: Tensor) -> Tensor:
    """Return the action that pays in each state."""
    return state[:, :ACTIONS].argmax(1)


def sample(logits: Tensor) -> Tensor:
    """Return one action for each row."""
    return logits.softmax(-1).multinomial(1).squeeze(1)


def log_chance(logits: Tensor, action: Tensor) -> Tensor:
    """Return the logarithm of the chance of each row's action."""
    return logits.log_softmax(-1).gather(1, action.unsqueeze(1)).squeeze(1)


def pays(state: Tensor, action: Tensor) -> Tensor:
    """Return 1 for the best action, a half for its right neighbour and 0 otherwise."""
    best = best_arm(state)
    return (action == best).float() + 0.5 * (action == (best + 1) % ACTIONS).float()


def mean_reward(policy: nn.Module) -> float:
    """Return what the sampled actions of a policy earn on held-out states."""
    state = torch.randn(1000, 6, generator=generator(99))
    with evaluating(policy):
        chance = policy(state).softmax(-1)
    actions = torch.arange(ACTIONS)
    paid = torch.stack([pays(state, actions[i].expand(1000)) for i in range(ACTIONS)], dim=1)
    return float((chance * paid).sum(1).mean())


@program(
    "rl",
    "entropy-collapse",
    "saturation",
    story="The entropy enters the loss of an actor-critic with the wrong sign: the policy becomes certain at once.",
    source="MrSyee/pg-is-all-you-need#37",
    loss_tells=False,
)
def entropy_is_punished(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    policy = mlp(6, 32, ACTIONS, act=nn.Tanh)
    weight = 3.0 if faulty else -0.02

    def rollouts() -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        for state in contexts(seed):
            with torch.no_grad():
                action = sample(policy(state))
            yield state, action, pays(state, action)

    def loss(batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        state, action, reward = batch
        logs = policy(state).log_softmax(-1)
        gain = (log_chance(logs, action) * (reward - reward.mean())).mean()
        entropy: Tensor = -(logs.exp() * logs).sum(-1).mean()
        return weight * entropy - gain

    return Setup(
        model=policy,
        optimizer=torch.optim.Adam(policy.parameters(), lr=1e-2),
        loss=loss,
        batches=rollouts,
        num_steps=300,
        score=lambda: mean_reward(policy),
    )


@program(
    "rl",
    "flat-reward",
    "zero-gradient",
    story="Every completion of a group gets the same reward for its format, so all advantages are zero.",
    source="huggingface/trl#3452",
    loss_tells=False,
)
def reward_for_the_format(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    policy = mlp(6, 32, ACTIONS)

    def groups() -> Iterator[dict[str, Tensor]]:
        for prompt in contexts(seed, size=24):
            prompts = prompt.repeat_interleave(8, dim=0)
            with torch.no_grad():
                answer = sample(policy(prompts))
            reward = torch.ones(len(answer)) if faulty else pays(prompts, answer)
            group = reward.view(-1, 8)
            advantage = (group - group.mean(1, keepdim=True)) / (group.std(1, keepdim=True) + 1e-4)
            yield {"prompts": prompts, "answer": answer, "advantage": advantage.flatten(), "reward": reward}

    def grpo(batch: dict[str, Tensor]) -> Tensor:
        chosen = log_chance(policy(batch["prompts"]), batch["answer"])
        return -(torch.exp(chosen - chosen.detach()) * batch["advantage"]).mean()

    return Setup(
        model=policy,
        optimizer=torch.optim.AdamW(policy.parameters(), lr=3e-3),
        loss=grpo,
        batches=groups,
        num_steps=250,
        score=lambda: mean_reward(policy),
    )


@program(
    "rl",
    "policy-drift",
    "entropy-collapse",
    "repeated-batch",
    "exploding-gradient",
    story="One rollout is used for 150 updates with the plain ratio, unclipped, before the next is made.",
    source="huggingface/trl#454",
    loss_tells=False,
)
def ratio_runs_away(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    policy = mlp(6, 32, ACTIONS, act=nn.Tanh)
    epochs = 150 if faulty else 2

    def rollouts() -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
        for state in contexts(seed, size=48):
            with torch.no_grad():
                logits = policy(state)
                action = sample(logits)
                old = log_chance(logits, action)
            reward = pays(state, action)
            for _ in range(epochs):
                yield state, action, old, (reward - reward.mean()) / (reward.std() + 1e-6)

    def loss(batch: tuple[Tensor, Tensor, Tensor, Tensor]) -> Tensor:
        state, action, old, advantage = batch
        ratio = torch.exp(log_chance(policy(state), action) - old)
        if faulty:
            return -(ratio * advantage).mean()
        return -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()

    return Setup(
        model=policy,
        optimizer=torch.optim.Adam(policy.parameters(), lr=1e-2),
        loss=loss,
        batches=rollouts,
        num_steps=450,
        score=lambda: mean_reward(policy),
    )


@program(
    "rl",
    "learning-rate-too-low",
    story="Actor and critic learn at 0.000002, and after all rounds the actor still guesses.",
    source="isp1tze/MAProj#3",
    loss_tells=False,
)
def actor_and_critic_hardly_move(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    actor, critic = mlp(6, 32, ACTIONS), mlp(6, 32, 1)
    both = nn.ModuleList([actor, critic])

    def rollouts() -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        for state in contexts(seed):
            with torch.no_grad():
                action = sample(actor(state))
            yield state, action, pays(state, action)

    def loss(batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        state, action, reward = batch
        value = critic(state).squeeze(1)
        chosen = log_chance(actor(state), action)
        total: Tensor = F.mse_loss(value, reward) - (chosen * (reward - value.detach())).mean()
        return total

    return Setup(
        model=both,
        optimizer=torch.optim.Adam(both.parameters(), lr=2e-6 if faulty else 5e-3),
        loss=loss,
        batches=rollouts,
        num_steps=350,
        score=lambda: mean_reward(actor),
    )


def states(seed: int) -> Iterator[Tensor]:
    """Yield positions in meters, speeds in kilometers per hour and fuel in grams."""
    g = generator(seed)
    while True:
        yield torch.randn(64, 3, generator=g) * torch.tensor([300.0, 80.0, 2000.0])


@program(
    "rl",
    "unscaled-data",
    "saturation",
    story="An actor with tanh layers gets meters, km/h and grams as they are; its actions stay at -1 and 1.",
    source="ZhihanLee/DDPG_Learning#2",
)
def actor_saturates_on_raw_states(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    unit = torch.ones(3) if faulty else torch.tensor([300.0, 80.0, 2000.0])
    actor = nn.Sequential(mlp(3, 32, 32, 1, act=nn.Tanh), nn.Tanh())
    wanted = torch.tensor([300.0, 80.0, 2000.0])

    def cost(state: Tensor, action: Tensor) -> Tensor:
        z = state / wanted
        return (action.squeeze(1) - 0.6 * torch.sin(3 * z[:, 1]) - 0.2 * z[:, 0].tanh()).pow(2)

    def score() -> float:
        held_out = next(states(77))
        with evaluating(actor):
            return -float(cost(held_out, actor(held_out / unit)).mean())

    return Setup(
        model=actor,
        optimizer=torch.optim.Adam(actor.parameters(), lr=3e-3),
        loss=lambda state: cost(state, actor(state / unit)).mean(),
        batches=lambda: states(seed),
        num_steps=400,
        score=score,
    )


def legal(state: Tensor) -> Tensor:
    """Return which actions the rules allow: the last two only where the last number of the state is positive."""
    allowed = torch.ones(len(state), ACTIONS, dtype=torch.bool)
    allowed[:, -2:] = state[:, -1:] > 0
    return allowed


@program(
    "rl",
    "non-finite",
    story="Illegal actions get the probability zero, and the entropy by hand is p * log(p): zero times minus infinity.",
    loss_tells=False,
)
def entropy_of_illegal_actions(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    policy = mlp(6, 32, ACTIONS)

    def chances(state: Tensor) -> Tensor:
        p: Tensor = policy(state).masked_fill(~legal(state), -torch.inf).softmax(-1)
        return p

    def reward_of(state: Tensor, action: Tensor) -> Tensor:
        return (state[:, :ACTIONS].masked_fill(~legal(state), -torch.inf).argmax(1) == action).float()

    def rollouts() -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        for state in contexts(seed):
            with torch.no_grad():
                action = torch.nan_to_num(chances(state), nan=0.2).multinomial(1).squeeze(1)
            yield state, action, reward_of(state, action)

    def loss(batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        state, action, reward = batch
        p = chances(state)
        logs = torch.log(p) if faulty else torch.log(p.clamp(min=1e-8))
        chosen = logs.gather(1, action.unsqueeze(1)).squeeze(1)
        return -(chosen * (reward - reward.mean())).mean() + 0.01 * (p * logs).sum(-1).mean()

    def score() -> float:
        state = torch.randn(1000, 6, generator=generator(99))
        with evaluating(policy):
            return float(reward_of(state, torch.nan_to_num(chances(state), nan=0.0).argmax(1)).mean())

    return Setup(
        model=policy,
        optimizer=torch.optim.Adam(policy.parameters(), lr=5e-3),
        loss=loss,
        batches=rollouts,
        num_steps=400,
        score=score,
    )


RL = (
    entropy_is_punished,
    reward_for_the_format,
    ratio_runs_away,
    actor_and_critic_hardly_move,
    actor_saturates_on_raw_states,
    entropy_of_illegal_actions,
)
