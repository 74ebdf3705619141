"""Compute the RL metrics of one batch from its tensors, without a device-to-host transfer.

Notation: r = exp(log pi - log pi_old) is the importance ratio, w = exp(log pi_old - log mu) the weight of a token that
the sampler mu drew. KL is estimated per token by r - 1 - log r (Schulman 2020, "k3"): never negative, low variance.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from steadystep.errors import MisuseError

_LARGEST_LOG = 20.0  # e^20 = 4.9e8: far enough to be seen, and its square is finite in fp32
_SAME = 1e-6  # rewards closer than this, relative to their size, are equal
_TAIL = 0.99


@final
class Monitor:
    """Computes the metrics of a policy update for `guard.step(..., metrics=...)`.

    Args:
        clip: the clip range of the ratio, epsilon or (low, high).

    >>> monitor = Monitor(clip=0.2)
    >>> numbers = monitor.measure(logp=torch.zeros(4), old_logp=torch.tensor([0.0, 0.0, 0.0, -0.5]))
    >>> {name: round(float(value), 3) for name, value in numbers.items()}
    {'kl_old': 0.037, 'ratio_mean': 1.162, 'ratio_max': 1.649, 'clip_fraction': 0.25, 'entropy': 0.125}
    """

    def __init__(self, *, clip: float | tuple[float, float] = 0.2) -> None:
        low, high = clip if isinstance(clip, tuple) else (clip, clip)
        if not (low > 0.0 and high > 0.0):
            raise MisuseError(f"clip = {clip}: must be positive, as in 0.2 or (0.2, 0.28)")
        self._low, self._high = low, high

    @torch.no_grad()
    def measure(
        self,
        *,
        logp: Tensor | None = None,
        old_logp: Tensor | None = None,
        ref_logp: Tensor | None = None,
        sampler_logp: Tensor | None = None,
        advantages: Tensor | None = None,
        rewards: Tensor | None = None,
        groups: Tensor | int | None = None,
        values: Tensor | None = None,
        returns: Tensor | None = None,
        lengths: Tensor | None = None,
        truncated: Tensor | None = None,
        mask: Tensor | None = None,
        entropy: Tensor | None = None,
    ) -> dict[str, float | Tensor]:
        """Return the metrics that the given tensors allow, as tensors without dimensions: nothing is read to the host.

        Args:
            logp: log-probabilities of the tokens or actions under the policy, of shape (batch, time) or (batch,).
            old_logp: the same under the learner's weights at sampling time, as in PPO.
            ref_logp: the same under the reference policy.
            sampler_logp: the same as reported by the engine that drew the samples.
            advantages: one per token, or one per sample.
            rewards: one per sample.
            groups: group of each sample (any whole numbers), or the size of groups that lie side by side.
            values: predictions of the value function.
            returns: what they should have been.
            lengths: length of each response or episode.
            truncated: whether each response was cut off.
            mask: 1 for tokens that count, with the shape of `logp`.
            entropy: entropy per token. Without it, the mean of -log p of the samples stands for it.
        """
        found: dict[str, float | Tensor] = {}
        tokens = _Tokens.of(next((t for t in (logp, old_logp, sampler_logp, entropy) if t is not None), None), mask)
        if logp is not None and old_logp is not None:
            found |= self._ratios(tokens, logp, old_logp, advantages)
        if logp is not None and ref_logp is not None:
            found["kl_ref"] = tokens.mean(_k3(ref_logp.float() - logp.float()))
        learner = logp if old_logp is None else old_logp
        if sampler_logp is not None and learner is not None:
            found |= _mismatch(tokens, learner.float() - sampler_logp.float())
        surprise = entropy if entropy is not None or learner is None else -learner
        if surprise is not None:
            found["entropy"] = tokens.mean(surprise)
        if advantages is not None:
            spread = tokens if advantages.shape == tokens.shape else _Tokens.of(advantages, None)
            found["advantage_std"], found["advantage_peak"] = spread.std(advantages), spread.largest(advantages.abs())
            found |= _agreement(advantages, rewards, groups, values, returns, mask)
        if values is not None and returns is not None:
            found |= _value_function(values, returns, mask)
        return found | _samples(rewards, groups, lengths, truncated)

    def _ratios(self, tokens: "_Tokens", logp: Tensor, old: Tensor, advantages: Tensor | None) -> dict[str, Tensor]:
        log_ratio = (logp.float() - old.float()).clamp(-_LARGEST_LOG, _LARGEST_LOG)
        ratio = log_ratio.exp()
        above, below = ratio > 1.0 + self._high, ratio < 1.0 - self._low
        if advantages is not None:  # PPO's min(): a ratio is cut only where the update would push it further out
            signed = advantages if advantages.dim() >= ratio.dim() else advantages.unsqueeze(-1)
            above, below = above & (signed > 0.0), below & (signed < 0.0)
        return {
            "kl_old": tokens.mean(ratio - 1.0 - log_ratio),
            "ratio_mean": tokens.mean(ratio),
            "ratio_max": tokens.largest(ratio),
            "clip_fraction": tokens.mean((above | below).float()),
        }


@dataclass(frozen=True, slots=True)
class _Tokens:
    """Masked statistics. No boolean indexing: on a GPU its size would have to be read."""

    shape: torch.Size
    mask: Tensor | None
    count: Tensor | int

    @classmethod
    def of(cls, example: Tensor | None, mask: Tensor | None) -> "_Tokens":
        if example is None:
            return cls(torch.Size(()), None, 1)
        if mask is None:
            return cls(example.shape, None, max(example.numel(), 1))
        if mask.shape != example.shape:
            raise MisuseError(f"mask has shape {list(mask.shape)}, the log-probabilities {list(example.shape)}")
        return cls(example.shape, mask.bool(), mask.bool().sum().clamp(min=1))

    def mean(self, values: Tensor) -> Tensor:
        return self._kept(values, 0.0).sum() / self.count

    def std(self, values: Tensor) -> Tensor:
        return self.mean((values.float() - self.mean(values)).square()).sqrt()

    def largest(self, values: Tensor) -> Tensor:
        return self._kept(values, -torch.inf).amax() if values.numel() else values.new_zeros(())

    def correlation(self, first: Tensor, second: Tensor) -> Tensor:
        first, second = first.float() - self.mean(first), second.float() - self.mean(second)
        size = (self.mean(first.square()) * self.mean(second.square())).sqrt()
        product = self.mean(first * second) / size.clamp(min=torch.finfo(torch.float32).tiny)
        return torch.where(size > 0.0, product, torch.zeros_like(product))

    def quantile(self, values: Tensor, share: float) -> Tensor:
        """The value at rank round(share * (count - 1))."""
        ordered = self._kept(values, torch.inf).flatten().sort().values
        count = torch.as_tensor(self.count, device=values.device)
        at = (share * (count - 1)).round().long().reshape(1)
        return ordered.gather(0, at).reshape(())

    def _kept(self, values: Tensor, other: float) -> Tensor:
        values = values.float()
        return values if self.mask is None else torch.where(self.mask, values, other)


def _k3(log_ratio: Tensor) -> Tensor:
    log_ratio = log_ratio.clamp(-_LARGEST_LOG, _LARGEST_LOG)
    return log_ratio.exp() - 1.0 - log_ratio


def _mismatch(tokens: _Tokens, difference: Tensor) -> dict[str, Tensor]:
    weight = difference.clamp(-_LARGEST_LOG, _LARGEST_LOG).exp()
    total, squares = tokens.mean(weight), tokens.mean(weight.square())
    return {
        "mismatch": tokens.mean(difference.abs()),
        "mismatch_tail": tokens.quantile(difference.abs(), _TAIL),
        "mismatch_kl": tokens.mean(_k3(difference)),
        "ess": total.square() / squares,  # (sum w)^2 / (n sum w^2): 1 where all weights are equal
    }


def _agreement(
    advantages: Tensor,
    rewards: Tensor | None,
    groups: Tensor | int | None,
    values: Tensor | None,
    returns: Tensor | None,
    mask: Tensor | None,
) -> dict[str, Tensor]:
    """Whether advantages and what they stand for rise together: returns less values, or rewards inside their group."""
    if values is not None and returns is not None and values.shape == returns.shape == advantages.shape:
        over = _Tokens.of(values, mask if mask is not None and mask.shape == values.shape else None)
        return {"advantage_agreement": over.correlation(advantages, returns.float() - values.float())}
    if rewards is None or rewards.numel() < 2 or advantages.shape[:1] != rewards.shape:
        return {}
    earned, each = rewards.float(), advantages.float()
    each = each.flatten(1).mean(1) if each.dim() > 1 else each
    if groups is not None:
        place = _places(earned, groups)
        earned, each = _centred(earned, place), _centred(each, place)
    return {"advantage_agreement": _correlation(earned, each)}


def _value_function(values: Tensor, returns: Tensor, mask: Tensor | None) -> dict[str, Tensor]:
    values, returns = values.float(), returns.float()
    over = _Tokens.of(values, mask if mask is not None and mask.shape == values.shape else None)
    error = returns - values
    variance = over.std(returns).square()
    explained = 1.0 - over.std(error).square() / variance.clamp(min=torch.finfo(torch.float32).tiny)
    return {
        "explained_variance": torch.where(variance > 0.0, explained, torch.zeros_like(explained)),
        "value_loss": over.mean(error.square()),
        "value_mean": over.mean(values),
    }


def _samples(
    rewards: Tensor | None, groups: Tensor | int | None, lengths: Tensor | None, truncated: Tensor | None
) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    if rewards is not None:
        rewards = rewards.float().flatten()
        found["reward"], found["reward_std"] = rewards.mean(), rewards.std(correction=0)
        if groups is not None:
            found["zero_variance_groups"] = _equal_groups(rewards, groups)
    if lengths is not None:
        lengths = lengths.float().flatten()
        found["response_length"] = lengths.mean()
        if rewards is not None and rewards.shape == lengths.shape:
            found["length_correlation"] = _correlation(rewards, lengths)
    if truncated is not None:
        found["truncated_share"] = truncated.float().mean()
    return found


def _equal_groups(rewards: Tensor, groups: Tensor | int) -> Tensor:
    """The share of groups whose rewards are all equal."""
    place = _places(rewards, groups)
    space, last = torch.zeros_like(rewards), place.amax()
    largest = space.scatter_reduce(0, place, rewards, "amax", include_self=False)
    smallest = space.scatter_reduce(0, place, rewards, "amin", include_self=False)
    equal = largest - smallest <= _SAME * torch.maximum(largest.abs(), smallest.abs())
    real = torch.arange(len(rewards), device=rewards.device) <= last  # the rest of the space is unused
    return (equal & real).sum() / (last + 1)


def _places(rewards: Tensor, groups: Tensor | int) -> Tensor:
    """The group of each reward, numbered from 0."""
    if isinstance(groups, int):
        if groups < 1 or rewards.numel() % groups:
            raise MisuseError(f"groups = {groups}: {rewards.numel()} rewards are not a multiple of it")
        return torch.arange(rewards.numel(), device=rewards.device) // groups
    order = groups.flatten().argsort(stable=True)
    known = groups.flatten()[order]
    first = torch.zeros_like(order)
    first[1:] = (known[1:] != known[:-1]).long()
    return torch.zeros_like(order).scatter(0, order, first.cumsum(0))


def _centred(values: Tensor, place: Tensor) -> Tensor:
    """Values less the mean of their group."""
    space = torch.zeros_like(values)
    means = space.scatter_add(0, place, values) / space.scatter_add(0, place, torch.ones_like(values)).clamp(min=1.0)
    return values - means[place]


def _correlation(first: Tensor, second: Tensor) -> Tensor:
    first, second = first - first.mean(), second - second.mean()
    size = (first.square().sum() * second.square().sum()).sqrt()
    product = (first * second).sum() / size.clamp(min=torch.finfo(torch.float32).tiny)
    return torch.where(size > 0.0, product, torch.zeros_like(product))


def grad_norms_by_sign(losses: Tensor, advantages: Tensor, parameters: Iterable[Tensor]) -> dict[str, float | Tensor]:
    """Return the gradient norms of the samples with positive and with negative advantage.

    Two extra backward passes: call it every few dozen steps. The graph of `losses` is kept.

    Args:
        losses: the policy loss of each token or sample, not yet averaged.
        advantages: one per element of `losses`, or one per sample.
        parameters: the trained parameters of the policy.
    """
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    signed = advantages if advantages.dim() >= losses.dim() else advantages.unsqueeze(-1)
    found: dict[str, float | Tensor] = {}
    for name, chosen in (("grad_norm_positive", signed > 0.0), ("grad_norm_negative", signed < 0.0)):
        part = torch.where(chosen, losses, torch.zeros_like(losses)).sum() / max(losses.numel(), 1)
        gradients = torch.autograd.grad(part, trained, retain_graph=True, allow_unused=True)
        squares = [gradient.float().square().sum() for gradient in gradients if gradient is not None]
        found[name] = torch.stack(squares).sum().sqrt() if squares else losses.new_zeros(())
    return found
