"""A folder of checkpoints: there is always one to go on from."""

import json
import os
import random
import shutil
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from steadystep.checkpoints import atomic_io
from steadystep.checkpoints.checkpointing import store_at
from steadystep.checkpoints.shared_store import SharedCheckpointStore
from steadystep.checkpoints.store import CheckpointStore
from steadystep.errors import CheckpointError, ConfigError
from steadystep.parallel import SingleProcess


def state(number: int) -> dict[str, Any]:
    return {"w": torch.full((40,), float(number)), "number": number}


def filled(
    folder: Path, steps: list[int], *, scores: dict[int, float] | None = None, **settings: Any
) -> CheckpointStore:
    store = CheckpointStore(folder, **settings)
    for step in steps:
        store.put(state(step), step=step, updates=step, score=(scores or {}).get(step))
    return store


def spoil(path: Path, name: str = "tensors.safetensors") -> None:
    raw = bytearray((path / name).read_bytes())
    raw[-1] ^= 1
    (path / name).write_bytes(raw)


def hidden_in(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if path.name.startswith(".")]


def test_an_empty_shelf(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "run" / "checkpoints")
    assert (store.steps(), store.newest(), store.best()) == ([], None, None)
    shutil.rmtree(tmp_path / "run")
    assert (store.steps(), store.newest()) == ([], None)


def test_the_last_ones_stay(tmp_path: Path) -> None:
    store = filled(tmp_path, [10, 20, 30, 40, 50])
    assert store.steps() == [30, 40, 50]
    newest = store.newest()
    assert newest is not None
    assert (newest.step, newest.state["number"]) == (50, 50)
    assert store.best() is None
    assert filled(tmp_path, [60], keep_last=1).steps() == [60]
    assert hidden_in(tmp_path) == []


def test_the_best_stays_too(tmp_path: Path) -> None:
    scores = {10: float("nan"), 20: 1.0, 30: 1.0, 40: 3.0, 50: 2.0, 60: 5.0}
    store = filled(tmp_path / "a", list(scores), scores=scores, keep_last=2)
    assert store.steps() == [30, 50, 60]
    best = store.best()
    assert best is not None
    assert best.step == 30
    assert filled(tmp_path / "b", list(scores), scores=scores, keep_last=2, keep_best=False).steps() == [50, 60]
    store.put(state(70), step=70, updates=70, score=0.5)
    assert store.steps() == [60, 70]


def test_a_damaged_one_is_named_and_the_one_before_is_used(tmp_path: Path) -> None:
    store = filled(tmp_path, [10, 20, 30], scores={10: 2.0, 20: 3.0, 30: 1.0})
    spoil(tmp_path / "step-00000030")
    (tmp_path / "step-00000020" / "manifest.json").unlink()
    with pytest.warns(
        UserWarning, match=r"step-00000030/tensors\S+ is damaged.*20 has no manifest.*using .*10 instead"
    ) as seen:
        newest = store.newest()
    assert len(seen) == 1
    assert newest is not None
    assert newest.step == 10
    with pytest.warns(UserWarning, match=r"30/tensors.safetensors is damaged.*using .*10 instead"):
        assert store.best().step == 10  # type: ignore[union-attr]
    spoil(tmp_path / "step-00000010", "state.json")
    with pytest.warns(UserWarning, match="no intact checkpoint is left"):
        assert store.newest() is None


def test_one_that_was_tidied_away_while_it_was_looked_for_is_no_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, writing = filled(tmp_path, [3], keep_last=1), CheckpointStore(tmp_path, keep_last=1)
    lists = iter([[3], [6]])

    def listed() -> list[int]:
        steps = next(lists)
        if steps == [3]:
            writing.put(state(6), step=6, updates=6)
        return steps

    monkeypatch.setattr(store, "steps", listed)
    found = store.newest()
    assert found is not None
    assert found.step == 6


def test_what_looks_damaged_does_not_take_the_place_of_a_whole_one(tmp_path: Path) -> None:
    store = filled(tmp_path, [10, 20, 30])
    (tmp_path / "step-00000020" / "state.json").write_text("{")
    (tmp_path / "step-00000030" / "state.json").unlink()
    store.put(state(40), step=40, updates=40)
    assert store.steps() == [10, 40]


def test_the_one_just_written_and_later_ones_are_never_removed(tmp_path: Path) -> None:
    store = filled(tmp_path, [10, 20, 30])
    assert store.put(state(5), step=5, updates=5).exists()
    assert store.steps() == [5, 10, 20, 30]
    filled(tmp_path, [15], keep_last=1)
    assert store.steps() == [15, 20, 30]


def test_the_same_step_again_replaces(tmp_path: Path) -> None:
    store = filled(tmp_path, [10])
    store.put(state(11), step=10, updates=10)
    assert store.newest().state["number"] == 11  # type: ignore[union-attr]
    assert hidden_in(tmp_path) == []


def test_one_that_cannot_be_removed_is_said_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = filled(tmp_path, [10], keep_last=1)

    def refuse(path: Path) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("steadystep.checkpoints.store.remove", refuse)
    with pytest.warns(UserWarning, match=r"10 is outdated and cannot be removed \(Permission denied\)"):
        store.put(state(20), step=20, updates=20)
    store.put(state(30), step=30, updates=30)  # a second warning would be an error
    assert store.steps() == [10, 20, 30]


def test_settings_that_make_no_sense(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="keep_last = 0"):
        CheckpointStore(tmp_path, keep_last=0)
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot store checkpoints there"):
        CheckpointStore(tmp_path / "file")
    assert CheckpointStore(tmp_path).steps() == []


