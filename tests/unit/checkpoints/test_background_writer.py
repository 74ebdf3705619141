"""Writing behind the loop's back: it waits for a copy, hears of a failure once, and loses nothing at the end."""

import errno
import os
import resource
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from steadystep.checkpoints.store import BackgroundWriter, CheckpointStore
from steadystep.errors import CheckpointError, MisuseError


class Held:
    """A disk that waits until it is let go."""

    def __init__(self, store: CheckpointStore, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self.go = threading.Event(), threading.Event()
        self._put = store.put
        monkeypatch.setattr(store, "put", self._wait)

    def _wait(self, state: Any, **details: Any) -> Path:
        self.begun.set()
        assert self.go.wait(20)
        return self._put(state, **details)


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path / "checkpoints")


def test_the_state_is_that_of_the_moment_of_saving(store: CheckpointStore, monkeypatch: pytest.MonkeyPatch) -> None:
    held, writer = Held(store, monkeypatch), BackgroundWriter(store)
    weight = torch.nn.Parameter(torch.ones(3, 4))
    live = {"w": weight, "t": weight.t()[1:], "a": np.zeros(3), "list": [1, [2]], "z": torch.ones(2) * 1j}
    assert writer.save(live, step=7, updates=6, score=0.25)
    assert held.begun.wait(60)
    with torch.no_grad():
        weight.fill_(9)
    live["a"][:] = 9
    live["list"][1].append(9)
    live["z"].zero_()
    held.go.set()
    writer.flush()
    back = store.newest()
    assert back is not None
    assert (back.step, back.updates, back.score) == (7, 6, 0.25)
    assert torch.equal(back.state["w"], torch.ones(3, 4))
    assert torch.equal(back.state["t"], torch.ones(3, 3))
    assert back.state["a"].tolist() == [0, 0, 0]
    assert back.state["list"] == [1, [2]]
    assert torch.equal(back.state["z"], torch.ones(2) * 1j)


