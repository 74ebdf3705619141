"""A real optimizer and real gradients; around them, parts that only write down what they were asked."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from steadystep._utils.tensors import layout_of, measure
from steadystep.actions import Updater
from steadystep.engine.learning_rate import LearningRate
from steadystep.records import Diagnosis, Signals
from steadystep.signals.gradients import GradientView

FOUND = Diagnosis(cause="bad-batch")


class CountingSGD(torch.optim.SGD):
    """Also counts, because a step without gradients leaves no other trace."""

    steps = 0
    lrs: tuple[float, ...] = ()

    def step(self, closure: Any = None) -> None:
        self.steps += 1
        self.lrs = (*self.lrs, float(self.param_groups[0]["lr"]))
        super().step(closure)


@dataclass
class Said:
    """Calls in their order."""

    calls: list[tuple[Any, ...]] = field(default_factory=list)

    def of(self, *names: str) -> list[tuple[Any, ...]]:
        return [call for call in self.calls if call[0] in names]


@dataclass
class PlainPrecision:
    said: Said

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        self.said.calls.append(("step",))
        optimizer.step()

    def refuse(self, *, overflow: bool) -> None:
        self.said.calls.append(("refuse", overflow))


@dataclass
class Noted:
    """Stands for buffers, the runner or recovery: notes each call with its arguments."""

    said: Said

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *arguments: self.said.calls.append((name, *arguments))


@dataclass
class Probes:
    said: Said
    every: int = 4
    on: Callable[[int], bool] = lambda step: False

    def due(self, step: int) -> bool:
        return self.on(step)

    def before(self) -> None:
        self.said.calls.append(("before",))

    def after(self, step: int) -> None:
        self.said.calls.append(("after", step))


class Bench:
    """Two parameters with gradients of norms 3 and 4, so that the global norm is 5."""

    def __init__(self, **options: Any) -> None:
        self.said = Said()
        self.weights = [Parameter(torch.zeros(2)), Parameter(torch.zeros(1))]
        self.optimizer = CountingSGD(self.weights, lr=0.5)
        self.learning_rate = LearningRate(self.optimizer, start=None, schedule=None)
        self.probes = Probes(self.said)
        settings: dict[str, Any] = {"clip_norm": None, "clip_value": None, "clip_rule": None}
        self.updater = Updater(
            self.optimizer,
            PlainPrecision(self.said),
            Noted(self.said),
            Noted(self.said),
            self.learning_rate,
            Noted(self.said),
            self.probes,
            **settings | options,
        )

    def view(
        self,
        grads: Sequence[Sequence[float]] = ((3.0, 0.0), (4.0,)),
        *,
        dtype: torch.dtype = torch.float32,
        **more: Any,
    ) -> GradientView:
        for weight, values in zip(self.weights, grads, strict=True):
            weight.data = weight.data.to(dtype)
            weight.grad = torch.tensor(values, dtype=dtype)
        held = self.grads()
        layout = layout_of(held)
        norms = measure(held, layout)
        each = tuple(float(norm) for norm in norms)
        total = float(torch.stack(norms).norm())
        values = {"step": 7, "loss": 2.0, "grad_norm": total, "norms": each, "names": ("a", "b"), "lr": 0.5}
        signals = Signals(**values | more)
        return GradientView(signals, held, layout, norms, names=signals.names)

    def grads(self) -> list[Tensor]:
        return [weight.grad for weight in self.weights if weight.grad is not None]

    def norm(self) -> float:
        return float(torch.cat([grad.flatten() for grad in self.grads()]).norm())
