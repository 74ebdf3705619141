"""RECORD: the run log, the sinks and the messages on screen. A failure is reported once; training continues.

`Terminal` loads on first use: it imports rich, which takes time and draws from Python's random numbers.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, final

import numpy as np
from numpy.typing import NDArray

from steadystep._utils import lazy_names
from steadystep._utils.text import install
from steadystep.errors import ConfigError
from steadystep.records import Incident

if TYPE_CHECKING:
    from steadystep.runs.run import LayerNorms, Run, Series
    from steadystep.runs.run_log import Follower, read
    from steadystep.tracking.alerts import Alert, Alerts
    from steadystep.tracking.broadcast import Broadcast
    from steadystep.tracking.log_format import describe
    from steadystep.tracking.run_log import RunLog
    from steadystep.tracking.sinks import MLflow, TensorBoard, Trackio, WandB, default_sinks, named_sinks
    from steadystep.tracking.terminal import Terminal
    from steadystep.tracking.tracker import NoLog, Tracker, Tracking

__all__ = [
    "Alert",
    "Alerts",
    "Broadcast",
    "Follower",
    "GradientSample",
    "Incident",
    "LayerNorms",
    "MLflow",
    "NoLog",
    "Run",
    "RunLog",
    "RunStart",
    "Series",
    "Sink",
    "StepRow",
    "TensorBoard",
    "Terminal",
    "Tracker",
    "Tracking",
    "Trackio",
    "WandB",
    "default_sinks",
    "describe",
    "named_sinks",
    "read",
]

__getattr__ = lazy_names(
    __name__,
    {
        ".runs.run": ("LayerNorms", "Run", "Series"),
        ".runs.run_log": ("Follower", "read"),
        "alerts": ("Alert", "Alerts"),
        "broadcast": ("Broadcast",),
        "log_format": ("describe",),
        "run_log": ("RunLog",),
        "sinks": ("MLflow", "TensorBoard", "Trackio", "WandB", "default_sinks", "named_sinks"),
        "terminal": ("Terminal",),
        "tracker": ("NoLog", "Tracker", "Tracking"),
    },
)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RunStart:
    """What is known about a run when its first step is over."""

    name: str
    """Name of the run."""
    run_dir: Path | None = None
    """Folder of the run, if there is one."""
    step: int = 0
    """First step of this process: above 0 after a resume."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the guard."""
    parameters: int = 0
    """Number of trainable parameters."""
    hparams: Mapping[str, Any] = field(default_factory=dict)
    """Hyperparameters: those of the optimizer, and what was passed as `hparams=`."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class StepRow:
    """One optimizer step, as sinks receive it."""

    step: int
    """The optimizer step."""
    loss: float
    """Training loss."""
    grad_norm: float
    """Global gradient norm, before clipping."""
    lr: float
    """Learning rate of this update."""
    stepped: bool = True
    """Whether the weights were updated."""
    clipped: bool = False
    """Whether the gradients were clipped."""
    scale: float | None = None
    """Loss scale, where there is one."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Metrics given with the step."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class GradientSample:
    """Elements of some gradients, at most a few thousand of each."""

    step: int
    """The optimizer step."""
    values: Mapping[str, NDArray[np.float32]]
    """Elements by parameter name."""


class Sink(Protocol):
    """Protocol of an output for runs. A sink that raises is reported once, closed, and no longer called."""

    def start(self, run: RunStart) -> None:
        """Begin a run, or continue it after a resume."""
        ...

    def step(self, row: StepRow) -> None:
        """Take one step, at a cadence and around incidents."""
        ...

    def validation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take a validation before step `step`; the loss is `val_loss`."""
        ...

    def layers(self, step: int, norms: Mapping[str, float]) -> None:
        """Take gradient norms by parameter, at a cadence and at incidents."""
        ...

    def histograms(self, sample: GradientSample) -> None:
        """Take gradients for histograms, at a coarser cadence."""
        ...

    def incident(self, incident: Incident) -> None:
        """Take an incident; the row of its step comes first."""
        ...

    def close(self) -> None:
        """End the run and write what is left."""
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