def test_another_writer_of_the_folder_begins_when_the_first_one_is_through(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    held, writer = Held(store, monkeypatch), BackgroundWriter(store)
    assert writer.save({"n": 1}, step=1, updates=1)
    assert held.begun.wait(60)
    letting_go = threading.Timer(0.05, held.go.set)
    letting_go.start()
    BackgroundWriter(CheckpointStore(store.folder))
    assert store.steps() == [1]
    letting_go.join()


def test_while_one_is_written_the_next_is_refused_or_waits(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    held, writer = Held(store, monkeypatch), BackgroundWriter(store)
    assert writer.save({"n": 1}, step=1, updates=1)
    assert held.begun.wait(60)
    assert writer.busy
    assert not writer.save({"n": 2}, step=2, updates=2)
    letting_go = threading.Timer(0.05, held.go.set)
    letting_go.start()
    assert writer.save({"n": 3}, step=3, updates=3, wait=True)
    assert 1 in store.steps()
    letting_go.join()
    writer.flush()
    assert not writer.busy
    assert store.steps() == [1, 3]


def test_buffers_are_used_again_and_follow_the_state(store: CheckpointStore) -> None:
    writer = BackgroundWriter(store)
    with torch.inference_mode():
        writer.save({"w": torch.ones(4), "v": torch.ones(2), "old": torch.ones(1)}, step=1, updates=1)
    writer.flush()
    before = {name: buffer.data_ptr() for name, buffer in writer._buffers.items()}
    writer.save({"w": torch.zeros(4), "v": torch.zeros(3), "new": torch.zeros(1)}, step=2, updates=2)
    writer.flush()
    assert writer._buffers["w"].data_ptr() == before["w"]
    assert sorted(writer._buffers) == ["new", "v", "w"]
    back = store.newest()
    assert back is not None
    assert {name: value.tolist() for name, value in back.state.items()} == {"w": [0] * 4, "v": [0] * 3, "new": [0]}
    writer.close()
    assert writer._buffers == {}


def test_tensors_of_every_kind(store: CheckpointStore) -> None:
    writer = BackgroundWriter(store)
    dtypes = (torch.bfloat16, torch.bool, torch.uint64, torch.float8_e4m3fn, torch.complex128, torch.int8)
    state = {str(dtype): torch.tensor([[0, 1], [1, 1]]).to(dtype).t() for dtype in dtypes}
    state |= {"empty": torch.empty(0, 3), "scalar": torch.tensor(7)}
    writer.save(state, step=1, updates=1)
    writer.flush()
    back = store.newest()
    assert back is not None
    for name, tensor in state.items():
        assert back.state[name].dtype is tensor.dtype
        assert torch.equal(back.state[name].to(torch.complex64), tensor.to(torch.complex64))


def test_nothing_but_the_copy_happens_in_the_callers_thread(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = []
    put = store.put
    monkeypatch.setattr(store, "put", lambda *a, **k: (threads.append(threading.current_thread()), put(*a, **k)))
    writer = BackgroundWriter(store)
    writer.save({}, step=1, updates=1)
    writer.flush()
    assert threads[0] is not threading.current_thread()
    assert threads[0].daemon
    assert not threads[0].is_alive()


@contextmanager
def no_file_over(size: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_failure_is_said_once_and_so_is_its_end(store: CheckpointStore) -> None:
    writer = BackgroundWriter(store)
    large = {"w": torch.ones(400_000)}
    writer.save(large, step=1, updates=1)
    writer.flush()
    with no_file_over(1_000_000):
        writer.save(large, step=2, updates=2)
        with pytest.warns(
            UserWarning, match=r"step-00000002 could not be written \(File too large\).*training continues"
        ):
            writer.flush()
        assert writer.save(large, step=3, updates=3)
        writer.flush()  # a second warning would be an error
    assert store.steps() == [1]
    assert [p.name for p in store.folder.iterdir()] == ["step-00000001"]
    writer.save(large, step=4, updates=4)
    with pytest.warns(UserWarning, match="checkpoints are being written to .*checkpoints again"):
        writer.flush()
    writer.save(large, step=5, updates=5)
    writer.close()
    assert store.steps() == [1, 4, 5]


def test_the_next_save_tells_and_goes_on(store: CheckpointStore) -> None:
    writer = BackgroundWriter(store)
    shutil.rmtree(store.folder)
    store.folder.write_text("a file where a folder should be")
    writer.save({}, step=1, updates=1)
    with pytest.warns(UserWarning, match="could not be written") as seen:
        assert writer.save({}, step=2, updates=2, wait=True)
    assert seen[0].filename == __file__
    writer.flush()
    store.folder.unlink()
    store.folder.mkdir()
    writer.save({}, step=3, updates=3)
    with pytest.warns(UserWarning, match="again"):
        writer.flush()


def test_whatever_goes_wrong_in_the_thread_is_a_failure(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def explode(state: Any, **details: Any) -> Path:
        raise MemoryError("no room")

    monkeypatch.setattr(store, "put", explode)
    writer = BackgroundWriter(store)
    writer.save({}, step=1, updates=1)
    writer._thread.join()  # type: ignore[union-attr]
    with pytest.warns(UserWarning, match=r"the checkpoint of step 1 failed: MemoryError\('no room'\)"):
        writer.report()
    writer.report()


def test_a_full_disk(store: CheckpointStore, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = BackgroundWriter(store)

    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    writer.save({"n": 1}, step=1, updates=1)
    writer.flush()
    monkeypatch.setattr(os, "fsync", full)
    writer.save({"n": 2}, step=1, updates=2)
    with pytest.warns(UserWarning, match="No space left on device"):
        writer.flush()
    assert store.newest().state["n"] == 1  # type: ignore[union-attr]


def test_a_state_without_form_is_an_error_at_first_and_a_failure_later(store: CheckpointStore) -> None:
    writer = BackgroundWriter(store)
    with pytest.raises(CheckpointError, match=r"^a is a object"):
        writer.save({"a": object()}, step=1, updates=1)
    assert writer.save({"a": 1}, step=1, updates=1)
    writer.flush()
    with pytest.warns(UserWarning, match="checkpoint of step 2 cannot be written: a is a object"):
        assert not writer.save({"a": object()}, step=2, updates=2)
    assert store.steps() == [1]


def test_after_close_there_is_no_saving(store: CheckpointStore) -> None:
    writer = BackgroundWriter(store)
    writer.close()
    writer.close()
    with pytest.raises(MisuseError, match="after close"):
        writer.save({}, step=1, updates=1)


END = """
import os, signal, sys, threading, time
from pathlib import Path
import torch
from steadystep.checkpoints import BackgroundWriter, CheckpointStore, store as store_module

def begin(how, folder):
    shelf = CheckpointStore(folder)
    put = shelf.put
    def slow(state, **details):
        time.sleep(0.3) if how == "slow" else threading.Event().wait()
        return put(state, **details)
    shelf.put = slow
    store_module._PATIENCE_S = 60.0 if how == "slow" else 0.1
    BackgroundWriter(shelf).save({"w": torch.ones(3)}, step=1, updates=1)

for how in ("slow", "hangs"):
    child = os.fork()
    if child == 0:
        signal.alarm(50)  # a child that stays must not stay for ever
        begin(how, Path(sys.argv[1]) / how)
        sys.exit(3)  # the way every program ends
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
"""


def test_at_the_end_of_the_program_a_write_is_completed_unless_it_hangs(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", END, str(tmp_path)], check=True, timeout=120)
    assert CheckpointStore(tmp_path / "slow").steps() == [1]
    assert CheckpointStore(tmp_path / "hangs").steps() == []
