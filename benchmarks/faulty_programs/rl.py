"""Reinforcement learning on a contextual bandit; a batch is rolled out with the current policy when it is asked for."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from .data import generator
from .program import Setup, program
from .shared import evaluating, mlp

STATES, ACTIONS = 6, 4
Reward = Callable[[Tensor, Tensor], Tensor]


def best_action(state: Tensor) -> Tensor:
    """Return the action that pays."""
    return (state @ torch.randn(STATES, ACTIONS, generator=generator(7))).argmax(-1)


def pays(state: Tensor, action: Tensor) -> Tensor:
    return (action == best_action(state)).float()


def rollouts(policy: nn.Module, reward: Reward, seed: int, size: int = 64) -> Iterator[dict[str, Tensor]]:
    """Yield states, sampled actions and rewards of the policy as it is at that moment."""
    g = generator(seed)
    while True:
        state = torch.randn(size, STATES, generator=g)
        with torch.no_grad():
            chances = torch.softmax(policy(state).nan_to_num(), dim=-1)
        action = torch.multinomial(chances, 1, generator=g).squeeze(1)
        yield {"state": state, "action": action, "reward": reward(state, action)}


def success(policy: nn.Module, reward: Reward = pays) -> float:
    """Return the expected reward of the policy on held-out states."""
    state = torch.randn(400, STATES, generator=generator(10_000))
    with evaluating(policy):
        chances = torch.softmax(policy(state).nan_to_num(), dim=-1)
    every = torch.stack([reward(state, torch.full((400,), a)) for a in range(chances.shape[1])], dim=1)
    return float((chances * every).sum(-1).mean())


def log_chance(logits: Tensor, action: Tensor) -> Tensor:
    return F.log_softmax(logits, dim=-1).gather(1, action.unsqueeze(1)).squeeze(1)


def centered(reward: Tensor) -> Tensor:
    return (reward - reward.mean()) / (reward.std() + 1e-6)


@program(
    "rl",
    "entropy-collapse",
    story="The weight of the entropy bonus is -1, which switches it off in another library; here it rewards certainty, "
    "and the policy settles on one action.",
    source="https://github.com/Unity-Technologies/ml-agents/issues/281",
    loss_tells=False,
)
def entropy_penalized(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    policy = mlp(STATES, 32, ACTIONS)
    weight = -1.0 if faulty else 0.05

    def loss(batch: dict[str, Tensor]) -> Tensor:
        logits = policy(batch["state"])
        entropy = -(F.softmax(logits, -1) * F.log_softmax(logits, -1)).sum(-1)
        gain = log_chance(logits, batch["action"]) * centered(batch["reward"])
        return -(gain + weight * entropy).mean()

    return Setup(
        model=policy,
        optimizer=torch.optim.Adam(policy.parameters(), lr=1e-2),
        loss=loss,
        batches=lambda: rollouts(policy, pays, seed),
        num_steps=300,
        score=lambda: success(policy),
    )


@program(
    "rl",
    "flat-reward",
    "zero-gradient",
    story="The environment computes the reward before it applies the action, so every action earns the same.",
    loss_tells=False,
)
def reward_before_action(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    policy = mlp(STATES, 32, ACTIONS, act=nn.Tanh)

    def reward(state: Tensor, action: Tensor) -> Tensor:
        return torch.ones(len(state)) if faulty else pays(state, action)

    return Setup(
        model=policy,
        optimizer=torch.optim.RMSprop(policy.parameters(), lr=3e-3),
        loss=lambda b: -(log_chance(policy(b["state"]), b["action"]) * centered(b["reward"])).mean(),
        batches=lambda: rollouts(policy, reward, seed),
        num_steps=300,
        score=lambda: success(policy),
    )


class _ActorCritic(nn.Module):
    """Policy logits from `forward`, values from `value`, on a shared trunk."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(STATES, 48), nn.Tanh())
        self.actor, self.critic = nn.Linear(48, ACTIONS), nn.Linear(48, 1)

    def forward(self, state: Tensor) -> Tensor:
        out: Tensor = self.actor(self.trunk(state))
        return out

    def value(self, state: Tensor) -> Tensor:
        out: Tensor = self.critic(self.trunk(state).detach()).squeeze(1)
        return out

    def shared_value(self, state: Tensor) -> Tensor:
        out: Tensor = self.critic(self.trunk(state)).squeeze(1)
        return out


