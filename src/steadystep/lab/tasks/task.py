"""What a reference task is."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer

from steadystep._utils import modules


def _nothing() -> None:
    return None


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A model, its optimizer and an endless stream of batches, all fixed by one seed."""

    model: nn.Module
    optimizer: Optimizer
    batch: Callable[[], Any]
    """The next batch; the sequence is fixed by the seed."""
    loss: Callable[[Any], Tensor]
    """The training loss of a batch; the same batch and the same random numbers give the same loss."""
    held_out: Callable[[], float]
    """What counts in the end, lower is better, always on the same data and without dropout."""
    after_step: Callable[[], None] = _nothing
    """What the loop does after each update, such as stepping a scheduler of its own."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class TaskInfo:
    """A task that can be made from a seed.

    `make` also seeds torch's own random numbers: initial weights and dropout come from there.
    """

    name: str
    about: str
    num_steps: int
    """Enough to learn what there is to learn, or to see what is special here several times."""
    make: Callable[[int], Task]


Batch = tuple[Tensor, Tensor]


@final
class Shuffled:
    """Endless batches; the last of an epoch has what is left over."""

    def __init__(self, xs: Tensor, ys: Tensor, *, batch_size: int, seed: int) -> None:
        self._xs, self._ys, self._batch_size = xs, ys, batch_size
        self._rng = torch.Generator().manual_seed(seed)
        self._waiting: list[Tensor] = []

    def batch(self) -> Batch:
        """The next one; the order is fixed by the seed."""
        if not self._waiting:
            self._waiting.extend(torch.split(torch.randperm(len(self._xs), generator=self._rng), self._batch_size))
        rows = self._waiting.pop(0)
        return self._xs[rows], self._ys[rows]


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """No gradients, no dropout, running statistics; training mode and random numbers are put back."""
    with modules.evaluating(model), torch.random.fork_rng(devices=[]):
        yield


def classifier(model: nn.Module, optimizer: Optimizer, batch: Callable[[], Batch], tests: Batch) -> Task:
    """Cross-entropy in nats, on batches and on the tests."""

    def loss(batch: Batch) -> Tensor:
        return functional.cross_entropy(model(batch[0]), batch[1])

    def held_out() -> float:
        with evaluating(model):
            return float(loss(tests))  # sync: when the held-out loss is asked for

    return Task(model=model, optimizer=optimizer, batch=batch, loss=loss, held_out=held_out)
