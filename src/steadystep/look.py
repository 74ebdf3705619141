"""What MEASURE hands to ACT: the numbers, and the tensors they came from."""

from dataclasses import dataclass
from typing import final

from torch import Tensor

from steadystep.norms import Layout, Norms
from steadystep.records import Signals


@final
@dataclass(frozen=True, slots=True)
class Look:
    """One look at the gradients of one update."""

    signals: Signals
    grads: list[Tensor]
    layout: Layout
    norms: Norms
