"""Clipping each tensor against its own past, the AdaGC rule: Wang and others, 2025, arXiv:2502.11034.

warm-up:  h = min(1, lambda_abs / global norm),   gamma_i <- min(gamma_i, h * norm_i)
then:     h_i = min(1, lambda_rel * gamma_i / norm_i),   gamma_i <- beta * gamma_i + (1 - beta) * h_i * norm_i
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

import torch

from steadystep.clip import checks
from steadystep.clip.global_norm import multiply_each_
from steadystep.clip.gradients import Params, measured, named
from steadystep.clip.report import ClipReport


@final
@dataclass(frozen=True, slots=True)
class _Past:
    """What one tensor has taught: gamma, and from how many steps."""

    level: float = math.inf
    steps: int = 0


@final
class TensorEMAClip:
    """Holds each tensor's gradient norm to `relative_limit` times the moving average of its own clipped norms.

    A tensor is in warm-up until it has taught `warmup_steps` norms; meanwhile the global norm is held to
    `warmup_max_norm`. Give `named_parameters()` if the list of parameters may change or people are to read the state;
    without names, tensors are known by their position.

    >>> import torch
    >>> clip = TensorEMAClip(warmup_steps=2)
    >>> calm, wild = (torch.nn.Parameter(torch.zeros(1)) for _ in range(2))
    >>> for norm in (0.5, 0.5, 50.0):
    ...     calm.grad, wild.grad = torch.tensor([0.5]), torch.tensor([norm])
    ...     report = clip.clip_([("calm", calm), ("wild", wild)])
    >>> report.clipped, calm.grad, wild.grad
    (True, tensor([0.5000]), tensor([0.5250]))
    """

    def __init__(
        self,
        *,
        relative_limit: float = 1.05,
        beta: float = 0.98,
        warmup_steps: int = 100,
        warmup_max_norm: float = 1.0,
    ) -> None:
        self._relative_limit = checks.real("relative_limit", relative_limit, above=1.0)
        self._beta = checks.share("beta", beta)
        self._warmup_steps = checks.count("warmup_steps", warmup_steps)
        self._warmup_max_norm = checks.real("warmup_max_norm", warmup_max_norm)
        self._past: dict[str, _Past] = {}

    def clip_(self, params: Params) -> ClipReport:
        """Clip gradients in place, each tensor by itself, and learn from their norms."""
        grads = {name: p.grad for name, p in named(params).items() if p.grad is not None}
        seen = measured(list(grads.values()))
        each = torch.stack(seen.norms).tolist() if grads else []  # sync: the rule needs every norm
        norms = dict(zip(grads, each, strict=True))
        total = math.hypot(*each)
        if not math.isfinite(total):
            return ClipReport.refused(total)
        limits = self.limits(norms)
        self._learn(norms, limits)
        factors = [min(1.0, limits[name] / norm) if norm else 1.0 for name, norm in norms.items()]
        if not any(factor < 1.0 for factor in factors):
            return ClipReport.scaled(total, 1.0)
        multiply_each_(seen.parts, seen.layout, factors)
        after = math.hypot(*(norm * factor for norm, factor in zip(each, factors, strict=True)))
        return ClipReport(norm_before=total, scale=after / total, clipped=True, finite=True)

    def limits(self, norms: Mapping[str, float]) -> dict[str, float]:
        """The largest norm each tensor may have in this step. Changes nothing."""
        total = math.hypot(*norms.values())
        if not math.isfinite(total):
            return dict.fromkeys(norms, 0.0)
        share = self._warmup_max_norm / total if total > self._warmup_max_norm else math.inf
        return {name: self._limit(self._past.get(name, _Past()), norm, share) for name, norm in norms.items()}

    def _limit(self, past: _Past, norm: float, share: float) -> float:
        if past.steps >= self._warmup_steps:
            return self._relative_limit * past.level
        return norm * share if share < 1.0 else math.inf

    def learn(self, norms: Mapping[str, float]) -> None:
        """Take in the norms of one step as they were measured. One that is not finite: nothing to learn from any.

        A norm of exactly zero teaches nothing about its tensor: gamma would become zero in warm-up and stay there, and
        the tensor would never move again (the layers below a zero-initialised one start like that).
        """
        self._learn(norms, self.limits(norms))

    def _learn(self, norms: Mapping[str, float], limits: Mapping[str, float]) -> None:
        for name, limit in limits.items():
            seen = min(norms[name], limit)
            if not seen > 0.0:
                continue
            past = self._past.get(name, _Past())
            if past.steps < self._warmup_steps:
                level = min(past.level, seen)
            else:
                level = self._beta * past.level + (1.0 - self._beta) * seen
            self._past[name] = _Past(level, past.steps + 1)

    def state_dict(self) -> dict[str, Any]:
        """Plain JSON."""
        return {"tensors": {name: {"level": p.level, "steps": p.steps} for name, p in self._past.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on exactly where `state` was taken."""
        checks.keys("TensorEMAClip", state, "tensors")
        past = {}
        for name, entry in state["tensors"].items():
            checks.keys(f"TensorEMAClip for {name!r}", entry, "level", "steps")
            past[name] = _Past(checks.real("level", entry["level"]), checks.count("steps", entry["steps"]))
        self._past = past
