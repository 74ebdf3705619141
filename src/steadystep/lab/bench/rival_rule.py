"""What a rule sees of a step, and what it says about it."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One step before its update. The last three are for rules that look into tensors; 0 where nobody measured them."""

    loss: float
    norm: float
    """Global L2 norm of the gradients."""
    norms: tuple[float, ...] = ()
    """The same for each tensor."""
    unit: float = 0.0
    """The largest norm of a row of gradients over that of its weights (at least 1e-3)."""
    coordinate: float = 0.0
    """The largest g² / v of Adam's v before the update."""
    surprise: float = 0.0
    """The largest RMS_t of a tensor: sqrt(mean(g² / max(v, eps²)))."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RuleAlarm:
    """What a rule makes of one step."""

    alarm: bool = False
    scale: float = 1.0
    """What the gradients are multiplied by; 0 means the update is."""
    scales: tuple[float, ...] = ()
    """One for each tensor, instead."""
    stop: bool = False
    """It ends the run."""


FINE = RuleAlarm()


class RivalRule(Protocol):
    """A rule that others ship, over plain numbers. It learns from what it is shown, in the order it is shown."""

    def update(self, seen: Sample) -> RuleAlarm:
        """Judge a step and learn from it."""
        ...


class RivalAction(Protocol):
    """The act of a rule that needs tensors: called between backward and update."""

    def __call__(self, model: nn.Module, optimizer: Optimizer, step: int) -> None:
        """Change gradients, moments or learning rates for this update."""
        ...


UNIT_LIMIT, UNIT_FLOOR = 0.01, 1e-3
COORDINATE_LIMIT = 5000.0
RESET_STEPS, REWARM_STEPS = 500, 150


@torch.no_grad()
def measured(model: nn.Module, optimizer: Optimizer) -> tuple[float, float, float]:
    """`unit`, `coordinate` and `surprise` of a sample, with the gradients as they are now."""
    units = [(_unit_norms(g) / _unit_norms(p).clamp(min=UNIT_FLOOR)).max() for p, g in _pairs(model)]
    ratios = [torch.where(v > 0, g.square() / v, 0.0).max() for _, g, v, _ in _second_moments(model, optimizer)]
    surprises = [_surprise(g, v, eps) for _, g, v, eps in _second_moments(model, optimizer, coming=True)]
    most = [torch.stack(x).max() if x else torch.zeros(()) for x in (units, ratios, surprises)]
    unit, coordinate, surprise = torch.stack(most).tolist()  # sync: a benchmark
    return unit, coordinate, surprise


@torch.no_grad()
def clip_units(model: nn.Module, optimizer: Optimizer, step: int) -> None:
    """AGC: no row of gradients longer than a hundredth of its weights."""
    for p, g in _pairs(model):
        limits = UNIT_LIMIT * _unit_norms(p).clamp(min=UNIT_FLOOR)
        norms = _unit_norms(g)
        g.mul_(torch.where(norms > limits, limits / norms.clamp(min=1e-6), 1.0))


@final
class Spam:
    """SPAM: no coordinate above sqrt(5000 v); moments forgotten every 500 steps, then 150 steps of warm-up."""

    @torch.no_grad()
    def __call__(self, model: nn.Module, optimizer: Optimizer, step: int) -> None:
        """The learning rate is the loop's again before each call."""
        for _, g, v, _ in _second_moments(model, optimizer):
            tall = (v > 0) & (g.square() > COORDINATE_LIMIT * v)
            g.copy_(torch.where(tall, g.sign() * (COORDINATE_LIMIT * v).sqrt(), g))
        if step and step % RESET_STEPS == 0:
            for slots in optimizer.state.values():
                for name in ("exp_avg", "exp_avg_sq"):
                    if name in slots:
                        slots[name].zero_()
        since = step % RESET_STEPS
        if step >= RESET_STEPS and since < REWARM_STEPS:
            scale_lr(optimizer, (since + 1) / REWARM_STEPS)


@torch.no_grad()
def shrink_updates(model: nn.Module, optimizer: Optimizer, step: int) -> None:
    """StableAdamW: each tensor's learning rate over max(1, RMS_t), by one group per tensor (see `one_group_each`)."""
    surprises = {id(p): _surprise(g, v, eps) for p, g, v, eps in _second_moments(model, optimizer, coming=True)}
    for group in optimizer.param_groups:
        surprise = surprises.get(id(group["params"][0]))
        if surprise is not None:
            group["lr"] /= max(1.0, surprise.item())  # sync: a benchmark


def one_group_each(optimizer: Optimizer) -> None:
    """Every tensor in a parameter group of its own, with the settings it had."""
    groups = [group | {"params": [p]} for group in optimizer.param_groups for p in group["params"]]
    optimizer.param_groups[:] = groups


def scale_lr(optimizer: Optimizer, factor: float) -> None:
    """Every group."""
    for group in optimizer.param_groups:
        group["lr"] *= factor


def _pairs(model: nn.Module) -> Iterator[tuple[Tensor, Tensor]]:
    for p in model.parameters():
        if p.grad is not None:
            yield p.detach(), p.grad


def _second_moments(
    model: nn.Module, optimizer: Optimizer, *, coming: bool = False
) -> Iterator[tuple[Tensor, Tensor, Tensor, float]]:
    """Weight, gradient, v and eps of every tensor under Adam; `coming`: v as this update will leave it, unbiased."""
    for group in optimizer.param_groups:
        for p in group["params"]:
            slots: dict[str, Any] = optimizer.state.get(p, {})
            if p.grad is None or "exp_avg_sq" not in slots:
                continue
            v, beta = slots["exp_avg_sq"], float(group["betas"][1])
            if coming:
                count = float(slots["step"]) + 1  # sync: a benchmark; torch keeps it on the host
                v = (beta * v + (1 - beta) * p.grad.square()) / (1 - beta**count)
            yield p, p.grad, v, float(group["eps"])


def _surprise(grad: Tensor, v: Tensor, eps: float) -> Tensor:
    return (grad.square() / v.clamp(min=eps * eps)).mean().sqrt()


def _unit_norms(tensor: Tensor) -> Tensor:
    if tensor.ndim <= 1:
        whole: Tensor = torch.linalg.vector_norm(tensor)
        return whole
    rows: Tensor = torch.linalg.vector_norm(tensor, dim=tuple(range(1, tensor.ndim)), keepdim=True)
    return rows
