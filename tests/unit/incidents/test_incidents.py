"""Bundles: what is in them, what is left out, and that writing them can hurt nobody."""

import errno
import json
import os
import threading
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from steadystep._utils.rng import RngState
from steadystep.errors import CheckpointError, ConfigError
from steadystep.incidents import History, Incidents, RefusedStep, read_bundle, write_bundle
from steadystep.incidents import bundle as bundles
from steadystep.incidents.bundle import environment, git_commit
from steadystep.incidents.incidents import name_of
from steadystep.precision import Precision
from steadystep.records import Diagnosis, Finding, Outcome, Plan, Signals
from steadystep.snapshots.buffers import Buffers

NAN = float("nan")
CPU = torch.device("cpu")


def outcome(step: int, *steps: str, loss: float = NAN, **more: Any) -> Outcome:
    finding = Finding(detector="non-finite", step=step, severity="critical", value=NAN, limit=0.0, what="it is NaN")
    return Outcome(
        step=step,
        reading=loss,
        stepped=not steps,
        plan=Plan(actions=steps, reason="non-finite-loss") if steps else Plan(),
        diagnosis=Diagnosis(cause="non-finite-loss", evidence="the loss is NaN", findings=(finding,)),
        signals=Signals(step=step, loss=loss, grad_norm=loss, names=("a", "b"), norms=(1.0, 2.0)),
        **more,
    )


