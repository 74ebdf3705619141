"""English that ships with Python: the help texts of `pydoc_data.topics` (their content varies with the version)."""

from functools import cache
from typing import final

import torch
from torch import Tensor


@final
class TopicsText:
    """Random windows of bytes, the last tenth of the text held out."""

    def __init__(self, *, context: int, batch_size: int, seed: int) -> None:
        data = _topics()
        split = len(data) * 9 // 10
        self._train, self._held_out = data[:split], data[split:]
        self._window = context + 1
        self._batch_size = batch_size
        self._rng = torch.Generator().manual_seed(seed)

    def batch(self) -> Tensor:
        """The next [batch, context + 1] windows; the sequence is fixed by the seed."""
        return self._windows(self._train, self._batch_size, self._rng)

    def held_out(self, num_windows: int = 256) -> Tensor:
        """Always the same windows."""
        return self._windows(self._held_out, num_windows, torch.Generator().manual_seed(0))

    def _windows(self, data: Tensor, count: int, rng: torch.Generator) -> Tensor:
        starts = torch.randint(len(data) - self._window, (count,), generator=rng)
        return data[starts[:, None] + torch.arange(self._window)]


@cache
def _topics() -> Tensor:
    from pydoc_data import topics

    return torch.tensor(list("\n".join(topics.topics.values()).encode()), dtype=torch.long)
