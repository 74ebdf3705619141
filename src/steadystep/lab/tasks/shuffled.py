"""A fixed set of samples, gone through in another order each epoch."""

from typing import final

import torch
from torch import Tensor

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
