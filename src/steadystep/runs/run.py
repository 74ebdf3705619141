"""A run as its log tells it: plain arrays and names. Readers make it; reports, pages and the doctor take it."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, final

import numpy as np
from numpy.typing import NDArray

from steadystep._utils import RunStatus, run_status
from steadystep._utils.text import html_card, number
from steadystep.records import Incident
from steadystep.records.decisions import episodes
from steadystep.runs import EffectiveTime, changed_at, effective_time

Source = Literal["steadystep", "tensorboard", "csv", "transformers", "text"]
StepUnit = Literal["step", "row", "epoch"]


@final
@dataclass(frozen=True, slots=True)
class Series:
    """One curve. Steps never decrease within a run; a value may be NaN or infinite."""

    steps: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    """The steps."""
    values: NDArray[np.float64] = field(default_factory=lambda: np.empty(0))
    """The value at each step."""

    def __len__(self) -> int:
        return len(self.steps)

    @property
    def tail(self) -> NDArray[np.float64]:
        """The last tenth of the values, at least three."""
        return self.values[-max(3, len(self.values) // 10) :]

    @property
    def level(self) -> float | None:
        """Median of the finite values in `tail`; NaN if half of them or the last three are not, None without values."""
        tail = self.tail
        finite = tail[np.isfinite(tail)]
        if not len(tail):
            return None
        alive = 2 * len(finite) >= len(tail) and bool(np.isfinite(tail[-3:]).any())
        return float(np.median(finite)) if alive else math.nan


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class LayerNorms:
    """Gradient norms per layer at the logged steps: one row per step, NaN where a layer was missing."""

    steps: NDArray[np.int64]
    """The logged steps."""
    names: tuple[str, ...]
    """Names of the layers, in the order of the columns."""
    norms: NDArray[np.float64]
    """One row per step, one column per layer."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Everything that a log holds about a run."""

    name: str
    """Name of the run."""
    path: Path
    """File or folder it was read from."""
    source: Source
    """Format it was read from."""
    loss: Series = field(default_factory=Series)
    """Training loss."""
    grad_norm: Series = field(default_factory=Series)
    """Global gradient norm, before clipping."""
    lr: Series = field(default_factory=Series)
    """Learning rate."""
    metrics: Mapping[str, Series] = field(default_factory=dict)
    """Metrics logged with training steps, by name."""
    validation: Mapping[str, Series] = field(default_factory=dict)
    """Metrics of validations, by name; the loss is `val_loss`."""
    clipped: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    """Steps whose gradient was clipped."""
    incidents: tuple[Incident, ...] = ()
    """Incidents, in order."""
    layers: LayerNorms | None = None
    """Gradient norms per layer, where they were logged."""
    restarts: tuple[int, ...] = ()
    """Steps at which another process continued: not spikes."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the guard, nested as in the YAML file."""
    notes: tuple[str, ...] = ()
    """What the reader had to skip or guess, in sentences."""
    columns: Mapping[str, str] = field(default_factory=dict)
    """Names in the log by what they were read as, such as `loss`; empty for our own log."""
    read: str = ""
    """Which rows and columns the reader used, in a clause; empty for our own log."""
    step_unit: StepUnit = "step"
    """What the steps count; "row" when the log has no steps."""
    ended: bool | None = None
    """Whether the run came to its end; None if the format does not tell."""
    end: str = ""
    """How it ended, where the log tells: finished, stopped or error."""
    error: str = ""
    """With "stopped" and "error": the message."""
    verdict: str = ""
    """Last diagnosis of the guard: a cause and its evidence."""
    fault: str = ""
    """The particular mistake, where the guard's diagnosis names one."""
    scale: Series = field(default_factory=Series)
    """Loss scale, where there was one."""
    began: float | None = None
    """Start of the last process, in seconds since 1970."""
    seconds: float | None = None
    """Duration of the last process; None while it runs, or where the log does not tell."""
    parameters: int | None = None
    """Number of trainable parameters."""
    hparams: Mapping[str, Any] = field(default_factory=dict)
    """Hyperparameters: those of the optimizer, and what was passed as `hparams=`."""
    process: Mapping[str, Any] = field(default_factory=dict)
    """Number, start and host of the last process that wrote the log."""
    updates: LayerNorms | None = None
    """Size of the update relative to the weights, by parameter, where it was logged."""
    logits: LayerNorms | None = None
    """Upper bound of the attention logits, by module, where it was logged."""

    @property
    def steps(self) -> int:
        """Number of steps: the last logged one, counted from 1."""
        return int(self.loss.steps[-1]) + 1 if len(self.loss) else 0

    @property
    def final_loss(self) -> float | None:
        """Median training loss of the last tenth of the run; NaN for a run that ended in NaN, None without a loss."""
        return self.loss.level

    @property
    def last_validation(self) -> float | None:
        """The last validation loss, as logged; None without one."""
        held_out = self._held_out
        return float(held_out.values[-1]) if len(held_out) else None

    @property
    def best_validation(self) -> float | None:
        """The lowest finite validation loss; None without one."""
        values = self._held_out.values
        return float(values[np.isfinite(values)].min()) if np.isfinite(values).any() else None

    @property
    def best_validation_step(self) -> int | None:
        """The step of `best_validation`, the first if there are several."""
        best, held_out = self.best_validation, self._held_out
        return None if best is None else int(held_out.steps[np.flatnonzero(held_out.values == best)[0]])

    @property
    def _held_out(self) -> Series:
        return self.validation.get("val_loss", Series())

    @property
    def is_guarded(self) -> bool:
        """Whether a guard was there that would have intervened."""
        return self.source == "steadystep" and self.settings.get("mode") in ("autopilot", "careful")

    def episodes(self) -> tuple[tuple[Incident, ...], ...]:
        """Return incidents close to each other as one episode, in the order of their first steps."""
        counted = [incident for incident in self.incidents if not incident.is_routine]
        routine = [incident for incident in self.incidents if incident.is_routine]
        return tuple(sorted((*episodes(counted), *episodes(routine)), key=lambda episode: episode[0].step))

    def interventions(self) -> tuple[tuple[Incident, ...], ...]:
        """Return the episodes in which the guard changed something; none in observe mode."""
        if self.settings.get("mode") == "observe":
            return ()
        return tuple(e for e in self.episodes() if any(incident.calls_for_action for incident in e))

    @property
    def num_incidents(self) -> int:
        """Number of episodes, routine ones left out."""
        return sum(not episode[0].is_routine for episode in self.episodes())

    @property
    def num_interventions(self) -> int:
        """Number of episodes in which the guard changed something."""
        return len(self.interventions())

    @property
    def num_skipped(self) -> int:
        """Number of updates that were not applied."""
        return sum(not incident.stepped for incident in self.incidents)

    @property
    def num_rollbacks(self) -> int:
        """Number of rollbacks."""
        return sum(incident.restored is not None for incident in self.incidents)

    def effective(self) -> EffectiveTime:
        """Return how much of the run is in its final weights, and what each incident cost."""
        return effective_time(self.incidents, self.steps, seconds=self.seconds, since=(0, *self.restarts)[-1])

    def numbers(self) -> dict[str, Any]:
        """Return the numbers that every view of a run shows, by name."""
        return {
            "steps": self.steps,
            "final_loss": self.final_loss,
            "last_validation": self.last_validation,
            "best_validation": self.best_validation,
            "best_validation_step": self.best_validation_step,
            "incidents": self.num_incidents,
            "interventions": self.num_interventions,
            "skipped": self.num_skipped,
            "rollbacks": self.num_rollbacks,
            **self.effective().numbers(),
        }

    def to_pandas(self) -> Any:
        """Return a `pandas.DataFrame` with a row per step: loss, grad_norm, lr, metrics, validations, incident."""
        from steadystep.runs.gathering import frame, needed

        steps, columns = frame(self)
        pandas = needed("pandas", "to_pandas")
        return pandas.DataFrame(columns, index=pandas.Index(steps, name="step"))

    def to_polars(self) -> Any:
        """Return a `polars.DataFrame` with the columns of `to_pandas`, and the steps as its first one."""
        from steadystep.runs.gathering import frame, needed

        steps, columns = frame(self)
        return needed("polars", "to_polars").DataFrame({"step": steps, **columns})

    def __repr__(self) -> str:
        return f"Run({self.name!r}: {', '.join(f'{name} {value}' for name, value in self._about() if value)})"

    def _repr_html_(self) -> str:
        """Return a table for a notebook, with the verdict of `steadystep diagnose`."""
        # why by name: a diagnosis simulates a guard, and the linter reads runs without knowing one
        verdict = import_module("steadystep.runs.diagnosis").headline(self)
        tone = {True: "good", False: "bad", None: ""}[verdict.healthy]
        return html_card(self.name, [("verdict", verdict.said), *self._about()], tone=tone)

    def _about(self) -> list[tuple[str, str]]:
        best = self.best_validation
        return [
            ("steps", f"{self.steps:,}"),
            ("final loss", number(self.final_loss)),
            ("best validation", "" if best is None else f"{number(best)} at step {self.best_validation_step:,}"),
            ("incidents", str(self.num_incidents)),
            ("interventions", str(self.num_interventions)),
        ]

    def status(self, changed: float | None = None, now: float | None = None) -> RunStatus:
        """Return whether the run is running, finished, stopped (by an error or the guard), stale or idle.

        Args:
            changed: when its log last changed. Default: the time of the file.
            now: seconds since 1970. Default: the clock.
        """
        if changed is None and self.source == "steadystep":
            changed = changed_at(self.path if self.path.is_file() else self.path / "run.jsonl")
        return run_status(self.ended, self.end, self.process, changed or 0.0, now)


