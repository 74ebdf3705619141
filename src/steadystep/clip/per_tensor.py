"""Clipping each tensor against its own past, the AdaGC rule: Wang and others, 2025, arXiv:2502.11034.

warm-up:  h = min(1, lambda_abs / global norm),   gamma_i <- min(gamma_i, h * norm_i)
then:     h_i = min(1, lambda_rel * gamma_i / norm_i),   gamma_i <- beta * gamma_i + (1 - beta) * h_i * norm_i
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, final

import torch
from torch import Tensor
from torch.nn import Parameter

from steadystep._utils import numbers, tensors
from steadystep._utils.text import alike
from steadystep.clip import l2_over_ranks
from steadystep.clip.global_norm import ClipReport, Params, measured, multiply_each_, named
from steadystep.errors import ConfigError, UnsupportedError


@final
@dataclass(frozen=True, slots=True)
class _Past:
    """What one tensor has taught: gamma, and from how many steps."""

    level: float = math.inf
    steps: int = 0


@final
class TensorEMAClip:
    """Clips each tensor's gradient norm to `relative_limit` times the moving average of its own clipped norms.

    Pass `named_parameters()` if the list of parameters may change; without names, tensors are known by their position.

    Args:
        relative_limit: the limit, as a multiple of a tensor's moving average.
        beta: decay of the moving average.
        warmup_steps: number of norms that a tensor learns before it has a limit of its own.
        warmup_max_norm: global norm to clip to during warmup.

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
        self._relative_limit = numbers.real("relative_limit", relative_limit, above=1.0)
        self._beta = numbers.fraction("beta", beta)
        self._warmup_steps = numbers.whole("warmup_steps", warmup_steps, least=1)
        self._warmup_max_norm = numbers.real("warmup_max_norm", warmup_max_norm, above=0.0)
        self._past: dict[str, _Past] = {}

    def clip_(self, params: Params) -> ClipReport:
        """Clip the gradients of `params` in place, each tensor by itself, and learn from their norms."""
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
        """Return the largest norm that each tensor may have in this step. Changes nothing."""
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
        """Learn from the norms of one step as measured; if one is not finite, from none.

        A norm of exactly zero is ignored for its tensor: the limit would become zero in warmup and stay there (the
        layers below a zero-initialized one start like that).
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
        """Return the state as plain JSON."""
        return {"tensors": {name: {"level": p.level, "steps": p.steps} for name, p in self._past.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`."""
        numbers.state_keys("TensorEMAClip", state, "tensors")
        past = {}
        for name, entry in state["tensors"].items():
            numbers.state_keys(f"TensorEMAClip for {name!r}", entry, "level", "steps")
            past[name] = _Past(
                numbers.real("level", entry["level"], above=0.0), numbers.whole("steps", entry["steps"], least=1)
            )
        self._past = past


_HALVES = (torch.bfloat16, torch.float16)

Excluded = str | Parameter | Iterable[str | Parameter]


def agc_(params: Params, *, clip_factor: float = 0.01, eps: float = 1e-3, exclude: Excluded = ()) -> ClipReport:
    """Scale each unit's gradient in place to at most `clip_factor` times the norm of that unit's weights.

    Args:
        params: parameters, named parameters or a single parameter.
        clip_factor: largest ratio of gradient norm to weight norm.
        eps: lower limit of the weight norm, for units that start at zero.
        exclude: parameters or, with `named_parameters()`, names or globs such as `"head.*"` that are not clipped. The
            paper excludes the last linear layer. They still count in the norm and in the finiteness check.

    Returns:
        `scale` is the global norm after ÷ before. Costs one host read.

    >>> layer = torch.nn.Linear(2, 2, bias=False)
    >>> layer.weight.data = torch.tensor([[3.0, 4.0], [0.0, 1.0]])
    >>> layer.weight.grad = torch.tensor([[0.0, 1.0], [0.0, 0.001]])
    >>> agc_(layer.parameters()).clipped
    True
    >>> layer.weight.grad
    tensor([[0.0000, 0.0500],
            [0.0000, 0.0010]])
    """
    numbers.real("clip_factor", clip_factor, above=0.0)
    numbers.real("eps", eps, above=0.0)
    everything = named(params)
    spared = _spared(everything, exclude)
    holders = {name: p for name, p in everything.items() if p.grad is not None}
    tensors.refuse_unreduced((p.grad for p in holders.values() if p.grad is not None), "agc_")
    units = [_units(p, math.inf if name in spared else clip_factor, eps) for name, p in holders.items()]
    before, after, above = _summed(units)
    if not math.isfinite(before):
        return ClipReport.refused(before)
    if not above:
        return ClipReport.scaled(before, 1.0)
    for unit in units:
        unit.scale_()
    return ClipReport(norm_before=before, scale=after / before, clipped=True, finite=True)


