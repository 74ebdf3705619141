"""What a reference task is."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

from torch import Tensor, nn
from torch.optim import Optimizer


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
