"""What MEASURE hands to ACT: the numbers, and the tensors they came from."""

from dataclasses import dataclass
from typing import Protocol, final

from torch import Tensor

from steadystep.norms import Layout
from steadystep.records import Signals


@final
@dataclass(slots=True)
class Look:
    """One look at the gradients of one update."""

    signals: Signals
    grads: list[Tensor]
    layout: Layout
    norms: list[Tensor]
    """Of each gradient, still on the device."""


class Probing(Protocol):
    """The heavier look that MEASURE takes around an update; ACT tells it when that is."""

    def due(self, step: int) -> bool:
        """Whether the update of `step` is to be measured."""
        ...

    def before(self) -> None:
        """The update is about to be taken."""
        ...

    def after(self, step: int) -> None:
        """It has been taken."""
        ...

    def cancel(self) -> None:
        """What was measured no longer holds."""
        ...