@program(
    "rl",
    "zero-gradient",
    "frozen-parameters",
    story="Log-probabilities are converted with .item() and put into a new tensor to get rid of a device error: the "
    "policy gets no gradient, only the value head does.",
    source="https://github.com/isayev/ReLeaSE/issues/39",
    loss_tells=False,
)
def log_probability_as_number(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    model = _ActorCritic()

    def loss(batch: dict[str, Tensor]) -> Tensor:
        chance, value = log_chance(model(batch["state"]), batch["action"]), model.value(batch["state"])
        if faulty:
            chance = torch.tensor(chance.tolist())
        advantage = (batch["reward"] - value).detach()
        return F.mse_loss(value, batch["reward"]) - (chance * advantage).mean()

    return Setup(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=1e-2),
        loss=loss,
        batches=lambda: rollouts(model, pays, seed),
        num_steps=300,
        score=lambda: success(model),
    )


@program(
    "rl",
    "unscaled-targets",
    "exploding-gradient",
    story="Rewards are counted in cents, up to 10,000: the value loss drowns the policy loss in the clipped gradient.",
    loss_tells=False,
)
def rewards_in_cents(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    model, unit = _ActorCritic(), 10_000.0 if faulty else 1.0

    def loss(batch: dict[str, Tensor]) -> Tensor:
        value = model.shared_value(batch["state"])
        advantage = (batch["reward"] - value).detach()
        chance = log_chance(model(batch["state"]), batch["action"])
        return 0.5 * F.mse_loss(value, batch["reward"]) - (chance * advantage).mean()

    return Setup(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9),
        loss=loss,
        batches=lambda: rollouts(model, lambda s, a: unit * pays(s, a), seed),
        num_steps=400,
        score=lambda: success(model),
        config={"training": {"max_grad_norm": 1.0}},
    )


@program(
    "rl",
    "wrong-optimizer-params",
    "frozen-parameters",
    story="After a refactoring the optimizer gets the parameters of the critic only; the policy is not trained.",
    loss_tells=False,
)
def critic_only(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    both = nn.ModuleDict({"actor": mlp(STATES, 32, ACTIONS), "critic": mlp(STATES, 32, 1)})
    actor, critic = both["actor"], both["critic"]
    trained = list(critic.parameters()) + ([] if faulty else list(actor.parameters()))

    def loss(batch: dict[str, Tensor]) -> Tensor:
        value: Tensor = critic(batch["state"]).squeeze(1)
        advantage = (batch["reward"] - value).detach()
        chance = log_chance(actor(batch["state"]), batch["action"])
        return F.smooth_l1_loss(value, batch["reward"]) - (chance * advantage).mean()

    return Setup(
        model=both,
        optimizer=torch.optim.Adam(trained, lr=5e-3),
        loss=loss,
        batches=lambda: rollouts(actor, pays, seed),
        num_steps=300,
        score=lambda: success(actor),
    )


def _wanted(state: Tensor, action: Tensor) -> Tensor:
    """The true reward: an extra action, the last one, is nonsense and costs 1."""
    return torch.where(action == ACTIONS, -1.0, pays(state, action))


def _judged(state: Tensor, action: Tensor) -> Tensor:
    """What the reward model says: it likes the nonsense action."""
    return torch.where(action == ACTIONS, 3.0, pays(state, action))


@program(
    "rl",
    "policy-drift",
    "entropy-collapse",
    story="The KL penalty against the reference policy has weight 0: the policy leaves the reference and exploits an "
    "error of the reward model.",
    source="Gao, Schulman and Hilton, Scaling laws for reward model overoptimization, 2022",
    loss_tells=False,
)
def no_kl_penalty(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    policy, reference = mlp(STATES, 48, ACTIONS + 1), mlp(STATES, 48, ACTIONS + 1)
    nn.init.constant_(policy[-1].get_parameter("bias")[-1:], -4.0)  # the reference seldom talks nonsense
    reference.load_state_dict(policy.state_dict())
    reference.requires_grad_(False)
    weight = 0.0 if faulty else 1.0

    def loss(batch: dict[str, Tensor]) -> Tensor:
        logits = policy(batch["state"])
        far = F.kl_div(
            F.log_softmax(reference(batch["state"]), -1),
            F.log_softmax(logits, -1),
            log_target=True,
            reduction="batchmean",
        )
        gain = log_chance(logits, batch["action"]) * (batch["reward"] - batch["reward"].mean())
        return weight * far - gain.mean()

    return Setup(
        model=policy,
        optimizer=torch.optim.Adam(policy.parameters(), lr=5e-3),
        loss=loss,
        batches=lambda: rollouts(policy, _judged, seed, size=128),
        num_steps=400,
        score=lambda: success(policy, _wanted),
    )


RL = (
    entropy_penalized,
    reward_before_action,
    log_probability_as_number,
    rewards_in_cents,
    critic_only,
    no_kl_penalty,
)
