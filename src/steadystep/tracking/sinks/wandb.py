"""Weights & Biases. Where to, and whether at all over the network, is W&B's own setting (`WANDB_MODE=offline`)."""

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, final
from uuid import uuid4

from steadystep.errors import ConfigError
from steadystep.records import Incident
from steadystep.tracking.log_format import incident_card
from steadystep.tracking.sink import GradientSample, RunStart, StepRow, histogram, need

_ID = "wandb-id"


@final
class WandB:
    """Logs to a run of its own, which a resumed process goes on with.

    Args:
        project: as W&B calls it.
        options: anything else that `wandb.init` takes.
    """

    def __init__(self, project: str = "steadystep", **options: Any) -> None:
        need("wandb")
        self._project = project
        self._options = options
        self._wandb: Any = None
        self._run: Any = None

    def start(self, run: RunStart) -> None:
        """Begin, or go on."""
        self._wandb = import_module("wandb")
        folder = {} if run.run_dir is None else {"dir": str(run.run_dir)}
        options = {"name": run.name, "id": _identity(run.run_dir), "resume": "allow", **folder, **self._options}
        config = {"parameters": run.parameters, **run.settings}
        self._run = self._wandb.init(project=self._project, config=config, **options)
        if self._run is None:
            raise ConfigError("wandb.init gave no run")
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")  # its own counter knows nothing of a resume

    def step(self, row: StepRow) -> None:
        """One point per curve."""
        scale = {} if row.scale is None else {"scale": row.scale}
        curves = {"loss/train": row.loss, "grad/norm": row.grad_norm, "lr": row.lr}
        self._run.log({"step": row.step, **curves, **scale, **row.metrics})

    def validation(self, step: int, metrics: Mapping[str, float]) -> None:
        """One point per metric."""
        names = {"val_loss": "loss/validation"}
        points = {names.get(name, f"validation/{name}"): value for name, value in metrics.items()}
        self._run.log({"step": step, **points})

    def layers(self, step: int, norms: Mapping[str, float]) -> None:
        """A curve per layer."""
        self._run.log({"step": step, **{f"grad/layer/{name}": norm for name, norm in norms.items()}})

    def histograms(self, sample: GradientSample) -> None:
        """The distribution of each layer's gradient."""
        counted = {name: histogram(values) for name, values in sample.values.items()}
        made = {f"grad/values/{n}": self._wandb.Histogram(np_histogram=found) for n, found in counted.items() if found}
        self._run.log({"step": sample.step, **made})

    def incident(self, incident: Incident) -> None:
        """A point, and a text."""
        self._run.log(
            {"step": incident.step, f"incidents/{incident.cause}": 1, "incidents/text": incident_card(incident)}
        )

    def close(self) -> None:
        """Write what is left."""
        if self._run is not None:
            self._run.finish()


def _identity(folder: Path | None) -> str:
    """The same for every process that works in a folder."""
    if folder is None:
        return uuid4().hex[:8]
    path = folder / _ID
    if not path.exists():
        path.write_text(uuid4().hex[:8])
    return path.read_text().strip()