Floats = NDArray[np.float64]
_AT_EPOCHS, _DONE = 0.9, 0.8  # of all steps back; of the length of a progress bar


def counted_on(steps: Floats, epochs: Floats | None, whole: float | None) -> Floats | None:
    """Steps that start again in every epoch, counted on from one to the next; None where they do not.

    Args:
        steps: of every row; NaN where there is none.
        epochs: of every row, if they were logged.
        whole: the length of the progress bar that the steps were read from.
    """
    known = np.flatnonzero(np.isfinite(steps))
    if len(known) < 2:
        return None
    values = steps[known]
    back = np.flatnonzero(np.diff(values) < 0) + 1
    if not len(back):
        return None
    anew = np.zeros(len(back), dtype=bool)
    if epochs is not None:
        anew |= epochs[known][back] > epochs[known][back - 1]
    if whole:
        anew |= values[back - 1] >= _DONE * whole
    if anew.mean() < _AT_EPOCHS:
        return None
    every = float(np.median(np.diff(values)[np.diff(values) > 0])) if np.any(np.diff(values) > 0) else 1.0
    offset = np.zeros(len(values))
    for at in back[anew]:
        offset[at:] += whole or float(values[at - 1] + every - min(values[0], every))
    found = steps.copy()
    found[known] = values + offset
    return found
