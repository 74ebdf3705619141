"""Tasks that predict the next byte of English."""

from collections.abc import Callable

from torch import Tensor, nn
from torch.optim import Optimizer

from steadystep.lab.tasks.evaluating import evaluating
from steadystep.lab.tasks.task import Task
from steadystep.lab.text import TopicsText


def byte_text(
    model: nn.Module, loss: Callable[[Tensor], Tensor], optimizer: Optimizer, *, context: int, seed: int
) -> Task:
    """Eight windows a batch; `loss` takes [batch, context + 1] bytes."""
    text = TopicsText(context=context, batch_size=8, seed=seed)
    windows = text.held_out()

    def held_out() -> float:
        with evaluating(model):
            return float(loss(windows))  # sync: when the held-out loss is asked for

    return Task(model=model, optimizer=optimizer, batch=text.batch, loss=loss, held_out=held_out)
