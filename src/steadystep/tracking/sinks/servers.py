"""MLflow, Weights & Biases and Trackio.

MLflow: a server where one is set (`MLFLOW_TRACKING_URI`), else a database in the run's folder. Weights & Biases: where
to, and whether at all over the network, is W&B's own setting (`WANDB_MODE=offline`). Trackio: a database on this
machine (`TRACKIO_DIR`), or a Space where one is given.
"""

import json
import time
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, final
from uuid import uuid4

from steadystep._utils.text import dotted
from steadystep.errors import ConfigError
from steadystep.records import Incident
from steadystep.tracking import GradientSample, RunStart, StepRow, histogram, need
from steadystep.tracking.log_format import incident_card

_MLFLOW_ID = "mlflow-id"
_BATCH = 1000  # points in one transaction, as many as MLflow takes: a commit costs as much as hundreds of them
_EVERY_S = 2.0


@final
class MLflow:
    """Sink that logs to an MLflow run of its own; a resumed process continues it.

    Args:
        experiment: name of the experiment.
        tracking_uri: where to log. Default: what MLflow is set to, or `run_dir/mlflow.db`.
    """

    def __init__(self, experiment: str = "steadystep", tracking_uri: str | None = None) -> None:
        need("mlflow")
        self._experiment = experiment
        self._uri = tracking_uri
        self._client: Any = None
        self._entities: Any = None
        self._run_id = ""
        self._local = False
        self._points: list[Any] = []
        self._written = time.monotonic()

    def start(self, run: RunStart) -> None:
        """Begin or continue the run."""
        mlflow = import_module("mlflow")
        self._entities = import_module("mlflow.entities")
        known = self._uri is not None or import_module("mlflow.tracking").is_tracking_uri_set()
        local = None if known or run.run_dir is None else f"sqlite:///{(run.run_dir / 'mlflow.db').resolve()}"
        self._local = local is not None
        self._client = mlflow.MlflowClient(tracking_uri=self._uri or local)
        self._run_id = self._go_on(run.run_dir) or self._begin(run)
        self._client.log_dict(self._run_id, dict(run.settings), "settings.json")
        self._written = time.monotonic()  # why: making a database takes seconds, and what waited is written together

    def step(self, row: StepRow) -> None:
        """Log one point per curve."""
        scale = {} if row.scale is None else {"scale": row.scale}
        curves = {"loss/train": row.loss, "grad/norm": row.grad_norm, "lr": row.lr}
        self._log(row.step, {**curves, **scale, **row.metrics})

    def validation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log one point per metric."""
        names = {"val_loss": "loss/validation"}
        self._log(step, {names.get(name, f"validation/{name}"): value for name, value in metrics.items()})

    def layers(self, step: int, norms: Mapping[str, float]) -> None:
        """Log one curve per layer."""
        self._log(step, {f"grad/layer/{name}": norm for name, norm in norms.items()})

    def histograms(self, sample: GradientSample) -> None:
        """Do nothing: MLflow has no histograms."""

    def incident(self, incident: Incident) -> None:
        """Log a text and a point."""
        self._log(incident.step, {f"incidents/{incident.cause}": 1.0})
        self._client.log_text(self._run_id, incident_card(incident), f"incidents/step-{incident.step:08d}.md")

    def close(self) -> None:
        """Write what is left."""
        if self._run_id:
            self._write()
            self._client.set_terminated(self._run_id)

    def _begin(self, run: RunStart) -> str:
        found = self._client.get_experiment_by_name(self._experiment)
        artifacts = (run.run_dir / "mlflow").resolve().as_uri() if run.run_dir and self._local else None
        experiment = found.experiment_id if found else self._client.create_experiment(self._experiment, artifacts)
        made = self._client.create_run(experiment, run_name=run.name)
        settings = [("parameters", run.parameters), *dotted(run.hparams), *dotted(run.settings)]
        params = [self._entities.Param(_clean(name), json.dumps(value)[:500]) for name, value in settings]
        self._client.log_batch(made.info.run_id, params=params)
        if run.run_dir is not None:
            (run.run_dir / _MLFLOW_ID).write_text(made.info.run_id)
        return str(made.info.run_id)

    def _go_on(self, folder: Path | None) -> str:
        path = None if folder is None else folder / _MLFLOW_ID
        if path is None or not path.exists():
            return ""
        run_id = path.read_text().strip()
        self._client.update_run(run_id, status="RUNNING")
        return run_id

    def _log(self, step: int, values: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        self._points += [self._entities.Metric(_clean(name), value, now, step) for name, value in values.items()]
        if len(self._points) >= _BATCH or time.monotonic() - self._written > _EVERY_S:
            self._write()

    def _write(self) -> None:
        while self._points:
            batch, self._points = self._points[:_BATCH], self._points[_BATCH:]
            self._client.log_batch(self._run_id, metrics=batch)
        self._written = time.monotonic()


def _clean(name: str) -> str:
    """MLflow takes letters, digits and a few marks."""
    return "".join(c if c.isalnum() or c in "_-./ " else "_" for c in name)


_WANDB_ID, _TRACKIO_ID = "wandb-id", "trackio-id"


@final
class WandB:
    """Sink that logs to a W&B run of its own; a resumed process continues it.

    Args:
        project: name of the project.
        **options: any other argument of `wandb.init`.
    """

    def __init__(self, project: str = "steadystep", **options: Any) -> None:
        need("wandb")
        self._project = project
        self._options = options
        self._wandb: Any = None
        self._run: Any = None

    def start(self, run: RunStart) -> None:
        """Begin or continue the run."""
        self._wandb = import_module("wandb")
        folder = {} if run.run_dir is None else {"dir": str(run.run_dir)}
        options = {"name": run.name, "id": _identity(run.run_dir), "resume": "allow", **folder, **self._options}
        config = {"parameters": run.parameters, **run.hparams, **run.settings}
        self._run = self._wandb.init(project=self._project, config=config, **options)
        if self._run is None:
            raise ConfigError("wandb.init returned no run")
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")  # its own counter knows nothing of a resume

    def step(self, row: StepRow) -> None:
        """Log one point per curve."""
        scale = {} if row.scale is None else {"scale": row.scale}
        curves = {"loss/train": row.loss, "grad/norm": row.grad_norm, "lr": row.lr}
        self._run.log({"step": row.step, **curves, **scale, **row.metrics})

    def validation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log one point per metric."""
        names = {"val_loss": "loss/validation"}
        points = {names.get(name, f"validation/{name}"): value for name, value in metrics.items()}
        self._run.log({"step": step, **points})

    def layers(self, step: int, norms: Mapping[str, float]) -> None:
        """Log one curve per layer."""
        self._run.log({"step": step, **{f"grad/layer/{name}": norm for name, norm in norms.items()}})

    def histograms(self, sample: GradientSample) -> None:
        """Log the distribution of each layer's gradient."""
        counted = {name: histogram(values) for name, values in sample.values.items()}
        made = {f"grad/values/{n}": self._wandb.Histogram(np_histogram=found) for n, found in counted.items() if found}
        self._run.log({"step": sample.step, **made})

    def incident(self, incident: Incident) -> None:
        """Log a point and a text."""
        self._run.log(
            {"step": incident.step, f"incidents/{incident.cause}": 1, "incidents/text": incident_card(incident)}
        )

    def close(self) -> None:
        """Write what is left."""
        if self._run is not None:
            self._run.finish()


