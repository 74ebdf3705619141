"""Adaptive gradient clipping per unit: Brock, De, Smith, Simonyan, 2021, arXiv:2102.06171.

    norm(g_row) > lambda * max(norm(w_row), eps):   g_row <- g_row * lambda * max(norm(w_row), eps) / norm(g_row)

A unit is what leads to one output: a row of a linear weight, a filter of a convolution. A tensor with no more than one
dimension longer than 1 (bias, gain, scalar) is one unit, as in the authors' code.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any, final

import torch
from torch import Tensor
from torch.nn import Parameter

from steadystep.clip import checks, sharded
from steadystep.clip.gradients import Params, named
from steadystep.clip.report import ClipReport
from steadystep.errors import ConfigError, UnsupportedError

_HALVES = (torch.bfloat16, torch.float16)

Excluded = str | Parameter | Iterable[str | Parameter]


def agc_(params: Params, *, clip_factor: float = 0.01, eps: float = 1e-3, exclude: Excluded = ()) -> ClipReport:
    """Scale each unit's gradient in place to at most `clip_factor` times the norm of that unit's weights.

    The paper leaves the last linear layer alone: name it in `exclude`, by parameters or, with `named_parameters()`, by
    names or patterns such as `"head.*"`. What is excluded still counts in the norm and in the test for finiteness.
    `report.scale` is the global norm after ÷ before. Costs one host read.

    >>> layer = torch.nn.Linear(2, 2, bias=False)
    >>> layer.weight.data = torch.tensor([[3.0, 4.0], [0.0, 1.0]])
    >>> layer.weight.grad = torch.tensor([[0.0, 1.0], [0.0, 0.001]])
    >>> agc_(layer.parameters()).clipped
    True
    >>> layer.weight.grad
    tensor([[0.0000, 0.0500],
            [0.0000, 0.0010]])
    """
    checks.real("clip_factor", clip_factor)
    checks.real("eps", eps)
    everything = named(params)
    spared = _spared(everything, exclude)
    holders = {name: p for name, p in everything.items() if p.grad is not None}
    sharded.refuse_unreduced((p.grad for p in holders.values() if p.grad is not None), "agc_")
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
        norms, factors = sharded.local_part(self.norms), sharded.local_part(self.factors)
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
                f"agc_ handles gradients that are sparse in rows, not in {grad.sparse_dim()} dimensions"
            )
        rows = grad.coalesce()
        values = rows._values()
        weight = weight if whole else weight[rows._indices()[0]]
    norms = _unit_norms(values, whole)
    limits = _unit_norms(weight, whole).clamp(min=eps) * clip_factor
    return _Units(grad, values, norms, sharded.like(limits, norms) if sharded.is_sharded([norms]) else limits)


def _unit_norms(tensor: Tensor, whole: bool) -> Tensor:
    dims = None if whole else tuple(range(1, tensor.ndim))
    dtype = torch.float32 if tensor.dtype in _HALVES else None  # a norm held in fp16 overflows at 65504
    return sharded.without_partials(torch.linalg.vector_norm(tensor, 2.0, dims, keepdim=not whole, dtype=dtype))


def _summed(units: list[_Units]) -> tuple[float, float, float]:
    groups: dict[Any, list[_Units]] = {}
    for unit in units:
        spread: Any = unit.norms
        key = (spread.device_mesh, spread.placements) if sharded.is_sharded([spread]) else None
        groups.setdefault(key, []).append(unit)
    totals = []
    for key, members in groups.items():
        summaries = [unit.summary() for unit in members]
        local = torch.linalg.vector_norm(torch.stack([s.to(summaries[0].device) for s in summaries]), dim=0)
        totals.append(local if key is None else sharded.l2_over_ranks(local, members[0].norms))
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
        return f"exclude = {item!r}: to exclude by name, give agc_ model.named_parameters()"
    near = get_close_matches(item, everything, n=3, cutoff=0.3) or list(everything)[-3:]
    return f"exclude = {item!r}: matches no parameter; near: {', '.join(near)}"
