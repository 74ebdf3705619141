"""Two processes on one run folder: the second one is told; what a dead one left behind is not in the way."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import steadystep
from steadystep.checkpoints import run_lock
from steadystep.checkpoints.run_lock import FILE, Owner, RunLock
from steadystep.cli.app import app

# Importing torch takes most of the time of a test: the other process is only the lock, which is all that it shows.
OTHER = """
import importlib.util, pathlib, sys
spec = importlib.util.spec_from_file_location("run_lock", sys.argv[2])
module = sys.modules["run_lock"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
lock = module.RunLock(pathlib.Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def other(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that holds the folder until it is told or killed."""
    process = subprocess.Popen(
        [sys.executable, "-c", OTHER, str(tmp_path), run_lock.__file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.communicate()


def guard(folder: Path, **settings: object) -> steadystep.Guard:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return steadystep.Guard.resume(model, optimizer, run_dir=folder, config={"monitoring": {"sinks": []}}, **settings)


def test_the_second_process_is_told_who_is_there_unless_it_insists(
    tmp_path: Path, other: subprocess.Popen[str]
) -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    said = rf"in use by process {other.pid} on .*force=True"
    with pytest.raises(steadystep.MisuseError, match=said):
        steadystep.Guard(model, optimizer, run_dir=tmp_path)
    with pytest.raises(steadystep.MisuseError, match=said):
        guard(tmp_path)
    (tmp_path / "run.yaml").write_text("task: regression\ntraining: {total_steps: 3}\nmonitoring: {sinks: []}\n")
    told = ["train", str(tmp_path / "run.yaml"), "--run-dir", str(tmp_path)]
    assert isinstance(CliRunner().invoke(app, told).exception, steadystep.MisuseError)
    assert CliRunner().invoke(app, [*told, "--force"]).exit_code == 0
    shutil.rmtree(tmp_path / "checkpoints")  # of another model
    guard(tmp_path, force=True).close()
    steadystep.watch(model, optimizer, run_dir=tmp_path).remove()  # it writes nothing that could be written over
    with pytest.raises(steadystep.MisuseError, match=said):  # who insisted has not taken it away
        guard(tmp_path)


def test_a_process_that_was_killed_leaves_nothing_in_the_way(tmp_path: Path, other: subprocess.Popen[str]) -> None:
    other.send_signal(signal.SIGKILL)
    other.wait()
    assert json.loads((tmp_path / FILE).read_text())["pid"] == other.pid
    guard(tmp_path).close()
    assert not (tmp_path / FILE).exists()


def test_one_that_has_ended_and_was_not_waited_for_is_dead(tmp_path: Path, other: subprocess.Popen[str]) -> None:
    os.kill(other.pid, signal.SIGKILL)
    while run_lock.is_running(other.pid):
        pass
    assert Path(f"/proc/{other.pid}").exists()
    guard(tmp_path).close()


def test_guards_of_one_process_share_a_folder_until_the_last_one_lets_go(tmp_path: Path) -> None:
    first, second = guard(tmp_path), guard(tmp_path)
    first.close()
    assert Owner(**json.loads((tmp_path / FILE).read_text())).is_alive
    second.close()
    second.close()
    assert not (tmp_path / FILE).exists()
    third = guard(tmp_path)
    third._end(save=False)
    del third


@pytest.mark.parametrize("locks", [True, None])
def test_where_the_system_has_no_locks_number_start_and_machine_tell(
    tmp_path: Path, other: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch, locks: bool | None
) -> None:
    """As on some network file systems, which cannot be had here."""
    monkeypatch.setattr(run_lock, "_lock", lambda file: locks)
    with pytest.raises(steadystep.MisuseError, match=f"process {other.pid}"):
        RunLock(tmp_path)
    known = json.loads((tmp_path / FILE).read_text())
    (tmp_path / FILE).write_text(json.dumps({**known, "started": "another time"}))
    RunLock(tmp_path).release()
    (tmp_path / FILE).write_text(json.dumps({**known, "host": "elsewhere"}))
    if locks is None:
        with pytest.raises(steadystep.MisuseError, match="on elsewhere"):
            RunLock(tmp_path)
        RunLock(tmp_path, force=True).release()
    else:  # nobody holds the lock that they would hold
        RunLock(tmp_path).release()
    for text in ("", "{", "[]", '{"pid": "x"}', '{"pid": 1}'):
        (tmp_path / FILE).write_text(text)
        RunLock(tmp_path).release()


def test_a_folder_that_cannot_be_written_needs_no_lock(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    RunLock(tmp_path / "file").release()
    (tmp_path / FILE).mkdir()
    RunLock(tmp_path).release()


def test_links_that_lead_in_a_circle_are_no_folder(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to(tmp_path / "b")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    model = nn.Linear(1, 1)
    with pytest.raises(steadystep.ConfigError, match="cannot be written"):
        steadystep.Guard(model, torch.optim.SGD(model.parameters(), lr=0.1), run_dir=tmp_path / "a")


def test_a_process_that_was_forked_off_holds_nothing(tmp_path: Path) -> None:
    lock = RunLock(tmp_path)
    child = os.fork()
    if child == 0:
        lock.release()
        os._exit(0)
    os.waitpid(child, 0)
    assert (tmp_path / FILE).exists()
    lock.release()
    assert not (tmp_path / FILE).exists()


@pytest.mark.skipif(run_lock.fcntl is None, reason="the system has no such locks")
def test_the_system_gives_a_lock_to_one_process(tmp_path: Path, other: subprocess.Popen[str]) -> None:
    free = os.open(tmp_path / "free", os.O_RDWR | os.O_CREAT)
    held = os.open(tmp_path / FILE, os.O_RDWR)
    try:
        assert run_lock._lock(free) is True
        assert run_lock._lock(held) is False
    finally:
        os.close(free)
        os.close(held)
    assert run_lock._lock(free) is None  # closed: there is none to give
