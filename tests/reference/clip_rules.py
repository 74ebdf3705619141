"""The clipping rules, slow and obvious, from the formulas of their papers."""

import math

import numpy as np
import torch
from torch import Tensor


def usable(norm: float) -> bool:
    return math.isfinite(norm) and norm > 0


def zclip(
    norms: list[float], *, z_threshold: float, alpha: float, warmup_steps: int, max_norm: float = math.inf
) -> list[float]:
    """arXiv:2504.02507: the limit of every step; mean and variance of the warm-up, then of the clipped norms."""
    limits = []
    history: list[float] = []
    mean = variance = 0.0
    for norm in norms:
        if not math.isfinite(norm):
            limits.append(0.0)
            continue
        limit = math.inf
        if len(history) >= warmup_steps:
            z = (norm - mean) / (math.sqrt(variance) + 1e-6)
            if z > z_threshold:
                eta = z / z_threshold
                limit = mean + z_threshold * math.sqrt(variance) / eta
        limits.append(min(limit, max_norm))
        if not usable(norm):
            continue
        history.append(norm)
        if len(history) < warmup_steps:
            continue
        if len(history) == warmup_steps:
            mean, variance = float(np.mean(history)), float(np.var(history))
        else:
            clipped = min(norm, limit)
            mean = alpha * mean + (1 - alpha) * clipped
            variance = alpha * variance + (1 - alpha) * (clipped - mean) ** 2
    return limits


def autoclip(norms: list[float], *, percentile: float, history_steps: int) -> list[float]:
    """arXiv:2007.14469: remember the norm, then take the percentile of what is remembered."""
    limits = []
    history: list[float] = []
    for norm in norms:
        if not math.isfinite(norm):
            limits.append(0.0)
        elif norm == 0:
            limits.append(math.inf)
        else:
            history.append(norm)
            limits.append(float(np.percentile(history[-history_steps:], percentile)))
    return limits


def adagc(
    steps: list[list[float]], *, relative_limit: float, beta: float, warmup_steps: int, warmup_max_norm: float
) -> list[list[float]]:
    """arXiv:2502.11034: the norms of all tensors after clipping, step by step. A non-finite one refuses its step."""
    num_tensors = len(steps[0]) if steps else 0
    gamma: list[float | None] = [None] * num_tensors
    learned = [0] * num_tensors
    result = []
    for norms in steps:
        total = math.sqrt(sum(n * n for n in norms))
        if not math.isfinite(total):
            result.append(norms)
            continue
        clipped = []
        for i, norm in enumerate(norms):
            warming = learned[i] < warmup_steps
            if warming:
                h = min(1.0, warmup_max_norm / total) if total else 1.0
            else:
                h = min(1.0, relative_limit * gamma[i] / norm) if norm else 1.0
            after = h * norm
            clipped.append(after)
            if norm == 0:
                continue
            if gamma[i] is None:
                gamma[i] = after
            elif warming:
                gamma[i] = min(gamma[i], after)
            else:
                gamma[i] = beta * gamma[i] + (1 - beta) * after
            learned[i] += 1
        result.append(clipped)
    return result


def agc(weight: Tensor, grad: Tensor, *, clip_factor: float, eps: float) -> Tensor:
    """arXiv:2102.06171 and the authors' code: a vector is one unit, else everything that shares the first index."""

    def norm(t: Tensor) -> float:
        return math.sqrt(math.fsum(x * x for x in t.double().flatten().tolist()))

    def clipped(w: Tensor, g: Tensor) -> Tensor:
        limit = clip_factor * max(norm(w), eps)
        return g * (limit / norm(g)) if norm(g) > limit else g

    if torch.squeeze(weight).ndim <= 1:
        return clipped(weight, grad)
    return torch.stack([clipped(w, g) for w, g in zip(weight, grad, strict=True)])
