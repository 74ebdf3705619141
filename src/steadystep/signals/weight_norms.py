"""The norm of each weight tensor, every so many steps and whenever something is not finite.

Gradients tell what updates will do to the weights, not what else has happened to them: a flipped bit in a row of an
embedding that no batch uses, a layer that somebody's code has zeroed.
"""

from collections.abc import Container
from typing import final

import torch
from torch import Tensor

from steadystep.clip.sharded import local_part
from steadystep.norms import Layout, layout_of, measure
from steadystep.signals.gradients import Gradients

OFFSET = 7  # not at the round numbers where people save, validate and change things


@final
class WeightNorms:
    """One pass over the weights when it is due; its numbers ride along with the look's host read."""

    def __init__(self, gradients: Gradients, *, wanted: bool = True, infinite: Container[str] = ()) -> None:
        """`infinite` names parameters whose norm is so on purpose: they are left out."""
        self._gradients = gradients
        self._infinite = infinite
        self._wanted = wanted
        self._layout: Layout | None = None
        self._names: tuple[str, ...] = ()

    def names(self) -> tuple[str, ...]:
        """Of the tensors that were measured last."""
        return self._names

    @torch.no_grad()
    def measure(self) -> list[Tensor]:
        """Norms on the device, now."""
        if not self._wanted:
            return []
        names, parameters = self._gradients.named()
        if self._infinite:
            held = [(n, p) for n, p in zip(names, parameters, strict=True) if n not in self._infinite]
            names, parameters = tuple(n for n, _ in held), tuple(p for _, p in held)
        self._names = names
        weights: list[Tensor] = [local_part(parameter).detach() for parameter in parameters]
        if self._layout is None or not self._layout.fits(weights):
            self._layout = layout_of(weights)
        try:
            return measure(weights, self._layout)
        except (RuntimeError, NotImplementedError):  # why: weights that torch cannot measure must not cost the step
            self._wanted = False
            return []
