"""What a rule sees of a step, and what it says about it."""

from dataclasses import dataclass
from typing import Protocol, final

from torch import nn
from torch.optim import Optimizer


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One step before its update. The last three are for rules that look into tensors; 0 where nobody measured them."""

    loss: float
    norm: float
    """Global L2 norm of the gradients."""
    norms: tuple[float, ...] = ()
    """The same for each tensor."""
    unit: float = 0.0
    """The largest norm of a row of gradients over that of its weights (at least 1e-3)."""
    coordinate: float = 0.0
    """The largest g² / v of Adam's v before the update."""
    surprise: float = 0.0
    """The largest RMS_t of a tensor: sqrt(mean(g² / max(v, eps²)))."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What a rule makes of one step."""

    alarm: bool = False
    scale: float = 1.0
    """What the gradients are multiplied by; 0 means the update is."""
    scales: tuple[float, ...] = ()
    """One for each tensor, instead."""
    stop: bool = False
    """It ends the run."""


FINE = Verdict()


class Rule(Protocol):
    """A rule that others ship, over plain numbers. It learns from what it is shown, in the order it is shown."""

    def update(self, seen: Sample) -> Verdict:
        """Judge a step and learn from it."""
        ...


class Touch(Protocol):
    """The act of a rule that needs tensors: called between backward and update."""

    def __call__(self, model: nn.Module, optimizer: Optimizer, step: int) -> None:
        """Change gradients, moments or learning rates for this update."""
        ...
