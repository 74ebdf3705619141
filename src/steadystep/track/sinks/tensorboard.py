"""TensorBoard: `tensorboard --logdir runs` shows every run below it."""

import json
import math
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import final

import numpy as np

from steadystep.errors import ConfigError
from steadystep.track.card import card
from steadystep.track.run import Incident
from steadystep.track.sink import GradientSample, RunStart, StepRow
from steadystep.track.sinks.event_file import EventFile
from steadystep.track.sinks.extra import need

_LOUDNESS = {"info": 1.0, "warn": 2.0, "act": 3.0, "critical": 4.0}


@final
class TensorBoard:
    """Writes to `folder`, or to `run_dir/tensorboard`.

    Tags: Loss/train, Loss/validation, Loss/Combined (both in one chart), LR, Grad/norm, Grad/layer/NAME, Scale, every
    metric under its own name, Incidents/CAUSE as points, and text for settings and incidents. A validation stands at
    the last step before it, so that a resume takes back steps and not the validation it starts from.
    """

    def __init__(self, folder: str | Path | None = None) -> None:
        need("tensorboard")
        self._folder = None if folder is None else Path(folder)
        self._files: dict[str, EventFile] = {}

    def start(self, run: RunStart) -> None:
        """Open the files; the charts of an earlier process end where this one goes on."""
        folder = self._folder or (run.run_dir and run.run_dir / "tensorboard")
        if folder is None:
            raise ConfigError("TensorBoard needs a folder: TensorBoard(folder), or Guard(..., run_dir=...)")
        # why folders of their own: TensorBoard overlays a tag of several runs in one chart, and only those
        self._files = {
            name: EventFile(folder / name, step=run.step)
            for name in (".", "Loss_Combined_train", "Loss_Combined_validation")
        }
        about = {"parameters": run.parameters, **run.settings}
        self._main.text(run.step, "Settings", "```\n" + json.dumps(about, indent=2, default=str) + "\n```")

    def step(self, row: StepRow) -> None:
        """One point per curve."""
        scale = {} if row.scale is None else {"Scale": row.scale}
        points = {"Loss/train": row.loss, "Grad/norm": row.grad_norm, "LR": row.lr, **scale, **row.metrics}
        self._main.scalars(row.step, points)
        self._files["Loss_Combined_train"].scalars(row.step, {"Loss/Combined": row.loss})

    def validation(self, step: int, metrics: Mapping[str, float]) -> None:
        """At the last step before it."""
        at = max(0, step - 1)
        names = {"val_loss": "Loss/validation"}
        self._main.scalars(at, {names.get(name, f"Validation/{name}"): value for name, value in metrics.items()})
        if "val_loss" in metrics:
            self._files["Loss_Combined_validation"].scalars(at, {"Loss/Combined": metrics["val_loss"]})

    def layers(self, step: int, norms: Mapping[str, float]) -> None:
        """A curve per layer, and how the layers spread."""
        self._main.scalars(step, {f"Grad/layer/{name}": norm for name, norm in norms.items()})
        sizes = np.array([math.log10(n) for n in norms.values() if n > 0.0 and math.isfinite(n)], dtype=np.float32)
        self._main.histograms(step, {"Grad/log10_norm_over_layers": sizes})

    def histograms(self, sample: GradientSample) -> None:
        """The distribution of each layer's gradient."""
        self._main.histograms(sample.step, {f"Grad/values/{name}": v for name, v in sample.values.items()})

    def incident(self, incident: Incident) -> None:
        """A text, and a point on the time line: 2 for a warning, 3 for an action, 4 for what is critical."""
        if incident.severity != "info":
            self._main.text(incident.step, "Incidents", card(incident))
        self._main.scalars(incident.step, {f"Incidents/{incident.cause}": _LOUDNESS[incident.severity]})

    def close(self) -> None:
        """Write what is left."""
        with ExitStack() as stack:
            for file in self._files.values():
                stack.callback(file.close)

    @property
    def _main(self) -> EventFile:
        return self._files["."]
