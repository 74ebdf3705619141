"""Micro-batches of a loop's own passes that could be run again, should something be wrong with one."""

from collections.abc import Callable, Sequence
from typing import Any, final

from torch import Tensor

from steadystep.accumulation import Passes
from steadystep.rng import RngState

Again = Callable[..., Tensor]


@final
class Reruns:
    """References only, from the forward pass to the step."""

    def __init__(self) -> None:
        self._all: list[tuple[Again | None, Any, RngState | None]] = []

    def add(self, again: Again | None, batch: Any, rng: RngState | None = None) -> None:
        """One more micro-batch of this step."""
        self._all.append((again, batch, rng))

    @property
    def batches(self) -> list[Any]:
        """What was given."""
        return [batch for _, batch, _ in self._all if batch is not None]

    def show(self, passes: Passes, bad: Sequence[int] = ()) -> None:
        """Present the first bad one, or the last."""
        known = [i for i in bad if i < len(self._all)]
        if self._all:
            passes.present(*self._all[known[0] if known else -1])

    def clear(self) -> None:
        """The step is over."""
        self._all = []
