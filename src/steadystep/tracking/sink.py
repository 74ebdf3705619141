"""A sink: somewhere else that a run is shown. One background thread calls it, never the training."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol, final

import numpy as np
from numpy.typing import NDArray

from steadystep._utils.text import install
from steadystep.errors import ConfigError
from steadystep.records import Incident


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


_BINS = 20


def histogram(values: NDArray[np.float32]) -> tuple[NDArray[np.int64], NDArray[np.float64]] | None:
    """Counts and edges of what is finite; None where nothing is."""
    finite = values[np.isfinite(values)].astype(np.float64)
    if not len(finite):
        return None
    low, high = finite.min(), finite.max()
    width = (high - low) / _BINS
    if width == 0.0:
        return np.histogram(finite, bins=_BINS)
    # why not numpy's own: bins of one width are found by a division, four times as quick
    counts = np.bincount(np.minimum((finite - low) / width, _BINS - 1).astype(np.intp), minlength=_BINS)
    return counts, low + width * np.arange(_BINS + 1)


@final
class Allowance:
    """Bytes that may be spent. What is not used is saved up."""

    def __init__(self, start: float, per_step: float) -> None:
        self._start = start
        self._per_step = per_step
        self._left = start
        self._last: int | None = None

    def grant(self, size: int, step: int, *, reserve: float = 0.0) -> bool:
        """Whether `size` bytes may be written at `step`, with that share of the first sum left; they then count."""
        if self._last is not None and step > self._last:
            self._left += self._per_step * (step - self._last)
        self._last = step
        if size > self._left - reserve * self._start:
            return False
        self._left -= size
        return True


def is_installed(package: str) -> bool:
    """Whether it could be imported, without importing it."""
    return find_spec(package) is not None


def need(package: str) -> None:
    """A clear error where it is not there."""
    if not is_installed(package):
        raise ConfigError(f"the {package} sink needs its package: {install(package)}")
