"""Regression on a smooth function: an MLP and Adam, with a loss that falls by orders of magnitude."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from steadystep.lab.tasks.evaluating import evaluating
from steadystep.lab.tasks.task import Task, TaskInfo

Batch = tuple[Tensor, Tensor]


def _draw(count: int, rng: torch.Generator) -> Batch:
    x = torch.randn(count, 8, generator=rng)
    y = torch.sin(x[:, :1] * 1.5) + x[:, 1:2] * x[:, 2:3] + 0.5 * x[:, 3:4]
    return x, y


def make(seed: int) -> Task:
    """Targets without noise, 64 samples per batch."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
    rng = torch.Generator().manual_seed(seed)
    tests = _draw(2000, torch.Generator().manual_seed(-1))

    def loss(batch: Batch) -> Tensor:
        return functional.mse_loss(model(batch[0]), batch[1])

    def held_out() -> float:
        with evaluating(model):
            return float(loss(tests))  # sync: when the held-out loss is asked for

    return Task(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=3e-3),
        batch=lambda: _draw(64, rng),
        loss=loss,
        held_out=held_out,
    )


REGRESSION = TaskInfo(name="regression", about="MLP, Adam 3e-3, loss over decades", num_steps=2000, make=make)