class Loop:
    """A model with statistics and dropout, one update in."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.closure(torch.randn(8, 4)).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def closure(self, x: Tensor) -> Tensor:
        return self.model(x).square().mean()

    def open(self, incidents: Incidents, step: int = 7, **more: Any) -> RefusedStep:
        return incidents.open(step=step, updates=step - 1, model=self.model, optimizer=self.optimizer, **more)

    def incident(self, incidents: Incidents, step: int = 7, **more: Any) -> Path | None:
        return incidents.report(outcome(step, "skip-step"), self.open(incidents, step, **more))


def test_history_is_a_ring_that_keeps_the_records_themselves() -> None:
    history = History(3)
    assert history.last is None
    seen = [outcome(step) for step in range(5)]
    for one in seen:
        history.note(one)
    assert history.last is seen[-1]
    assert [Outcome.from_json(line).step for line in history.lines()] == [2, 3, 4]


def test_old_steps_are_written_without_the_norm_of_every_tensor() -> None:
    history = History()
    for step in range(60):
        history.note(outcome(step))
    lines = [Outcome.from_json(line) for line in history.lines()]
    assert [len(line.signals.norms) for line in lines] == [0] * 10 + [2] * 50
    assert [line.step for line in lines] == list(range(60))
    assert all(line.findings for line in lines)


def test_a_bundle_has_all_it_takes(tmp_path: Path) -> None:
    loop, incidents = Loop(), Incidents(tmp_path / "run", config={"mode": "autopilot"})
    for step in range(6):
        incidents.note(outcome(step))
    x = torch.full((8, 4), NAN)
    done = outcome(7, "rollback", "cut-lr", restored=5)
    rng = RngState(CPU)
    path = incidents.report(done, loop.open(incidents, work=loop.closure, batch=(x, {"n": 3}), rng=rng))
    assert path == tmp_path / "run" / "incident-000007-rollback"
    kept = read_bundle(path)
    record = kept.record
    assert (record["step"], record["updates"], record["why"]) == (7, 6, "non-finite-loss")
    assert record["what"] == "the loss is NaN"
    assert record["did"] == "rollback, cut-lr, the weights contain 5 updates"
    assert record["config"] == {"mode": "autopilot"}
    assert record["environment"]["torch"] == torch.__version__
    assert record["kept"] == {"state": "kept", "batch": "kept"}
    assert Outcome.from_json(json.dumps(record["outcome"])).plan == done.plan
    assert torch.equal(kept.batch[0], x) or bool(kept.batch[0].isnan().all())
    assert kept.batch[1] == {"n": 3}
    assert kept.state is not None
    for name, value in loop.model.state_dict().items():
        assert torch.equal({**kept.state["parameters"], **kept.state["buffers"]}[name], value)
    moments = loop.optimizer.state_dict()["state"][0]["exp_avg"]
    assert torch.equal(kept.state["optimizer"]["state"][0]["exp_avg"], moments)
    assert torch.equal(kept.state["random"]["host"], torch.get_rng_state())
    steps = [Outcome.from_json(line).step for line in (path / "history.jsonl").read_text().splitlines()]
    assert steps == [0, 1, 2, 3, 4, 5, 7]
    assert not list((tmp_path / "run").glob(".*"))


def test_the_origin_is_found_with_the_random_numbers_of_the_step(tmp_path: Path) -> None:
    loop, incidents = Loop(), Incidents(tmp_path)
    rng = RngState(CPU)
    x = torch.randn(8, 4)
    rng = RngState(CPU)
    seen = loop.closure(x).item()
    after = torch.get_rng_state()
    case = loop.open(incidents, work=loop.closure, batch=x, rng=rng)
    assert case.examination.loss == seen
    assert torch.equal(torch.get_rng_state(), after)
    assert loop.open(incidents, work=loop.closure, batch=x / 0).examination.origin.phase == "input"


def test_buffers_are_those_from_before_the_forward_pass(tmp_path: Path) -> None:
    loop, incidents = Loop(), Incidents(tmp_path)
    buffers = Buffers(loop.model)
    buffers.remember()
    before = loop.model[1].running_mean.clone()
    x = torch.full((8, 4), NAN)
    loop.closure(x)
    assert bool(loop.model[1].running_mean.isnan().all())
    path = loop.incident(incidents, work=loop.closure, batch=x, buffers=buffers)
    assert path is not None
    assert torch.equal(read_bundle(path).state["buffers"]["1.running_mean"], before)
    assert bool(loop.model[1].running_mean.isnan().all()), "what is done about it is not decided here"
    assert read_bundle(path).record["origin"]["culprit"] == "input"


def test_autocast_and_scale_are_those_of_the_step(tmp_path: Path) -> None:
    loop, incidents = Loop(), Incidents(tmp_path)
    seen = []

    def work(x: Tensor) -> Tensor:
        seen.append(loop.model[0](x).dtype)
        return loop.closure(x).float()

    case = loop.open(incidents, work=work, batch=torch.randn(8, 4), precision=Precision("fp16"), scale=2.0**40)
    assert seen == [torch.float16]
    assert case.precision == "fp16"
    assert case.examination.origin.phase == "backward"
    assert loop.open(incidents, precision=Precision("fp16", autocast=False)).precision == "fp32"


def test_what_cannot_be_run_again_is_said(tmp_path: Path) -> None:
    loop, incidents = Loop(), Incidents(tmp_path)
    assert "cannot be re-run" in loop.open(incidents).examination.origin.what

    def work() -> Tensor:
        raise KeyError("the file is gone")

    found = loop.open(incidents, work=work).examination.origin
    assert "KeyError: 'the file is gone'" in found.what
    assert not found.reproduces
    with torch.no_grad():
        loop.model[0].weight[0, 0] = NAN
    assert loop.open(incidents).examination.origin.tensor == "0.weight"


@pytest.mark.parametrize(
    ("steps", "name"),
    [
        (("skip-step",), "incident-000600-skip"),
        (("rollback", "cut-lr"), "incident-000600-rollback"),
        (("skip-step", "stop"), "incident-000600-halt"),
        (("leave-out",), "incident-000600-leave-out"),
    ],
)
def test_names(steps: tuple[str, ...], name: str) -> None:
    assert name_of(outcome(600, *steps)) == name
    assert Incidents.concerns(Plan(actions=steps))


def test_routine_is_no_incident() -> None:
    assert not Incidents.concerns(Plan())
    assert not Incidents.concerns(Plan(actions=("back-off-scale",)))
    assert not Incidents.concerns(Plan(actions=("rescale",)))


def test_the_same_step_twice_gets_two_names(tmp_path: Path) -> None:
    loop, incidents = Loop(), Incidents(tmp_path)
    assert [loop.incident(incidents).name for _ in range(3)] == [
        "incident-000007-skip",
        "incident-000007-skip-2",
        "incident-000007-skip-3",
    ]


def test_the_first_and_the_newest_are_kept(tmp_path: Path) -> None:
    loop, incidents = Loop(), Incidents(tmp_path, max_bundles=4)
    for step in range(1, 9):
        loop.incident(incidents, step)
    assert [p.name[9:15] for p in bundles.bundles_in(tmp_path)] == ["000001", "000002", "000007", "000008"]


def test_bytes_are_bounded(tmp_path: Path) -> None:
    loop = Loop()
    one = bundles.folder_bytes(loop.incident(Incidents(tmp_path / "one")))
    incidents = Incidents(tmp_path, max_bytes=3 * one + 100, max_bundles=4, history=1)
    for step in range(1, 5):
        loop.incident(incidents, step)
    assert [p.name[9:15] for p in bundles.bundles_in(tmp_path)] == ["000001", "000002", "000004"]
    small = Incidents(tmp_path / "small", max_bytes=300)
    path = loop.incident(small)
    assert "without the optimizer: 0.0 MB, more than the remaining" in read_bundle(path).record["kept"]["state"]
    assert read_bundle(path).state["optimizer"] is None
    path = loop.incident(Incidents(tmp_path / "tiny", max_bytes=10))
    assert read_bundle(path).state is None
    assert "omitted" in read_bundle(path).record["kept"]["state"]


def test_a_batch_that_is_too_large_or_strange_is_left_out_with_a_note(tmp_path: Path) -> None:
    loop = Loop()
    path = loop.incident(Incidents(tmp_path, max_batch_bytes=100), batch=torch.zeros(1000))
    assert "0.0 MB" in read_bundle(path).record["kept"]["batch"]
    assert not read_bundle(path).has_batch
    path = loop.incident(Incidents(tmp_path), batch={"lock": threading.Lock()})
    assert "lock" in read_bundle(path).record["kept"]["batch"]
    path = loop.incident(Incidents(tmp_path))
    assert "not passed" in read_bundle(path).record["kept"]["batch"]


def test_a_full_disk_is_said_once_and_training_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loop, incidents = Loop(), Incidents(tmp_path)

    def full(*_: Any, **__: Any) -> Path:
        raise CheckpointError("could not be written") from OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(bundles, "write_checkpoint", full)
        with pytest.warns(UserWarning, match="could not be written to .*training continues"):
            case = loop.open(incidents, work=loop.closure, batch=torch.full((8, 4), NAN))
        assert case.examination.origin.phase == "input", "the origin is known all the same"
        assert incidents.report(outcome(7, "skip-step"), case) is None
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert loop.incident(incidents) is None
    assert list(tmp_path.iterdir()) == []
    assert loop.incident(incidents) is not None
    with monkeypatch.context() as patch:
        patch.setattr(bundles, "write_checkpoint", full)
        with pytest.warns(UserWarning, match="training continues"):
            assert loop.incident(incidents) is None


def test_the_disk_fills_up_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loop, incidents = Loop(), Incidents(tmp_path)
    case = loop.open(incidents)

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.warns(UserWarning, match="No space left"):
        assert incidents.report(outcome(7, "skip-step"), case) is None
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("")
    with pytest.warns(UserWarning, match="training continues"):
        assert Loop().incident(Incidents(tmp_path / "run")) is None


def test_leftovers_of_a_killed_process_are_removed(tmp_path: Path) -> None:
    Loop().open(Incidents(tmp_path))
    assert [p.name for p in tmp_path.iterdir()] == [f".incident-000007-{os.getpid()}"]
    Incidents(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_write_bundle_at_once(tmp_path: Path) -> None:
    path = write_bundle(tmp_path, name="incident-000001-skip", step=1, updates=1, record={"what": "x"}, batch=[1])
    assert read_bundle(path).batch == [1]
    assert read_bundle(path).state is None
    with pytest.raises(TypeError):
        write_bundle(tmp_path, name="incident-000002-skip", step=2, updates=1, record={"what": object()})
    assert [p.name for p in tmp_path.iterdir()] == ["incident-000001-skip"]


def test_reading_what_is_no_bundle(tmp_path: Path) -> None:
    loop = Loop()
    path = loop.incident(Incidents(tmp_path))
    with pytest.raises(ConfigError, match="such as incident-000007-skip"):
        read_bundle(tmp_path)
    with pytest.raises(ConfigError, match="nowhere: no such file or directory"):
        read_bundle(tmp_path / "nowhere")
    tensors = path / "state" / "tensors.safetensors"
    data = bytearray(tensors.read_bytes())
    data[-1] ^= 1
    tensors.write_bytes(data)
    with pytest.raises(CheckpointError, match="damaged"):
        read_bundle(path)
    for text in ("{", "[]", '{"format": 99}'):
        (path / "incident.json").write_text(text)
        with pytest.raises(ConfigError):
            read_bundle(path)


def test_the_git_commit_is_read_from_files(tmp_path: Path) -> None:
    inner = tmp_path / "a" / "b"
    inner.mkdir(parents=True)
    commit = "0123456789" * 4
    git = tmp_path / ".git"
    git.mkdir()
    (git / "HEAD").write_text(commit + "\n")
    assert git_commit(inner) == commit
    (git / "HEAD").write_text("ref: refs/heads/main\n")
    assert git_commit(inner) is None
    (git / "packed-refs").write_text(f"# pack\n{'f' * 40} refs/heads/mainline\n{commit} refs/heads/main\n")
    assert git_commit(inner) == commit
    (git / "refs" / "heads").mkdir(parents=True)
    (git / "refs" / "heads" / "main").write_text("e" * 40 + "\n")
    assert git_commit(inner) == "e" * 40
    assert environment(inner)["git"] == "e" * 40


def test_the_outcome_is_in_the_history_once(tmp_path: Path) -> None:
    loop, incidents = Loop(), Incidents(tmp_path)
    done = outcome(7, "skip-step")
    incidents.note(done)
    path = incidents.report(done, loop.open(incidents))
    assert len((path / "history.jsonl").read_text().splitlines()) == 1
    assert len(incidents.history) == 1
    incidents.report(replace(done, step=8), loop.open(incidents, 8))
    assert len(incidents.history) == 2
