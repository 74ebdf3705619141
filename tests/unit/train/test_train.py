"""`steadystep train`: a run from a file, resumed with the same bits, and mistakes that are named."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from steadystep.checkpoints.store import CheckpointStore
from steadystep.cli.app import app
from steadystep.errors import ConfigError
from steadystep.lab.tasks import TASKS
from steadystep.train import RunPlan, resolve, train
from steadystep.train.job import make
from steadystep.train.loop import prepare_folder
from tests.loops import assert_same

FILE = """
task: {task}
seed: 3
validation_frequency: 10
{more}
training:
  total_steps: {steps}
  max_grad_norm: 1.0
  gradient_accumulation_steps: 2
monitoring:
  checkpoint_frequency: 7
"""


class StoppedError(Exception):
    pass


def plan(tmp_path: Path, *, task: str = "clusters", steps: int = 30, more: str = "") -> RunPlan:
    path = tmp_path / "run.yaml"
    path.write_text(FILE.format(task=task, steps=steps, more=more))
    return RunPlan.load(path)


def run(made: RunPlan, folder: Path, *, stop_at: int | None = None) -> tuple[Any, dict[str, Any]]:
    seen = []

    def watch(outcome: Any, guard: Any) -> None:
        seen.append(outcome.loss)
        if guard.attempts == stop_at:
            raise StoppedError

    summary = train(made, folder, watch=watch)
    newest = CheckpointStore(folder / "checkpoints").newest()
    assert newest is not None
    tensors = {**newest.state["parameters"], **newest.state["buffers"]}
    return summary, tensors


@pytest.mark.parametrize("task", ["clusters", "gpt", "restarts"])
def test_stopped_and_resumed_it_ends_with_the_same_bits(tmp_path: Path, task: str) -> None:
    made = plan(tmp_path, task=task)
    expected_summary, expected = run(made, tmp_path / "whole")
    with pytest.raises(StoppedError):
        run(made, tmp_path / "parts", stop_at=17)
    summary, got = run(made, tmp_path / "parts")
    assert_same(got, expected)
    assert (summary.steps, summary.updates) == (expected_summary.steps, expected_summary.updates) == (30, 30)
    assert summary.trained < 30
    assert summary.validation == expected_summary.validation


def test_init_groups_and_faults_from_the_file(tmp_path: Path) -> None:
    more = """
init: kaiming
groups: {match: "*.bias", lr_mult: 0.5, weight_decay: 0}
faults:
  - {kind: bad-loss, at: 5}
"""
    made = plan(tmp_path, more=more)
    job = make(made.run.task, made.run.seed)
    before = [p.detach().clone() for p in job.model.parameters()]
    job.prepare(made.run)
    assert any(not torch.equal(a, b) for a, b in zip(before, job.model.parameters(), strict=True))
    rates = {group["name"]: group["lr"] for group in job.optimizer.param_groups}
    assert rates["*.bias"] == pytest.approx(0.025)
    assert job.optimizer.defaults["momentum"] == 0.9
    summary, _ = run(made, tmp_path / "run")
    assert (summary.steps, summary.updates, summary.incidents) == (30, 29, 1)


def test_names_are_those_of_the_table_given_or_the_built_in_ones() -> None:
    def mine(seed: int) -> None: ...

    assert resolve("mine", {"mine": mine}) is mine
    assert resolve("gpt") is TASKS["gpt"].make
    with pytest.raises(ConfigError, match="'gpt' is not built in: did you mean 'mine'"):
        resolve("gpt", {"mine": mine})


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("seed: 1\n", "task is missing"),
        ("task: gtp\n", "did you mean 'gpt'"),
        ("task: gpt\nsede: 1\n", "unknown key 'sede': did you mean 'seed'"),
        ("task: gpt\nseed: -1\n", "seed = -1"),
        ("task: gpt\ninit: gpt3\n", "init = 'gpt3'"),
        ("task: gpt\ntraining: {max_grad_nrm: 1}\n", "did you mean 'training.max_grad_norm'"),
        ("task: no_such_module:make\n", "no module named 'no_such_module'"),
        ("task: json:nothing\n", "json has no 'nothing'"),
        ("task: json:__name__\n", "is not a function"),
        ("task: json:dumps\n", "must have .model"),
        ("task: gpt\ngroups: [{match: 'nope.*'}]\n", "nope"),
        ("task: gpt\nfaults: [{kind: grad-scal, at: 1}]\n", "grad-scale"),
    ],
)
def test_mistakes_are_named_and_exit_with_2(
    tmp_path: Path, text: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.yaml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        train(RunPlan.load(Path("a.yaml")), tmp_path / "run", watch=lambda *_: None)
    assert says in str(caught.value)


def test_the_template_runs_and_a_folder_belongs_to_one_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    runner = CliRunner()
    assert runner.invoke(app, ["train", "--new", "mine_for_test"]).exit_code == 0
    path = tmp_path / "mine_for_test.yaml"
    path.write_text(path.read_text().replace("total_steps: 1000", "total_steps: 40"))
    done = runner.invoke(app, ["train", path.name, "--json"])
    assert done.exit_code == 0
    told = json.loads(done.stdout.splitlines()[-1])
    assert (told["steps"], told["updates"]) == (40, 40)
    written = {p.name for p in (tmp_path / "runs" / "mine_for_test").iterdir()}
    assert written - {"tensorboard"} == {"checkpoints", "config.yaml", "run.jsonl"}
    with pytest.raises(ConfigError, match="--resume"):
        prepare_folder(tmp_path / "runs" / "mine_for_test", path, resume=False)
    with pytest.raises(ConfigError, match="no run to continue"):
        prepare_folder(tmp_path / "other", path, resume=True)
    again = runner.invoke(app, ["train", path.name, "--resume"])
    assert "no steps left to run" in again.stdout
    for wrong in ("mine_for_test", "not a name"):
        assert isinstance(runner.invoke(app, ["train", "--new", wrong]).exception, ConfigError)
    assert isinstance(runner.invoke(app, ["train"]).exception, ConfigError)


def test_early_stopping_ends_a_run(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(
        "task: flat\nvalidation_frequency: 2\ntraining: {total_steps: 500, early_stopping: true, patience: 3}\n"
    )
    summary = train(RunPlan.load(path), tmp_path / "run", watch=lambda *_: None)
    assert summary.stopped_early
    assert summary.steps < 500