def scale_units_(params: Iterable[Parameter], *, clip_factor: float = 0.01, eps: float = 1e-3) -> None:
    """As `agc_` for gradients that are known to be finite, without a report and without a host read."""
    for parameter in params:
        _units(parameter, clip_factor, eps).scale_()


@final
@dataclass(frozen=True, slots=True)
class _Units:
    """The units of one tensor. `values` are the elements, one unit per row, or one unit if `norms` has no dimension."""

    grad: Tensor
    values: Tensor
    norms: Tensor
    limits: Tensor

    @property
    def factors(self) -> Tensor:
        return torch.where(self.norms > self.limits, self.limits / self.norms, 1.0)

    @torch.no_grad()
    def scale_(self) -> None:
        self.values.mul_(self.factors)
        if self.grad.is_sparse and not self.grad.is_coalesced():
            rows = self.grad.coalesce()
            rows._values().copy_(self.values)
            self.grad.copy_(rows)

    @torch.no_grad()
    def summary(self) -> Tensor:
        """L2 norms of the unit norms before, after, and of the flags of those above their limit."""
        norms, factors = tensors.local_part(self.norms), tensors.local_part(self.factors)
        flags = (factors < 1.0).to(norms.dtype)
        return torch.stack([torch.linalg.vector_norm(x) for x in (norms, norms * factors, flags)])


@torch.no_grad()
def _units(parameter: Parameter, clip_factor: float, eps: float) -> _Units:
    grad, weight = parameter.grad, parameter.detach()
    assert grad is not None
    values = grad
    whole = sum(length > 1 for length in weight.shape) <= 1
    if grad.is_sparse:
        if grad.sparse_dim() != 1:
            raise UnsupportedError(
                f"agc_ supports gradients that are sparse in rows, not in {grad.sparse_dim()} dimensions"
            )
        rows = grad.coalesce()
        values = rows._values()
        weight = weight if whole else weight[rows._indices()[0]]
    norms = _unit_norms(values, whole)
    limits = _unit_norms(weight, whole).clamp(min=eps) * clip_factor
    return _Units(grad, values, norms, tensors.like(limits, norms) if tensors.is_sharded([norms]) else limits)


def _unit_norms(tensor: Tensor, whole: bool) -> Tensor:
    dims = None if whole else tuple(range(1, tensor.ndim))
    dtype = torch.float32 if tensor.dtype in _HALVES else None  # a norm held in fp16 overflows at 65504
    return tensors.without_partials(torch.linalg.vector_norm(tensor, 2.0, dims, keepdim=not whole, dtype=dtype))


def _summed(units: list[_Units]) -> tuple[float, float, float]:
    groups: dict[Any, list[_Units]] = {}
    for unit in units:
        spread: Any = unit.norms
        key = (spread.device_mesh, spread.placements) if tensors.is_sharded([spread]) else None
        groups.setdefault(key, []).append(unit)
    totals = []
    for key, members in groups.items():
        summaries = [unit.summary() for unit in members]
        local = torch.linalg.vector_norm(torch.stack([s.to(summaries[0].device) for s in summaries]), dim=0)
        totals.append(local if key is None else l2_over_ranks(local, members[0].norms))
    if not totals:
        return 0.0, 0.0, 0.0
    together = torch.linalg.vector_norm(torch.stack([t.to(totals[0].device) for t in totals]), dim=0)
    before, after, above = together.tolist()  # sync: the report
    return before, after, above


def _spared(everything: dict[str, Parameter], exclude: Excluded) -> set[str]:
    wanted = [exclude] if isinstance(exclude, str | Parameter) else list(exclude)
    spared: set[str] = set()
    for item in wanted:
        if isinstance(item, str):
            found = {name for name in everything if fnmatchcase(name, item)}
        else:
            found = {name for name, parameter in everything.items() if parameter is item}
        if not found:
            raise ConfigError(_matches_nothing(item, everything))
        spared |= found
    return spared


def _matches_nothing(item: str | Parameter, everything: dict[str, Parameter]) -> str:
    if not isinstance(item, str):
        return f"exclude: a parameter of shape {list(item.shape)} is not among those given to agc_"
    if all(name.isdigit() for name in everything):
        return f"exclude = {item!r}: to exclude by name, pass model.named_parameters() to agc_"
    near = alike(item, everything, count=3, cutoff=0.3) or list(everything)[-3:]
    return f"exclude = {item!r}: matches no parameter; similar names: {', '.join(near)}"
