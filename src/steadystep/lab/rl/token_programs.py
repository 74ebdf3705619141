"""Token-level policy gradients: GRPO, PPO and REINFORCE on the generated tasks.

GRPO: Shao et al. 2024 (arXiv 2402.03300), group advantages, the k3 estimate of the KL to a reference. The sampler's
log-probabilities are kept apart from the learner's, as where another engine generates the rollouts.
"""

import copy
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from steadystep.lab.rl.program import Batch, Numbers, Program, RewardFaults, clipped_surrogate
from steadystep.lab.rl.token_tasks import EOS, POLICIES, TASKS, Policy
from steadystep.rl import Monitor


@dataclass(slots=True, kw_only=True)
class TokenSettings(RewardFaults):
    """What a run is made with, and what a planted collapse changes."""

    algorithm: Literal["grpo", "ppo", "reinforce"] = "grpo"
    policy: str = "gru"
    lr: float = 2e-3
    num_prompts: int = 8
    group: int = 8
    warm_steps: int = 120
    """Supervised steps that make the reference, on answers of which a share is wrong."""
    wrong: float = 0.6
    epochs: int = 1
    minibatches: int = 1
    clip: float = 0.2
    kl: float = 0.01
    entropy: float = 0.0
    value: float = 0.5
    normalise: bool = True
    """Divide group advantages by their deviation."""
    max_norm: float = 0.0
    """Clip of the gradient norm inside the program's own loop; 0 for none."""
    # what faults change
    temperature: float = 1.0
    sampler: Literal["exact", "bf16", "int4", "int2", "stale", "reference"] = "exact"
    """The weights that generate: the learner's, rounded ones, those of the moment it was set, or the first ones."""
    advantage_mult: float = 1.0
    per_token: float = 0.0
    """Reward per generated token."""
    constant: bool = False
    """The reward model answers the same for everything, up to rounding."""


