"""The largest value of each tensor that an optimizer holds beside the weights, and of kept objects, at a cadence.

Gradients and weights do not show what was written into a moment from outside, until it has gone into the weights.
"""

from collections.abc import Callable, Mapping
from typing import final

import torch
from torch import Tensor
from torch.optim import Optimizer

from steadystep.clip.sharded import local_part
from steadystep.norms import peaks
from steadystep.signals.gradients import Gradients

_KINDS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


@final
class StatePeaks:
    """One pass when it is due, with that over the weights; its numbers ride along with the look's host read."""

    def __init__(
        self,
        gradients: Gradients,
        optimizer: Optimizer,
        kept: Callable[[], Mapping[str, Tensor]],
        *,
        wanted: bool = True,
    ) -> None:
        """`kept` gives the tensors of kept objects; not `wanted`, nothing is ever measured."""
        self._gradients = gradients
        self._optimizer = optimizer
        self._kept = kept
        self._wanted = wanted
        self.names: tuple[str, ...] = ()
        """Of the tensors that were measured last."""

    @torch.no_grad()
    def measure(self) -> list[Tensor]:
        """On the device, now."""
        if not self._wanted:
            return []
        held = self._moments()
        held |= {name: t.detach() for name, t in self._kept().items() if t.dtype in _KINDS and t.numel()}
        self.names = tuple(held)
        try:
            return peaks(list(held.values())) if held else []
        except (RuntimeError, NotImplementedError):  # why: what torch cannot measure must not cost the step
            self._wanted = False
            return []

    def _moments(self) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for name, parameter in zip(*self._gradients.named(), strict=True):
            for key, value in self._optimizer.state.get(parameter, {}).items():
                held = local_part(value) if isinstance(value, Tensor) else None
                # why: a subclass is quantised, one that is not dense or elsewhere costs too much to look at
                if type(held) is Tensor and held.dtype in _KINDS and held.numel() > 1:
                    found[f"{key} of {name}"] = held.detach()
        return found
