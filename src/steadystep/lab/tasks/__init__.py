"""Reference tasks: small, offline, on one core, and each with something that a detector may mistake for trouble.

Here: overlapping clusters (BatchNorm, dropout and SGD, fed in three ways), a deep network without a norm, digits and
moons; and the table of all.
"""

import importlib
import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import final

import torch
from torch import Tensor, nn

from steadystep._utils.text import install
from steadystep.errors import ConfigError
from steadystep.lab.tasks.task import (
    AUTOENCODER,
    FLAT,
    GRPO,
    POLICY,
    REGRESSION,
    Batch,
    Shuffled,
    Task,
    TaskInfo,
    classifier,
)
from steadystep.lab.tasks.text import ELMAN, GPT_BAD_INIT, GPT_POST_LN, GPT_TASK, RNN

_NUM_CLASSES, _NUM_FEATURES = 10, 32


@final
class Clusters:
    """Ten classes, each of three clusters that overlap with others; the same world for every seed."""

    def __init__(self, seed: int) -> None:
        world = torch.Generator().manual_seed(12345)
        self._centres = torch.randn(_NUM_CLASSES * 3, _NUM_FEATURES, generator=world)
        self._rng = torch.Generator().manual_seed(seed)

    def draw(self, count: int) -> Batch:
        """Samples and their classes."""
        which = torch.randint(len(self._centres), (count,), generator=self._rng)
        noise = torch.randn(count, _NUM_FEATURES, generator=self._rng)
        return self._centres[which] + 1.5 * noise, which % _NUM_CLASSES


def _network() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(_NUM_FEATURES, 64),
        nn.BatchNorm1d(64),
        nn.ReLU(),
        nn.Dropout(0.1),
        nn.Linear(64, 64),
        nn.BatchNorm1d(64),
        nn.ReLU(),
        nn.Linear(64, _NUM_CLASSES),
    )


def make_clusters(seed: int) -> Task:
    """Fresh samples in every batch."""
    torch.manual_seed(seed)
    model = _network()
    data = Clusters(seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return classifier(model, optimizer, lambda: data.draw(64), tests=Clusters(-1).draw(2000))


def make_deep(seed: int) -> Task:
    """Sixteen hidden layers without a norm or a shortcut; He et al. 2015 gave the first weights that let this train."""
    torch.manual_seed(seed)
    widths = [_NUM_FEATURES, *[64] * 16]
    layers = [layer for n, m in itertools.pairwise(widths) for layer in (nn.Linear(n, m), nn.ReLU())]
    model = nn.Sequential(*layers, nn.Linear(64, _NUM_CLASSES))
    for layer in model:
        if isinstance(layer, nn.Linear):
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
            nn.init.zeros_(layer.bias)
    data = Clusters(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return classifier(model, optimizer, lambda: data.draw(64), tests=Clusters(-1).draw(2000))


def make_epochs(seed: int) -> Task:
    """514 fixed samples, shuffled each epoch in batches of 32: the last one has 2 samples."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(_NUM_FEATURES, 64), nn.ReLU(), nn.Linear(64, _NUM_CLASSES))
    data = Shuffled(*Clusters(seed).draw(514), batch_size=32, seed=seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    return classifier(model, optimizer, data.batch, tests=Clusters(-1).draw(2000))


def make_restarts(seed: int) -> Task:
    """Cosine warm restarts (Loshchilov and Hutter 2017) every 200 updates, stepped by the loop itself."""
    task = make_clusters(seed)
    schedule = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(task.optimizer, T_0=200, eta_min=1e-5)
    return replace(task, after_step=schedule.step)


CLUSTERS = TaskInfo(
    name="clusters", about="MLP, BatchNorm, dropout, SGD 0.05 momentum 0.9", num_steps=2000, make=make_clusters
)
DEEP_MLP = TaskInfo(name="deep-mlp", about="17 layers, no norms, AdamW 1e-3", num_steps=2000, make=make_deep)
EPOCHS = TaskInfo(name="epochs", about="fixed data, last batch of 2, AdamW 1e-3", num_steps=2000, make=make_epochs)
RESTARTS = TaskInfo(name="restarts", about="warm restarts of the LR, SGD", num_steps=2000, make=make_restarts)


_NUM_TESTS = 360


@cache
def _digits() -> tuple[Tensor, Tensor]:
    """Images in 0 to 1 and their digits, in one order for every seed: neighbours in the file are by one writer."""
    try:
        datasets = importlib.import_module("sklearn.datasets")
    except ModuleNotFoundError:
        raise ConfigError(f"the digits come with scikit-learn: {install('lab')}") from None
    images, digits = datasets.load_digits(return_X_y=True)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(12345))
    return torch.tensor(images, dtype=torch.float32)[order] / 16, torch.tensor(digits, dtype=torch.long)[order]


def _split() -> tuple[Batch, Batch]:
    images, digits = _digits()
    return (images[_NUM_TESTS:], digits[_NUM_TESTS:]), (images[:_NUM_TESTS], digits[:_NUM_TESTS])


def make_mlp(seed: int) -> Task:
    """Two hidden layers of 64, SGD with momentum."""
    train, tests = _split()
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3)
    return classifier(model, optimizer, Shuffled(*train, batch_size=64, seed=seed).batch, tests)


def make_cnn(seed: int) -> Task:
    """Two convolutions with BatchNorm, pooled to 4 x 4."""
    train, tests = _split()
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)),
        nn.Conv2d(1, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(256, 10),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.05)
    return classifier(model, optimizer, Shuffled(*train, batch_size=64, seed=seed).batch, tests)


DIGITS_MLP = TaskInfo(name="digits-mlp", about="digits, MLP, SGD 0.05 momentum 0.9", num_steps=1000, make=make_mlp)
DIGITS_CNN = TaskInfo(name="digits-cnn", about="digits, CNN, BatchNorm, AdamW 2e-3", num_steps=1000, make=make_cnn)


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


def make_moons(seed: int) -> Task:
    """800 points in batches of 32, two hidden layers of 32."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 2))
    train = moons(800, noise=0.2, rng=torch.Generator().manual_seed(seed))
    tests = moons(1000, noise=0.2, rng=torch.Generator().manual_seed(-1))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    return classifier(model, optimizer, Shuffled(*train, batch_size=32, seed=seed).batch, tests)


MOONS = TaskInfo(name="moons", about="two moons, MLP, Adam 3e-3", num_steps=1000, make=make_moons)

_JUDGED = (GPT_TASK, CLUSTERS, REGRESSION, AUTOENCODER, POLICY, GRPO, FLAT, RNN, EPOCHS, RESTARTS)
_MORE = (GPT_POST_LN, GPT_BAD_INIT, ELMAN, DEEP_MLP, DIGITS_MLP, DIGITS_CNN, MOONS)

TASKS: dict[str, TaskInfo] = {info.name: info for info in (*_JUDGED, *_MORE)}
"""By name."""

FACTORIES: dict[str, Callable[[int], Task]] = {name: info.make for name, info in TASKS.items()}
"""What `train` calls with a seed."""

JUDGED: tuple[str, ...] = tuple(info.name for info in _JUDGED)
"""Those that limits were chosen on and the guard is judged on: they stay as they are, to the bit."""

__all__ = ["FACTORIES", "JUDGED", "TASKS", "Task", "TaskInfo"]
