"""Twenty optimizers with a learning rate each; a task multiplies it by its own factor."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tests.field.tasks import Task


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerInfo:
    """How to make one."""

    make: Callable[..., Optimizer]
    lr: float
    scale_free: bool = True
    """Ten times the gradient gives about the same update."""

    def on(self, task: type[Task], parameters: Iterable[nn.Parameter]) -> Optimizer:
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        optimizer = self.make(trained, lr=self.lr * (task.adam_mult if self.scale_free else task.sgd_mult))
        for group in optimizer.param_groups:
            if task.beta1 is not None and "betas" in group:
                group["betas"] = (task.beta1, group["betas"][1])
        return optimizer


class Lion(Optimizer):
    """The sign of an interpolated momentum (Chen et al. 2023), with decoupled decay."""

    def __init__(self, params: Any, lr: float, betas: tuple[float, float] = (0.9, 0.99), decay: float = 0.01) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None) -> Tensor | None:
        loss = _evaluated(closure)
        for group in self.param_groups:
            for weight in _with_gradient(group):
                momentum = self.state[weight].setdefault("momentum", torch.zeros_like(weight))
                update = torch.lerp(weight.grad, momentum, group["betas"][0]).sign()
                weight.mul_(1.0 - group["lr"] * group["weight_decay"]).add_(update, alpha=-group["lr"])
                momentum.lerp_(weight.grad, 1.0 - group["betas"][1])
        return loss


class SignSGD(Optimizer):
    """The sign of the gradient, and no state at all (Bernstein et al. 2018)."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None) -> Tensor | None:
        loss = _evaluated(closure)
        for group in self.param_groups:
            for weight in _with_gradient(group):
                weight.add_(weight.grad.sign(), alpha=-group["lr"])
        return loss


class Lamb(Optimizer):
    """Adam's direction, as long as a share `lr` of the weights (You et al. 2020)."""

    def __init__(self, params: Any, lr: float, betas: tuple[float, float] = (0.9, 0.99)) -> None:
        super().__init__(params, {"lr": lr, "betas": betas})

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None) -> Tensor | None:
        loss = _evaluated(closure)
        for group in self.param_groups:
            slow, square = group["betas"]
            for weight in _with_gradient(group):
                state = self.state[weight]
                if not state:
                    state.update(step=0, first=torch.zeros_like(weight), second=torch.zeros_like(weight))
                state["step"] += 1
                state["first"].lerp_(weight.grad, 1.0 - slow)
                state["second"].mul_(square).addcmul_(weight.grad, weight.grad, value=1.0 - square)
                second = (state["second"] / (1.0 - square ** state["step"])).sqrt_().add_(1e-8)
                update = state["first"] / (1.0 - slow ** state["step"]) / second
                trust = weight.norm().clamp(min=0.1) / update.norm().clamp(min=1e-8)
                weight.sub_(group["lr"] * trust * update)
        return loss


def _evaluated(closure: Callable[[], Tensor] | None) -> Tensor | None:
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def _with_gradient(group: dict[str, Any]) -> list[Tensor]:
    return [weight for weight in group["params"] if weight.grad is not None]


def _info(make: Callable[..., Optimizer], lr: float, *, scale_free: bool = True, **options: Any) -> OptimizerInfo:
    return OptimizerInfo(make=partial(make, **options), lr=lr, scale_free=scale_free)


_torch = torch.optim
OPTIMIZERS: dict[str, OptimizerInfo] = {
    "sgd": _info(_torch.SGD, 0.1, scale_free=False),
    "sgd-momentum": _info(_torch.SGD, 0.02, scale_free=False, momentum=0.9),
    "nesterov": _info(_torch.SGD, 0.02, scale_free=False, momentum=0.9, nesterov=True, weight_decay=1e-4),
    "adam": _info(_torch.Adam, 3e-3),
    "adamw": _info(_torch.AdamW, 3e-3),
    "adamw-fused": _info(_torch.AdamW, 3e-3, fused=True),
    "adamw-foreach": _info(_torch.AdamW, 3e-3, foreach=True, betas=(0.9, 0.95), weight_decay=0.1),
    "amsgrad": _info(_torch.Adam, 3e-3, amsgrad=True),
    "nadam": _info(_torch.NAdam, 3e-3),
    "radam": _info(_torch.RAdam, 6e-3),
    "adamax": _info(_torch.Adamax, 5e-3),
    "rmsprop": _info(_torch.RMSprop, 1e-3),
    "rmsprop-momentum": _info(_torch.RMSprop, 3e-4, momentum=0.9),
    "adagrad": _info(_torch.Adagrad, 2e-2),
    "adadelta": _info(_torch.Adadelta, 1.0),
    "adafactor": _info(_torch.Adafactor, 1e-2),
    "asgd": _info(_torch.ASGD, 0.1, scale_free=False, t0=200),
    "lion": _info(Lion, 7e-4),
    "signsgd": _info(SignSGD, 1e-3),
    "lamb": _info(Lamb, 5e-3),
}