class TokenProgram(Program):
    """A policy that answers prompts, improved by what its answers earn."""

    settings: TokenSettings

    def __init__(self, task: str, settings: TokenSettings, seed: int) -> None:
        super().__init__(seed)
        self.task, self.settings = TASKS[task], settings
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.model: Policy = POLICIES[settings.policy](self.task, critic=settings.algorithm == "ppo")
        self._warm_up()
        self.reference = copy.deepcopy(self.model).requires_grad_(False)
        self._stale: Policy | None = None
        self.optimizers = (torch.optim.Adam(self.model.parameters(), lr=settings.lr),)
        self._waiting: list[Batch] = []
        self._told: dict[str, float | Tensor] = {}
        self._monitor = Monitor(clip=settings.clip)

    def _warm_up(self) -> None:
        """Make a policy that is right now and then, as a pretrained one is."""
        optimizer = torch.optim.Adam(self.model.parameters(), lr=5e-3)
        for _ in range(self.settings.warm_steps):
            prompts = self.task.prompts(64, self.rng)
            answers = self.task.answers(prompts)
            random = torch.randint(0, self.task.vocabulary, answers.shape, generator=self.rng)
            wrong = torch.rand(answers.shape, generator=self.rng) < self.settings.wrong
            wanted = torch.where(wrong & (answers != EOS), random, answers)
            logits, _ = self._forward(self.model, prompts, wanted)
            optimizer.zero_grad()
            functional.cross_entropy(logits.flatten(0, 1), wanted.flatten()).backward()  # type: ignore[no-untyped-call]
            optimizer.step()

    def _forward(self, policy: Policy, prompts: Tensor, responses: Tensor) -> tuple[Tensor, Tensor | None]:
        """Logits of every response token, and values before it."""
        begin = torch.full_like(prompts[:, :1], self.task.vocabulary)
        features = policy.features(torch.cat([prompts, begin, responses[:, :-1]], 1))[:, prompts.shape[1] :]
        return policy.head(features), None if policy.value is None else policy.value(features).squeeze(-1)

    @torch.no_grad()
    def _sample(self, policy: Policy, prompts: Tensor, temperature: float, rng: torch.Generator) -> Tensor:
        token = torch.cat([prompts, torch.full_like(prompts[:, :1], self.task.vocabulary)], 1)
        over, state, drawn = torch.zeros(len(prompts), dtype=torch.bool), None, []
        for _ in range(self.task.max_len):
            features, state = policy.extend(token, state)
            logits = policy.head(features)
            gumbel = -torch.rand(logits.shape, generator=rng).clamp_min(1e-20).log().neg().log()
            chosen = torch.where(over, EOS, (logits.float() / temperature + gumbel).argmax(1))  # a NaN never raises
            if self.task.ends:
                over |= chosen == EOS
            token = chosen[:, None]
            drawn.append(token)
        return torch.cat(drawn, 1)

    def _sampler(self) -> Policy:
        """The policy as the engine that generates has it."""
        if self.settings.sampler == "stale":
            self._stale = self._stale or copy.deepcopy(self.model).requires_grad_(False)
            return self._stale
        self._stale = None
        if self.settings.sampler == "exact":
            return self.model
        if self.settings.sampler == "reference":
            return self.reference
        rounded = copy.deepcopy(self.model).requires_grad_(False)
        for parameter in rounded.parameters():
            parameter.copy_(quantised(parameter, self.settings.sampler))
        return rounded

    def _mask(self, responses: Tensor) -> Tensor:
        """1 up to and including the first EOS."""
        if not self.task.ends:
            return torch.ones(responses.shape)
        return ((responses == EOS).long().cumsum(1) - (responses == EOS).long() == 0).float()

    def _log_probs(self, policy: Policy, prompts: Tensor, responses: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Log-probabilities of the response, entropy per token, values."""
        logits, values = self._forward(policy, prompts, responses)
        log = (logits / self.settings.temperature).log_softmax(-1)
        return log.gather(2, responses[..., None]).squeeze(-1), -(log.exp() * log).sum(-1), values

    def _rewards(self, prompts: Tensor, responses: Tensor, mask: Tensor) -> Tensor:
        """As the reward function of the program sees them, faults included."""
        settings = self.settings
        rewards = self.task.score(responses, self.task.answers(prompts))
        if settings.constant:
            rewards = 1e-6 * torch.randn(rewards.shape, generator=self.rng)
        if settings.exploit:
            rewards = settings.exploited(rewards, self.task.exploit(responses))
        if settings.per_token:
            rewards = rewards + settings.per_token * mask.sum(1)
        return settings.disturbed(rewards, self.rng)

    def _advantages(self, rewards: Tensor) -> Tensor:
        settings = self.settings
        groups = rewards.view(settings.num_prompts, settings.group)
        if settings.algorithm == "reinforce":  # leave-one-out baseline (Kool et al. 2019)
            centred = (groups - groups.mean(1, keepdim=True)) * settings.group / (settings.group - 1)
        else:
            centred = groups - groups.mean(1, keepdim=True)
        if settings.normalise and settings.algorithm == "grpo":
            centred = centred / (groups.std(1, keepdim=True) + 1e-6)
        shaped: Tensor = settings.advantage_mult * centred.flatten()
        return shaped

    @torch.no_grad()
    def _rollout(self) -> Batch:
        settings = self.settings
        prompts = self.task.prompts(settings.num_prompts, self.rng).repeat_interleave(settings.group, 0)
        sampler = self._sampler()
        responses = self._sample(sampler, prompts, settings.temperature, self.rng)
        mask = self._mask(responses)
        log, _, values = self._log_probs(self.model, prompts, responses)
        sampled = log if sampler is self.model else self._log_probs(sampler, prompts, responses)[0]
        referred = self._log_probs(self.reference, prompts, responses)[0]
        rewards = self._rewards(prompts, responses, mask)
        if values is None:
            advantages, returns = self._advantages(rewards)[:, None].expand_as(log), torch.zeros_like(log)
        else:
            returns = rewards[:, None].expand_as(log)
            advantages = returns - values
            if settings.normalise:
                advantages = (advantages - advantages[mask > 0].mean()) / (advantages[mask > 0].std() + 1e-6)
            advantages = settings.advantage_mult * advantages
        whole = mask.sum(1) == self.task.max_len
        self._told = self._monitor.measure(
            rewards=rewards,
            advantages=None if self.model.value is not None else advantages[:, 0],
            groups=settings.group,
            lengths=mask.sum(1),
            truncated=whole & (responses[:, -1] != EOS) if self.task.ends else None,
        )
        return prompts, responses, mask, log, sampled, referred, advantages, returns

    def batch(self) -> Batch:
        """Return the next minibatch of the rollout."""
        settings = self.settings
        if not self._waiting:
            rollout = self._rollout()
            for _ in range(settings.epochs):
                order = torch.randperm(len(rollout[0]), generator=self.rng) if settings.minibatches > 1 else None
                parts = [order] if order is None else list(order.chunk(settings.minibatches))
                self._waiting += [rollout if p is None else tuple(each[p] for each in rollout) for p in parts]
        return self._waiting.pop(0)

    def loss(self, batch: Batch) -> Tensor:
        """Return the clipped surrogate, with KL, entropy and value terms by the settings."""
        prompts, responses, mask, before, _, referred, advantages, returns = batch
        settings, tokens = self.settings, mask.sum()
        log, entropy, values = self._log_probs(self.model, prompts, responses)
        if settings.algorithm == "reinforce":
            per_token = -log * advantages
        else:
            per_token = clipped_surrogate((log - before).exp(), advantages, settings.clip)
        if settings.kl:
            gap = referred - log
            per_token = per_token + settings.kl * (gap.exp() - 1.0 - gap)
        if settings.entropy:
            per_token = per_token - settings.entropy * entropy
        if values is not None:
            per_token = per_token + settings.value * (values - returns).square()
        return (per_token * mask).sum() / tokens

    @torch.no_grad()
    def metrics(self, batch: Batch) -> Numbers:
        """Return the metrics of this minibatch, and those of the rollout with its first one."""
        prompts, responses, mask, before, sampled, referred, advantages, returns = batch
        log, entropy, values = self._log_probs(self.model, prompts, responses)
        told = self._monitor.measure(
            logp=log,
            old_logp=before,
            ref_logp=referred,
            sampler_logp=sampled,
            advantages=advantages,
            values=values,
            returns=returns,
            mask=mask,
            entropy=entropy,
        )
        told, self._told = self._told | told, {}
        return {name: float(value) for name, value in told.items()}  # sync: CPU only

    @torch.no_grad()
    def rollouts(self, seed: int) -> float:
        """Return the mean grade of 128 responses, sampled at temperature 1 with the learner's weights."""
        rng = torch.Generator().manual_seed(seed)
        prompts = self.task.prompts(128, rng)
        return float(self.task.grade(self._sample(self.model, prompts, 1.0, rng), self.task.answers(prompts)).mean())


def quantised(weights: Tensor, form: str) -> Tensor:
    """Round to bf16, or to whole multiples of a seventh (int4) of the largest weight, or of all of it (int2)."""
    if form == "bf16":
        return weights.to(torch.bfloat16).to(weights.dtype)
    unit = weights.abs().max() / {"int4": 7, "int2": 1}[form]
    return (weights / unit).round() * unit
