"""Two interleaved half circles: the example that courses on monitoring begin with."""

import math

import torch
from torch import nn

from steadystep.lab.tasks.classifier import Batch, classifier
from steadystep.lab.tasks.shuffled import Shuffled
from steadystep.lab.tasks.task import Task, TaskInfo


def moons(count: int, *, noise: float, rng: torch.Generator) -> Batch:
    """Half of the points on each moon: (cos t, sin t) and (1 - cos t, 1/2 - sin t) for t in 0 to pi, and some noise."""
    upper = (count + 1) // 2
    first, second = torch.linspace(0, math.pi, upper), torch.linspace(0, math.pi, count - upper)
    points = torch.cat(
        [
            torch.stack([first.cos(), first.sin()], dim=1),
            torch.stack([1 - second.cos(), 0.5 - second.sin()], dim=1),
        ]
    )
    which = torch.cat([torch.zeros(upper, dtype=torch.long), torch.ones(count - upper, dtype=torch.long)])
    return points + noise * torch.randn(count, 2, generator=rng), which


def make(seed: int) -> Task:
    """800 points in batches of 32, two hidden layers of 32."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 2))
    train = moons(800, noise=0.2, rng=torch.Generator().manual_seed(seed))
    tests = moons(1000, noise=0.2, rng=torch.Generator().manual_seed(-1))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    return classifier(model, optimizer, Shuffled(*train, batch_size=32, seed=seed).batch, tests)


MOONS = TaskInfo(name="moons", about="two moons, MLP, Adam 3e-3", num_steps=1000, make=make)
