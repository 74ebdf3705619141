"""What a way of training is, to the study: it takes batches and says what it did."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, final

from torch import Tensor, nn
from torch.optim import Optimizer

from steadystep.lab.bench.rules import Sample

Work = Callable[[Any], Tensor]
"""The loss of a batch, with the fault in it."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """One step as the trainer tells it."""

    loss: float
    did: tuple[str, ...] = ()
    """What was done beside or instead of the plain update; empty for most."""
    loud: str = ""
    """What it raised its voice about."""
    sample: Sample | None = None
    """What the rules are shown, where this trainer records it."""


class Stopped(Exception):  # noqa: N818  # why: an end that was meant, not an error
    """The trainer ends the run by design."""


class Trainer(Protocol):
    """One arm of the study, made from a task."""

    model: nn.Module
    optimizer: Optimizer
    """Faults get these two, so they are the ones that really train."""

    def step(self, work: Work, batch: Any) -> Tick:
        """Forward, backward and whatever follows. Raises `Stopped` to end the run by design."""
        ...

    @property
    def updates(self) -> int:
        """Updates contained in the weights."""
        ...

    def close(self) -> None:
        """After the last step."""
        ...
