"""A loss function that goes through DistributedDataParallel although it was written for the model inside."""

from collections.abc import Callable
from typing import Any, final

from torch import Tensor, nn


@final
class Through(nn.Module):
    """A module whose forward pass is the loss: wrap it, and gradients are averaged over the ranks."""

    def __init__(self, model: nn.Module, loss: Callable[[Any], Tensor]) -> None:
        super().__init__()
        self.model = model
        self._loss = loss

    def forward(self, batch: Any) -> Tensor:
        """The loss of a batch."""
        return self._loss(batch)
