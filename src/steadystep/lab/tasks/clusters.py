"""Overlapping clusters: classification with BatchNorm, dropout and SGD with momentum, in three ways of feeding it."""

from typing import final

import torch
from torch import Tensor, nn
from torch.nn import functional

from steadystep.lab.tasks.evaluating import evaluating
from steadystep.lab.tasks.task import Task, TaskInfo

_NUM_CLASSES, _NUM_FEATURES = 10, 32

Batch = tuple[Tensor, Tensor]


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
    tests = Clusters(-1).draw(2000)

    def loss(batch: Batch) -> Tensor:
        return functional.cross_entropy(model(batch[0]), batch[1])

    def held_out() -> float:
        with evaluating(model):
            return float(loss(tests))  # sync: when the held-out loss is asked for

    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return Task(model=model, optimizer=optimizer, batch=lambda: data.draw(64), loss=loss, held_out=held_out)


def make_epochs(seed: int) -> Task:
    """514 fixed samples, shuffled each epoch in batches of 32: the last one has 2 samples."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(_NUM_FEATURES, 64), nn.ReLU(), nn.Linear(64, _NUM_CLASSES))
    xs, ys = Clusters(seed).draw(514)
    tests = Clusters(-1).draw(2000)
    rng = torch.Generator().manual_seed(seed)
    waiting: list[Tensor] = []

    def batch() -> Batch:
        if not waiting:
            waiting.extend(torch.split(torch.randperm(len(xs), generator=rng), 32))
        rows = waiting.pop(0)
        return xs[rows], ys[rows]

    def loss(batch: Batch) -> Tensor:
        return functional.cross_entropy(model(batch[0]), batch[1])

    def held_out() -> float:
        with evaluating(model):
            return float(loss(tests))  # sync: when the held-out loss is asked for

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    return Task(model=model, optimizer=optimizer, batch=batch, loss=loss, held_out=held_out)


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
EPOCHS = TaskInfo(name="epochs", about="fixed data, last batch of 2, AdamW 1e-3", num_steps=2000, make=make_epochs)
RESTARTS = TaskInfo(name="restarts", about="warm restarts of the LR, SGD", num_steps=2000, make=make_restarts)
