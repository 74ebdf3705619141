"""Small networks, their data and optimizers, for attacks on a run: all made from a seed."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - everybody's name for it
from torch.optim import Optimizer

_ROWS, _WIDTH = 24, 8


class Convolutions(nn.Module):
    """Two convolutions with running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv1d(1, 6, 3, padding=1),
            nn.BatchNorm1d(6),
            nn.ReLU(),
            nn.Conv1d(6, 6, 3),
            nn.BatchNorm1d(6),
            nn.ReLU(),
        )
        self.out = nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Any:
        return self.out(self.body(x.unsqueeze(1)).mean(-1))


class Recurrent(nn.Module):
    """An LSTM: its gates hide what is wrong with their own weights. The input is scaled by a constant buffer."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.out = nn.LSTM(1, 10, batch_first=True), nn.Linear(10, 1)
        self.register_buffer("scale", torch.full((1,), 0.5))

    def forward(self, x: Tensor) -> Any:
        with torch.autocast("cpu", enabled=False):  # not every CPU has an LSTM in bf16
            states = self.lstm(x.unsqueeze(-1) * self.scale)[0]
        return self.out(states[:, -1])


class Attention(nn.Module):
    """A transformer block with a causal mask that is infinite on purpose, and a table of positions."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(1, 12)
        self.qkv, self.proj = nn.Linear(12, 36), nn.Linear(12, 12)
        self.first, self.second, self.out = nn.LayerNorm(12), nn.LayerNorm(12), nn.Linear(12, 1)
        self.mlp = nn.Sequential(nn.Linear(12, 24), nn.GELU(), nn.Linear(24, 12))
        self.register_buffer("mask", torch.full((_WIDTH, _WIDTH), -math.inf).triu(1))
        self.register_buffer("positions", 0.1 * torch.randn(_WIDTH, 12))

    def forward(self, x: Tensor) -> Any:
        h = self.inner(x.unsqueeze(-1)) + self.positions
        q, k, v = self.qkv(self.first(h)).chunk(3, dim=-1)
        h = h + self.proj(torch.softmax(q @ k.transpose(1, 2) / math.sqrt(12) + self.mask, -1) @ v)
        return self.out((h + self.mlp(self.second(h))).mean(1))


class Gated(nn.Module):
    """A gate that turns an infinite bias into a one: loss and gradients stay finite."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.a, self.g, self.out = nn.Linear(_WIDTH, 12), nn.Linear(_WIDTH, 12), nn.Linear(12, 1)
        self.register_buffer("scale", torch.ones(_WIDTH))

    def forward(self, x: Tensor) -> Any:
        return self.out(torch.tanh(self.a(x * self.scale)) * torch.sigmoid(self.g(x)))


def _dense() -> nn.Module:
    return nn.Sequential(
        nn.Linear(_WIDTH, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1)
    )


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "dense": _dense,
    "convolutions": Convolutions,
    "lstm": Recurrent,
    "attention": Attention,
    "gate": Gated,
}


class SignMomentum(Optimizer):
    """Updates by the sign of a momentum, as Lion does."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    average = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                    p.sub_(group["lr"] * torch.sign(0.9 * average + 0.1 * p.grad))
                    average.lerp_(p.grad, 0.01)


class DirectionMomentum(Optimizer):
    """Updates by the direction of a momentum, as Muon does with matrices."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    momentum = self.state[p].setdefault("momentum_buffer", torch.zeros_like(p))
                    momentum.mul_(0.95).add_(p.grad)
                    size = momentum.abs().max().clamp(min=1e-12)
                    p.sub_(group["lr"] * momentum / size)


OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=3e-3),
    "SGD with momentum": lambda params: torch.optim.SGD(params, lr=1e-2, momentum=0.9),
    "RMSprop": lambda params: torch.optim.RMSprop(params, lr=1e-3, momentum=0.5),
    "sign of a momentum": lambda params: SignMomentum(params, lr=1e-3),
    "direction of a momentum": lambda params: DirectionMomentum(params, lr=1e-3),
}


@dataclass(frozen=True)
class Task:
    """A regression: targets are a smooth function of the inputs, the same for every seed of the network."""

    seed: int

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """The batch of one step; a copy each time, so that it may be spoiled."""
        generator = torch.Generator().manual_seed(1_000_003 * self.seed + step)
        x = torch.randn(_ROWS, _WIDTH, generator=generator)
        return x, torch.tanh(x[:, :4].sum(-1, keepdim=True)) + 0.05 * torch.randn(_ROWS, 1, generator=generator)

    def held_out(self, model: nn.Module) -> float:
        """The loss on other batches, in evaluation mode."""
        was_training = model.training
        model.eval()
        with torch.no_grad():
            losses = [F.mse_loss(model(x).float(), y) for x, y in map(self.batch, range(-8, 0))]
        model.train(was_training)
        return float(torch.stack(losses).mean())


def tensors_of(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """Everything a run leaves behind, but what is infinite on purpose."""
    found = {name: p.detach() for name, p in model.named_parameters()}
    found |= {name: b for name, b in model.named_buffers() if name != "mask"}
    for number, slots in enumerate(optimizer.state.values()):
        found |= {f"{key} {number}": value for key, value in slots.items() if isinstance(value, Tensor)}
    return found


def not_finite(tensors: dict[str, Tensor]) -> list[str]:
    """Names of those that hold NaN or infinity."""
    return [name for name, t in tensors.items() if t.is_floating_point() and not bool(t.isfinite().all())]
