"""Tasks whose batches are samples and their classes."""

from collections.abc import Callable

from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer

from steadystep.lab.tasks.evaluating import evaluating
from steadystep.lab.tasks.task import Task

Batch = tuple[Tensor, Tensor]


def classifier(model: nn.Module, optimizer: Optimizer, batch: Callable[[], Batch], tests: Batch) -> Task:
    """Cross-entropy in nats, on batches and on the tests."""

    def loss(batch: Batch) -> Tensor:
        return functional.cross_entropy(model(batch[0]), batch[1])

    def held_out() -> float:
        with evaluating(model):
            return float(loss(tests))  # sync: when the held-out loss is asked for

    return Task(model=model, optimizer=optimizer, batch=batch, loss=loss, held_out=held_out)