@final
class Trackio:
    """Sink that logs to a Trackio run of its own; a resumed process continues it.

    Args:
        project: name of the project.
        **options: any other argument of `trackio.init`, such as `space_id`.
    """

    def __init__(self, project: str = "steadystep", **options: Any) -> None:
        need("trackio")
        self._project = project
        self._options = {"resume": "allow", "embed": False, "auto_log_gpu": False, "auto_log_cpu": False, **options}
        self._trackio: Any = None
        self._run: Any = None

    def start(self, run: RunStart) -> None:
        """Begin or continue the run."""
        self._trackio = import_module("trackio")
        name = f"{run.name}-{_identity(run.run_dir, _TRACKIO_ID)}"
        config = dict(dotted({"parameters": run.parameters, **run.hparams, **run.settings}))
        options = {"name": name, "config": config, **self._options}
        self._run = self._trackio.init(project=self._project, **options)

    def step(self, row: StepRow) -> None:
        """Log one point per curve."""
        scale = {} if row.scale is None else {"scale": row.scale}
        curves = {"loss/train": row.loss, "grad/norm": row.grad_norm, "lr": row.lr}
        self._run.log({**curves, **scale, **row.metrics}, step=row.step)

    def validation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log one point per metric."""
        names = {"val_loss": "loss/validation"}
        points = {names.get(name, f"validation/{name}"): value for name, value in metrics.items()}
        self._run.log(points, step=step)

    def layers(self, step: int, norms: Mapping[str, float]) -> None:
        """Log one curve per layer."""
        self._run.log({f"grad/layer/{name}": norm for name, norm in norms.items()}, step=step)

    def histograms(self, sample: GradientSample) -> None:
        """Do nothing: the curves per layer say as much."""

    def incident(self, incident: Incident) -> None:
        """Log a point and a text."""
        text = self._trackio.Markdown(incident_card(incident))
        self._run.log({f"incidents/{incident.cause}": 1, "incidents/text": text}, step=incident.step)

    def close(self) -> None:
        """Write what is left."""
        if self._run is not None:
            self._run.finish()


def _identity(folder: Path | None, file: str = _WANDB_ID) -> str:
    """The same for every process that works in a folder."""
    if folder is None:
        return uuid4().hex[:8]
    path = folder / file
    if not path.exists():
        path.write_text(uuid4().hex[:8])
    return path.read_text().strip()
