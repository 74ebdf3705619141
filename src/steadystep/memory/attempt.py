"""One forward and backward pass that either counts as a whole or leaves no trace."""

from typing import Self, final

import torch
from torch import Tensor, nn

from steadystep.buffers import Buffers
from steadystep.rng import RngState


@final
class Attempt:
    """Gradients, buffers and random state as before, unless the block ends well.

    Gradients collected before (accumulation) are set aside and added at the end, so undoing never costs them; while
    there are some, that needs the memory of one more set. Reusable, one block after another.

    >>> model = nn.Linear(1, 1)
    >>> with Attempt(model) as attempt:
    ...     model(torch.ones(1, 1)).sum().backward()
    ...     attempt.undo()
    >>> model.weight.grad is None
    True
    """

    def __init__(self, model: nn.Module) -> None:
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._buffers = Buffers(model)
        self._device = next((p.device for p in self._parameters), torch.device("cpu"))
        self._rng = RngState(self._device)
        self._before: list[Tensor | None] = []

    def __enter__(self) -> Self:
        self._before = [p.grad for p in self._parameters]
        self._drop_gradients()
        self._buffers.remember()
        self._rng = RngState(self._device)
        return self

    def undo(self) -> None:
        """As when the block was entered; it may be tried again."""
        self._drop_gradients()
        self._buffers.put_back()
        self._rng.restore()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self.undo()
        for p, before in zip(self._parameters, self._before, strict=True):
            p.grad = _sum(before, p.grad)
        self._before = []

    def _drop_gradients(self) -> None:
        for p in self._parameters:
            p.grad = None


@torch.no_grad()
def _sum(before: Tensor | None, new: Tensor | None) -> Tensor | None:
    if before is None or new is None:
        return new if before is None else before
    return before.add_(new) if before.layout is new.layout else before + new
