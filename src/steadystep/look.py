"""What MEASURE hands to ACT: the numbers, and the tensors they came from."""

from dataclasses import dataclass
from typing import final

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
