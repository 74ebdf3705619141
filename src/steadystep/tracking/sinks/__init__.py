"""Sinks for the trackers people use, by class and by the names that a settings file uses. Each needs its extra.

Here: TensorBoard; `tensorboard --logdir runs` shows every run below it.
"""

import itertools
import json
import math
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from steadystep.errors import ConfigError
from steadystep.records import Incident, severity_rank
from steadystep.tracking import GradientSample, RunStart, Sink, StepRow, histogram, is_installed, need
from steadystep.tracking.log_format import incident_card
from steadystep.tracking.sinks.servers import MLflow, Trackio, WandB

__all__ = ["MLflow", "TensorBoard", "Trackio", "WandB", "alert_sinks", "default_sinks", "named_sinks"]

_number = itertools.count()


@final
class EventFile:
    """One run as TensorBoard counts them: a folder. What an earlier process wrote from `step` on is taken back."""

    def __init__(self, folder: Path, *, step: int) -> None:
        self._events: Any = import_module("tensorboard.compat.proto.event_pb2")
        self._summaries: Any = import_module("tensorboard.compat.proto.summary_pb2")
        writer: Any = import_module("tensorboard.summary.writer.record_writer")
        folder.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.{next(_number)}"
        self._records = writer.RecordWriter((folder / name).open("wb"))
        self._write(file_version="brain.Event:2")
        started = self._events.SessionLog(status=self._events.SessionLog.START)
        self._write(step=step, session_log=started)  # readers forget what is at this step or later

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Points, by tag."""
        value = self._summaries.Summary.Value
        self._add(step, [value(tag=tag, simple_value=number) for tag, number in values.items()])

    def text(self, step: int, tag: str, markdown: str) -> None:
        """A note."""
        metadata: Any = import_module("tensorboard.plugins.text.metadata")
        tensor = import_module("tensorboard.compat.proto.tensor_pb2").TensorProto(
            dtype=import_module("tensorboard.compat.proto.types_pb2").DT_STRING, string_val=[markdown.encode()]
        )
        tensor.tensor_shape.dim.add().size = 1
        about = metadata.create_summary_metadata(display_name=tag, description="")
        self._add(step, [self._summaries.Summary.Value(tag=tag, metadata=about, tensor=tensor)])

    def histograms(self, step: int, values: Mapping[str, NDArray[np.float32]]) -> None:
        """Distributions, by tag. What is not finite is left out."""
        value = self._summaries.Summary.Value
        counted = ((tag, numbers, histogram(numbers)) for tag, numbers in values.items())
        self._add(step, [value(tag=tag, histo=self._made(n, *found)) for tag, n, found in counted if found])

    def close(self) -> None:
        """Write what is left."""
        self._records.close()

    def _made(self, numbers: NDArray[np.float32], counts: NDArray[np.int64], edges: NDArray[np.float64]) -> Any:
        finite = numbers[np.isfinite(numbers)].astype(np.float64)
        return self._summaries.HistogramProto(
            min=finite.min(),
            max=finite.max(),
            num=len(finite),
            sum=finite.sum(),
            sum_squares=np.square(finite).sum(),
            bucket_limit=edges.tolist(),
            bucket=[0.0, *counts.tolist()],  # the first one ends where the numbers begin
        )

    def _add(self, step: int, values: list[Any]) -> None:
        self._write(step=step, summary=self._summaries.Summary(value=values))

    def _write(self, **fields: Any) -> None:
        self._records.write(self._events.Event(wall_time=time.time(), **fields).SerializeToString())
        self._records.flush()  # a process that is forked off must find nothing to write a second time


@final
class TensorBoard:
    """Sink that writes TensorBoard event files.

    Tags: Loss/train, Loss/validation, Loss/Combined (both in one chart), LR, Grad/norm, Grad/layer/NAME, Scale, every
    metric under its own name, Incidents/CAUSE as points, and text for settings and incidents. A validation is written
    at the last step before it, so that a resume removes later steps and keeps the validation.

    Args:
        folder: where to write. Default: `run_dir/tensorboard`.
    """

    def __init__(self, folder: str | Path | None = None) -> None:
        need("tensorboard")
        self._folder = None if folder is None else Path(folder)
        self._files: dict[str, EventFile] = {}

    def start(self, run: RunStart) -> None:
        """Open the files; the charts of an earlier process end where this one continues."""
        folder = self._folder or (run.run_dir and run.run_dir / "tensorboard")
        if folder is None:
            raise ConfigError("TensorBoard needs a folder: TensorBoard(folder), or Guard(..., run_dir=...)")
        # why folders of their own: TensorBoard overlays a tag of several runs in one chart, and only those
        self._files = {
            name: EventFile(folder / name, step=run.step)
            for name in (".", "Loss_Combined_train", "Loss_Combined_validation")
        }
        about = {"parameters": run.parameters, "hparams": dict(run.hparams), **run.settings}
        self._main.text(run.step, "Settings", "```\n" + json.dumps(about, indent=2, default=str) + "\n```")

    def step(self, row: StepRow) -> None:
        """Write one point per curve."""
        scale = {} if row.scale is None else {"Scale": row.scale}
        points = {"Loss/train": row.loss, "Grad/norm": row.grad_norm, "LR": row.lr, **scale, **row.metrics}
        self._main.scalars(row.step, points)
        self._files["Loss_Combined_train"].scalars(row.step, {"Loss/Combined": row.loss})

    def validation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the metrics at the last step before the validation."""
        at = max(0, step - 1)
        names = {"val_loss": "Loss/validation"}
        self._main.scalars(at, {names.get(name, f"Validation/{name}"): value for name, value in metrics.items()})
        if "val_loss" in metrics:
            self._files["Loss_Combined_validation"].scalars(at, {"Loss/Combined": metrics["val_loss"]})

    def layers(self, step: int, norms: Mapping[str, float]) -> None:
        """Write one curve per layer, and the spread over layers."""
        self._main.scalars(step, {f"Grad/layer/{name}": norm for name, norm in norms.items()})
        sizes = np.array([math.log10(n) for n in norms.values() if n > 0.0 and math.isfinite(n)], dtype=np.float32)
        self._main.histograms(step, {"Grad/log10_norm_over_layers": sizes})

    def histograms(self, sample: GradientSample) -> None:
        """Write the distribution of each layer's gradient."""
        self._main.histograms(sample.step, {f"Grad/values/{name}": v for name, v in sample.values.items()})

    def incident(self, incident: Incident) -> None:
        """Write a text, and a point on the time line: 2 for warn, 3 for act, 4 for critical."""
        if incident.severity != "info":
            self._main.text(incident.step, "Incidents", incident_card(incident))
        self._main.scalars(incident.step, {f"Incidents/{incident.cause}": 1.0 + severity_rank(incident.severity)})

    def close(self) -> None:
        """Write what is left."""
        with ExitStack() as stack:
            for file in self._files.values():
                stack.callback(file.close)

    @property
    def _main(self) -> EventFile:
        return self._files["."]