def leftover(folder: Path, part: str, *, host: str, pid: int, birth: str, age_s: float = 0.0) -> Path:
    path = folder / f".step-00000010.{host}-{pid}-{birth}-0.{part}"
    (path / "inside").mkdir(parents=True)
    os.utime(path, (path.stat().st_mtime - age_s,) * 2)
    return path


def test_leftovers_of_the_dead_are_removed_and_those_of_the_living_stay(tmp_path: Path) -> None:
    filled(tmp_path, [10])
    done = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True)
    here, me, dead = atomic_io._HOST, os.getpid(), int(done.stdout)
    removed = [
        leftover(tmp_path, "new", host=here, pid=dead, birth="00000000"),
        leftover(tmp_path, "old", host=here, pid=dead, birth="00000000"),
        leftover(tmp_path, "gone", host=here, pid=dead, birth="00000000"),
        leftover(tmp_path, "new", host=here, pid=me, birth="00000001"),  # a container: the same number, another life
        leftover(tmp_path, "new", host="elsewhere", pid=dead, birth="00000000", age_s=90_000),
    ]
    stay = [
        leftover(tmp_path, "new", host=here, pid=me, birth=atomic_io._BIRTH),
        leftover(tmp_path, "new", host=here, pid=os.getppid(), birth="00000000"),
        leftover(tmp_path, "gone", host="elsewhere", pid=dead, birth="00000000"),
    ]
    (tmp_path / ".notes").mkdir()
    CheckpointStore(tmp_path)
    assert [path for path in removed if path.exists()] == []
    assert [path for path in stay if not path.exists()] == []
    assert (tmp_path / ".notes").exists()


KILLED = """
import json, os, shutil, signal, sys, warnings
from pathlib import Path
import torch
from steadystep.checkpoints import CheckpointStore, atomic_io, read_checkpoint
warnings.simplefilter("error")
torch.set_num_threads(1)
atomic_io._PIECE = 2048
CALLS = {"open", "write", "flush", "fsync", "mkdir", "rename", "unlink", "rmdir"}

def state(number):
    return {"w": torch.full((1000,), float(number)), "number": number}

def killed_at(moment, folder, step):
    child = os.fork()
    if child == 0:
        seen = 0
        def watch(frame, event, called):
            nonlocal seen
            if event == "c_call" and called.__name__ in CALLS:
                seen += 1
                if seen == moment:
                    os.kill(os.getpid(), signal.SIGKILL)
        shelf = CheckpointStore(folder, keep_last=1)
        sys.setprofile(watch)
        shelf.put(state(2), step=step, updates=2)
        sys.setprofile(None)
        os._exit(0)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])

root = Path(sys.argv[1])
CheckpointStore(root / "template").put(state(1), step=1, updates=1)
found = {}
for step in (1, 2):
    moment, found[step] = 0, []
    alive = True
    while alive:
        moment += 1
        folder = Path(shutil.copytree(root / "template", root / f"{step}-{moment}"))
        alive = killed_at(moment, folder, step)
        shelf = CheckpointStore(folder)
        newest = shelf.newest()
        assert newest is not None, (step, moment)
        assert newest.state["w"].tolist() == [float(newest.state["number"])] * 1000
        assert newest.updates == newest.state["number"]
        assert [p.name for p in folder.iterdir() if p.name.startswith(".")] == [], (step, moment)
        for left in shelf.steps():
            read_checkpoint(folder / f"step-{left:08d}")
        found[step].append(newest.updates)
        shutil.rmtree(folder)
print(json.dumps(found))
"""


def test_killed_at_any_moment_the_previous_or_the_new_one_is_there(tmp_path: Path) -> None:
    """SIGKILL before every call that touches the disk, for a new step (2) and for a step written again (1)."""
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for updates in json.loads(done.stdout).values():
        assert len(updates) > 15
        assert updates == sorted(updates)  # up to some moment the old one, from then on the new one
        assert set(updates) == {1, 2}


def test_a_hundred_random_damages_are_never_loaded_silently(tmp_path: Path) -> None:
    chance = random.Random(5)
    store = filled(tmp_path, [1, 2])
    newest = tmp_path / "step-00000002"
    whole = {path.name: path.read_bytes() for path in newest.iterdir()}
    for _ in range(100):
        name = chance.choice(sorted(whole))
        raw = bytearray(whole[name])
        match chance.choice(["flip", "cut", "remove"]):
            case "flip":
                raw[chance.randrange(len(raw))] ^= 1 << chance.randrange(8)
                (newest / name).write_bytes(raw)
            case "cut":
                (newest / name).write_bytes(raw[: chance.randrange(len(raw))])
            case _:
                (newest / name).unlink()
        with pytest.warns(UserWarning, match="using .*step-00000001 instead"):
            back = store.newest()
        assert back is not None
        assert back.state["number"] == 1
        (newest / name).write_bytes(whole[name])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert store.newest().step == 2  # type: ignore[union-attr]


def test_a_failed_put_keeps_what_was_there(tmp_path: Path) -> None:
    store = filled(tmp_path, [1], keep_last=1)
    with pytest.raises(CheckpointError):
        store.put({"a": object()}, step=2, updates=2)
    assert store.steps() == [1]


def test_one_process_or_all_ranks_keep_three_unless_told(tmp_path: Path) -> None:
    several: Any = SimpleNamespace(rank=0, size=2, texts=lambda text: [text, text])
    for ranks, kind in ((SingleProcess(), CheckpointStore), (several, SharedCheckpointStore)):
        for settings, kept in (({}, 3), ({"keep_last": 1}, 1)):
            store: Any = store_at(tmp_path, ranks, **settings)
            assert type(store) is kind
            assert store.folder == tmp_path
            assert (store if kind is CheckpointStore else store._store)._keep_last == kept
