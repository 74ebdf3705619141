"""What a task of the field is: one program's models and data, fixed by a seed."""

from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

Batch = tuple[Tensor, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Player:
    """One model with an optimizer of its own; only a GAN has two."""

    model: nn.Module
    batch: Callable[[], Batch]
    loss: Callable[[Batch], Tensor]


class Task:
    """The dataset, its hidden rule and the held-out data never change; the seed draws weights, batches and noise.

    Two tasks of one seed are the same, bit for bit. `batch` draws from `rng`, never from torch's global generator;
    `loss` may draw from the global one (dropout, sampled latents), as real programs do.
    """

    name: ClassVar[str]
    higher_is_better: ClassVar[bool] = False
    learning_judged: ClassVar[bool] = True
    """The score must improve for a run to count as healthy."""
    interactive: ClassVar[bool] = False
    """The present weights choose the next batch, so it cannot come from a DataLoader."""
    max_grad_norm: ClassVar[float | None] = None
    real_inputs: ClassVar[bool] = True
    """The first part of a batch holds real numbers, so one of them can be NaN."""
    labels: ClassVar[int | None] = 1
    """The part of a batch whose rows can be shuffled against the others."""
    sgd_mult: ClassVar[float] = 1.0
    """Learning rate of this task, as a multiple of the optimizer's own: SGD and its kin."""
    adam_mult: ClassVar[float] = 1.0
    """The same for optimizers that divide the gradient's scale out."""

    beta1: ClassVar[float | None] = None
    """Momentum of Adam and its kin, where the default would not do."""
    unsuited: ClassVar[tuple[str, ...]] = ()
    """Optimizers with which nobody gets this task to work."""

    model: nn.Module

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.rng = torch.Generator().manual_seed(10_000 + seed)
        self.build()

    def build(self) -> None:
        """Make the model and what `batch` draws from."""
        raise NotImplementedError

    def batch(self) -> Batch:
        """The next training batch."""
        raise NotImplementedError

    def loss(self, batch: Batch) -> Tensor:
        """The training loss."""
        raise NotImplementedError

    def score(self) -> float:
        """The held-out score of the present weights, without random numbers of the run."""
        raise NotImplementedError

    def after_step(self) -> None:
        """What the loop does after each step."""

    @property
    def players(self) -> tuple[Player, ...]:
        return (Player(model=self.model, batch=self.batch, loss=self.loss),)

    def held_out(self) -> float:
        with evaluating(*(player.model for player in self.players)):
            return float(self.score())


@contextmanager
def evaluating(*models: nn.Module) -> Any:
    """Evaluation mode and no gradients; every module and the random state are as before afterwards."""
    modes = [(module, module.training) for model in models for module in model.modules()]
    state = torch.get_rng_state()
    try:
        for model in models:
            model.eval()
        with torch.no_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training
        torch.set_rng_state(state)


def fixed(seed: int) -> torch.Generator:
    """A generator for what is the same in every run of a task."""
    return torch.Generator().manual_seed(seed)