def _terminal() -> Sink:
    from steadystep.tracking.terminal import Terminal  # late: it needs rich, and few want it

    return Terminal()


_MAKERS: dict[str, Callable[[], Sink]] = {
    "tensorboard": TensorBoard,
    "wandb": WandB,
    "mlflow": MLflow,
    "trackio": Trackio,
    "console": _terminal,
}


def named_sinks(names: Sequence[str], *, has_folder: bool) -> list[Sink]:
    """Return one sink for each name.

    Args:
        names: any of "tensorboard", "wandb", "mlflow", "trackio" and "console".
        has_folder: whether there is a `run_dir`.

    Raises:
        ConfigError: a sink is unknown, not installed, or needs a folder.
    """
    if "tensorboard" in names and not has_folder:
        raise ConfigError("monitoring.sinks: tensorboard needs a folder: Guard(..., run_dir=...)")
    return [_MAKERS[name]() for name in dict.fromkeys(names)]


def default_sinks(*, has_folder: bool) -> list[Sink]:
    """Return a `TensorBoard` sink if it is installed and `has_folder` is true, else none."""
    return [TensorBoard()] if has_folder and is_installed("tensorboard") else []


def alert_sinks(asked: Any) -> list[Sink]:
    """Return the sink for `monitoring.alerts`, if any are asked for."""
    if not asked:
        return []
    from steadystep.tracking.alerts import Alerts  # late: it imports an HTTP client, and few want it

    return [Alerts(asked)]
