"""An autoencoder whose loss is a sum over batch and pixels: 1e5, with gradient norms of 1e4."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from steadystep.lab.tasks.evaluating import evaluating
from steadystep.lab.tasks.task import Task, TaskInfo

_SIDE = 16


def _blobs(count: int, rng: torch.Generator) -> Tensor:
    """Images of one bright spot each, 0 to 16."""
    x, y, width = torch.rand(3, count, 1, 1, generator=rng)
    line = torch.linspace(0, 1, _SIDE)
    distance = (line[None, :, None] - y).square() + (line[None, None, :] - x).square()
    return (16 * torch.exp(-distance / (0.01 + 0.05 * width))).flatten(1)


def make(seed: int) -> Task:
    """256 pixels through 8 numbers and back, 64 images per batch."""
    torch.manual_seed(seed)
    pixels = _SIDE * _SIDE
    model = nn.Sequential(
        nn.Linear(pixels, 64), nn.ReLU(), nn.Linear(64, 8), nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, pixels)
    )
    rng = torch.Generator().manual_seed(seed)
    tests = _blobs(500, torch.Generator().manual_seed(-1))

    def loss(images: Tensor) -> Tensor:
        return functional.mse_loss(model(images), images, reduction="sum")

    def held_out() -> float:
        with evaluating(model):
            return float(loss(tests)) / len(tests)  # sync: when the held-out loss is asked for

    return Task(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=1e-3),
        batch=lambda: _blobs(64, rng),
        loss=loss,
        held_out=held_out,
    )


AUTOENCODER = TaskInfo(name="autoencoder", about="sum loss of 1e5, Adam 1e-3", num_steps=2000, make=make)
