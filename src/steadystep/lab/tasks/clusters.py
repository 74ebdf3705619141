"""Overlapping clusters: BatchNorm, dropout and SGD in three ways of feeding them; and a deep network without a norm."""

import itertools
from typing import final

import torch
from torch import nn

from steadystep.lab.tasks.classifier import Batch, classifier
from steadystep.lab.tasks.shuffled import Shuffled
from steadystep.lab.tasks.task import Task, TaskInfo

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


def make(seed: int) -> Task:
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
    task = make(seed)
    schedule = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(task.optimizer, T_0=200, eta_min=1e-5)
    return Task(
        model=task.model,
        optimizer=task.optimizer,
        batch=task.batch,
        loss=task.loss,
        held_out=task.held_out,
        after_step=schedule.step,
    )


CLUSTERS = TaskInfo(name="clusters", about="MLP, BatchNorm, dropout, SGD 0.05 momentum 0.9", num_steps=2000, make=make)
DEEP_MLP = TaskInfo(name="deep-mlp", about="17 layers, no norms, AdamW 1e-3", num_steps=2000, make=make_deep)
EPOCHS = TaskInfo(name="epochs", about="fixed data, last batch of 2, AdamW 1e-3", num_steps=2000, make=make_epochs)
RESTARTS = TaskInfo(name="restarts", about="warm restarts of the LR, SGD", num_steps=2000, make=make_restarts)
