"""What MLflow's own client finds in the run's database."""

import os
from pathlib import Path

import pytest

from steadystep import tracking
from steadystep.errors import ConfigError
from steadystep.testing import _calls, _on_a_thread
from steadystep.tracking import MLflow

pytest.importorskip("mlflow")
os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"  # read when it is imported
# MLflow's own use of SQLAlchemy warns: https://github.com/mlflow/mlflow/issues
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("quiet")]


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.chdir(tmp_path)


@pytest.mark.slow
def test_a_local_run_that_is_resumed(tmp_path: Path) -> None:
    from mlflow import MlflowClient

    folder = tmp_path / "run"
    folder.mkdir()
    for first in (0, 10):
        _on_a_thread(MLflow(), list(_calls(folder, first, 12)), f"from {first}")
    client = MlflowClient(tracking_uri=f"sqlite:///{folder / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("steadystep")
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.run_name, run.info.status) == ("a <b> & c", "FINISHED")
    losses = client.get_metric_history(run.info.run_id, "loss/train")
    assert [m.step for m in losses] == [*range(12), *range(10, 22)]
    assert losses[1].value == 0.5
    assert client.get_metric_history(run.info.run_id, "loss/validation")[0].step == 5
    assert run.data.metrics["grad/layer/embed.weight"] == 0.5
    assert run.data.metrics["accuracy _top 1_ _"] == 0.5
    assert run.data.params["training.lr_scheduler"] == '"cosine"'
    text = next((folder / "mlflow").rglob("step-00000006.md")).read_text()
    assert "Step 6: non-finite-loss" in text
    assert not (tmp_path / "mlflow.db").exists()  # nothing outside the run's folder
    assert not (tmp_path / "mlruns").exists()


def test_without_the_package_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracking, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"steadystep\[mlflow\]"):
        MLflow()
