"""Putting one fault into one place."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

Change = Callable[[Any], object]
Loss = Callable[[Tensor, Tensor], Tensor]


def entropy(logits: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, -2).float(), target.flatten())


@dataclass(frozen=True, slots=True, kw_only=True)
class Planted:
    """One step with one fault."""

    what: str
    module: str
    phase: str
    network: Callable[[], nn.Module]
    changes: tuple[Change, ...]
    loss: Loss
    image: float | None
    fp16: bool
    scale: float

    def make(self) -> tuple[nn.Module, Callable[[], Tensor]]:
        """The model and the step."""
        torch.manual_seed(0)
        model = self.network()
        with torch.no_grad():
            for change in self.changes:
                change(model)
        tokens = torch.arange(24).reshape(2, 12) % 16
        x, target = tokens, tokens
        if self.image is not None:
            x, target = torch.randn(4, 1, 6, 6) * self.image, torch.arange(4) % 3

        def work() -> Tensor:
            with torch.autocast("cpu", dtype=torch.float16) if self.fp16 else nullcontext():
                return self.loss(model(x), target)

        return model, work


class WrongDerivative(torch.autograd.Function):
    """A custom operation whose backward divides by zero."""

    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        """Nothing special."""
        return x.clone()

    @staticmethod
    def backward(_: Any, grad: Tensor) -> Tensor:
        """Wrong."""
        return grad / 0


def log_of_zero(logits: Tensor, target: Tensor) -> Tensor:
    return -(entropy(logits, target) * 0).log()


def root_of_zero(logits: Tensor, _: Tensor) -> Tensor:
    return (logits - logits.detach()).square().sum().sqrt()


def log_of_positive(x: Tensor) -> Tensor:
    """The classical trap: the branch that is not taken has an infinite derivative."""
    y = x * (x > 0)
    return torch.where(y > 0, y.log(), torch.zeros_like(y))


def distance(x: Tensor) -> Tensor:
    """Of each token to itself: zero, with an infinite derivative."""
    return x + (x - x.detach()).square().sum(-1, keepdim=True).sqrt()


def root_below_top(x: Tensor) -> Tensor:
    """Zero at the largest value, with an infinite derivative there."""
    return (x.max().detach() - x).sqrt()


def filled(path: str, value: float, index: Any = ...) -> Change:
    """Writes into a parameter or a buffer."""
    return lambda model: dict([*model.named_parameters(), *model.named_buffers()])[path].__setitem__(index, value)


def times(path: str, factor: float) -> Change:
    return lambda model: dict(model.named_parameters())[path].mul_(factor)


def put(path: str, name: str, value: Any) -> Change:
    return lambda model: setattr(model.get_submodule(path), name, value)


def evaluating(model: nn.Module) -> None:
    model.eval()


def case(
    what: str,
    module: str,
    phase: str,
    network: Callable[[], nn.Module],
    *changes: Change,
    loss: Loss = entropy,
    image: float | None = None,
    fp16: bool = False,
    scale: float = 1.0,
) -> Planted:
    """One row."""
    return Planted(
        what=what,
        module=module,
        phase=phase,
        network=network,
        changes=changes,
        loss=loss,
        image=image,
        fp16=fp16,
        scale=scale,
    )
