"""A sink: somewhere else that a run is shown. One background thread calls it, never the training."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, final

import numpy as np
from numpy.typing import NDArray

from steadystep.track.run import Incident


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RunStart:
    """What is known when the first step is over."""

    name: str
    run_dir: Path | None = None
    step: int = 0
    """The first step of this process: above 0 after a resume."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    parameters: int = 0
    """Numbers that are trained."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class StepRow:
    """One optimizer step."""

    step: int
    loss: float
    grad_norm: float
    lr: float
    stepped: bool = True
    clipped: bool = False
    scale: float | None = None
    """The loss scale, where there is one."""
    metrics: Mapping[str, float] = field(default_factory=dict)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class GradientSample:
    """Elements of some gradients, at most a few thousand of each."""

    step: int
    values: Mapping[str, NDArray[np.float32]]


class Sink(Protocol):
    """What a tracker has to take. It may raise: then it is reported once, closed, and asked no more."""

    def start(self, run: RunStart) -> None:
        """The run begins, or goes on after a resume."""
        ...

    def step(self, row: StepRow) -> None:
        """One step, at a cadence and around incidents."""
        ...

    def validation(self, step: int, metrics: Mapping[str, float]) -> None:
        """A validation before step `step`; the loss is called `val_loss`."""
        ...

    def layers(self, step: int, norms: Mapping[str, float]) -> None:
        """Gradient norms by parameter, at a cadence and at incidents."""
        ...

    def histograms(self, sample: GradientSample) -> None:
        """Gradients to make histograms of, at a coarser cadence."""
        ...

    def incident(self, incident: Incident) -> None:
        """A step that was not like the others; its row comes first."""
        ...

    def close(self) -> None:
        """The run is over: write what is left."""
        ...
