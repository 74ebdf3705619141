"""Some elements of some gradients, at a coarse cadence: what histograms are made of, elsewhere."""

from collections.abc import Sequence
from typing import final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from steadystep.signals.samples import is_plain, sample

_MOST_TENSORS = 32  # of a model with more, evenly chosen ones


@final
class GradientSamples:
    """Due at `every`, and from 10 times `every` on at its multiples; never when `every` is None."""

    def __init__(self, every: int | None) -> None:
        self._every = every

    def due(self, step: int) -> bool:
        """Whether it is time."""
        return self._every is not None and step > 0 and (step == self._every or step % (10 * self._every) == 0)

    @torch.no_grad()
    def take(self, names: Sequence[str], grads: Sequence[Tensor]) -> dict[str, NDArray[np.float32]]:
        """Up to 4,096 elements of each gradient by name, on the host."""
        plain = [(name, grad) for name, grad in zip(names, grads, strict=True) if is_plain(grad) and grad.numel()]
        chosen = plain[:: -(-len(plain) // _MOST_TENSORS) or 1]
        if not chosen:
            return {}
        try:
            parts = [sample(grad).float() for _, grad in chosen]
            home = parts[0].device
            values = torch.cat([part.to(home) for part in parts]).cpu().numpy()  # sync: every 1,000 steps by default
        except RuntimeError:  # why: a tensor that cannot be sampled costs the picture, never the step
            return {}
        ends = np.cumsum([len(part) for part in parts])[:-1]
        return dict(zip((name for name, _ in chosen), np.split(values, ends), strict=True))
