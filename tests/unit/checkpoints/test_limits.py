"""Limits of files, folders and states, from both sides, and what stands in messages."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch._dynamo  # every optimizer imports it: here, so that it is not walked as garbage after each test
from torch import nn

from steadystep._utils.rng import all_random_state
from steadystep.checkpoints import atomic_io, run_lock, shared_store
from steadystep.checkpoints.checkpoint import Manifest, read_checkpoint, read_manifest, write_checkpoint
from steadystep.checkpoints.checkpointing import Checkpointing, Every
from steadystep.checkpoints.data_position import DataPosition
from steadystep.checkpoints.finite import bad_names, load_kept
from steadystep.checkpoints.loop_state import LoopState
from steadystep.checkpoints.packing import Packed, pack, unpack
from steadystep.checkpoints.run_lock import FILE, RunLock
from steadystep.checkpoints.shared_store import SharedCheckpointStore, read_shared
from steadystep.checkpoints.store import BackgroundWriter, CheckpointStore
from steadystep.errors import CheckpointError
from steadystep.parallel import SingleProcess
from steadystep.stats import LARGEST

CPU = torch.device("cpu")

MANIFEST = b"""{
 "format": 1,
 "steadystep": "1.0",
 "torch": "2.9",
 "time": "2026-01-02T03:04:05+00:00",
 "step": 7,
 "updates": 6,
 "score": 0.5,
 "files": {
  "tensors.safetensors": {
   "size": 8,
   "sha256": "aa"
  },
  "state.json": {
   "size": 2,
   "sha256": "bb"
  }
 },
 "checksum": "96f79894b428922bef7b51927163c3b5d848127959caf1dc6ad9f47b3c20e8eb"
}
"""
"""As it was written when the format was made. The checksum is over the text: with another layout all are lost."""


class TestFiles:
    def test_a_manifest_is_read_and_written_as_ever(self, tmp_path: Path) -> None:
        (tmp_path / "manifest.json").write_bytes(MANIFEST)
        (tmp_path / "tensors.safetensors").write_bytes(b"12345678")
        (tmp_path / "state.json").write_bytes(b"{}")
        found = read_manifest(tmp_path)
        assert (found.step, found.updates, found.score, found.time) == (7, 6, 0.5, "2026-01-02T03:04:05+00:00")
        assert (found.steadystep, found.torch) == ("1.0", "2.9")
        assert isinstance(found, Manifest)
        assert found.to_bytes() == MANIFEST

    @pytest.mark.parametrize(("size", "message"), [(1 << 20, "damaged"), ((1 << 20) + 1, "not a steadystep manifest")])
    def test_a_manifest_is_no_larger_than_a_megabyte(self, tmp_path: Path, size: int, message: str) -> None:
        (tmp_path / "manifest.json").write_bytes(b"x" * size)
        with pytest.raises(CheckpointError, match=message):
            read_manifest(tmp_path)

    def test_the_header_of_tensors_is_filled_up_to_eight_bytes_and_no_more(self) -> None:
        for length in range(1, 18):
            head = bytes(next(atomic_io.pieces({"n" * length: torch.ones(1)})))
            assert len(head) % 8 == 0
            assert len(head) - len(head.rstrip(b" ")) < 8

    def test_a_folder_of_shards_is_named_in_the_state(self, tmp_path: Path) -> None:
        path = write_checkpoint(tmp_path, {"a": 1}, step=1, updates=1)
        assert read_checkpoint(path).state == {"a": 1}
        (path / "shards").mkdir()
        assert read_checkpoint(path).state == {"a": 1, "shards": str(path / "shards")}

    def test_who_is_alive_is_not_told_anything(self, tmp_path: Path) -> None:
        with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
            kept = tmp_path / f".a.{atomic_io._HOST}-{other.pid}-00000000-0.new"
            kept.mkdir()
            atomic_io.clear_leftovers(tmp_path)
            assert kept.exists()
            assert other.poll() is None
            other.communicate(b"\n")
        assert other.returncode == 0

    @pytest.mark.parametrize(("age_s", "stays"), [(86_000, True), (86_500, False)])
    def test_what_another_machine_left_stays_for_a_day(self, tmp_path: Path, age_s: int, stays: bool) -> None:
        left = tmp_path / ".a.elsewhere-1-00000000-0.new"
        left.mkdir()
        os.utime(left, (left.stat().st_mtime - age_s,) * 2)
        atomic_io.clear_leftovers(tmp_path)
        assert left.exists() is stays


class TestPacking:
    def test_a_tensor_by_itself_has_a_name(self) -> None:
        packed = pack(torch.ones(2))
        assert list(packed.tensors) == ["state"]
        assert unpack(packed).tolist() == [1.0, 1.0]

    def test_the_third_of_one_name(self) -> None:
        state = {"a": {"b": {"c": torch.ones(1)}, "b.c": torch.ones(2)}, "a.b.c": torch.ones(3)}
        assert list(pack(state).tensors) == ["a.b.c", "a.b.c~2", "a.b.c~3"]

    @pytest.mark.parametrize("wrap", [lambda x: [x], lambda x: (x,), lambda x: {"a": x}, lambda x: {1: x}], ids="ltdk")
    def test_a_hundred_levels_and_not_one_more(self, wrap: Any) -> None:
        state: Any = 1
        for _ in range(100):
            state = wrap(state)
        assert unpack(pack(state)) == state
        with pytest.raises(CheckpointError, match="nested more than 100 levels deep"):
            pack(wrap(state))

    def test_what_a_scalar_or_the_notes_of_a_module_hold_is_a_level_deeper(self) -> None:
        state: Any = np.float32(1)
        for _ in range(99):
            state = [state]
        assert unpack(pack(state)) == state
        with pytest.raises(CheckpointError, match="deep"):
            pack([state])


class TestPlacesInTheData:
    class Loader(list):  # type: ignore[type-arg]
        batch_size = 2

    @pytest.mark.parametrize(
        ("used", "place"), [(0, ""), (3, ", so this epoch continues after 6 batches instead of 3")]
    )
    def test_batches_of_another_size_are_said_with_the_place(self, used: int, place: str) -> None:
        position = DataPosition(CPU)
        loader = self.Loader(range(12))
        loader.batch_size = 4
        source = position.batches(loader, lambda: None)
        for _ in range(used):
            next(source)
            position.is_used = True
        saved = position.saved() if used else {**position.saved(), "batch_size": 4}
        again = DataPosition(CPU)
        again.seek(saved, random=all_random_state(CPU))
        now = self.Loader(range(12))
        with pytest.warns(UserWarning, match="batches of 4") as said:
            left = list(again.batches(now, lambda: None))
        assert len(left) == 12 - 2 * used
        assert str(said[0].message).endswith(f"batches of 2, the checkpoint was written with batches of 4{place}")

    @pytest.mark.parametrize(("size", "marked"), [(1, True), (0, False), (-1, False), (2.0, False), (None, False)])
    def test_a_size_is_a_positive_whole_number(self, size: Any, marked: bool) -> None:
        loader = self.Loader(range(3))
        loader.batch_size = size
        position = DataPosition(CPU)
        next(position.batches(loader, lambda: None))
        assert ("batch_size" in position.saved()) is marked

    def test_a_generator_whose_state_was_not_saved_goes_on(self) -> None:
        loader = self.Loader(range(3))
        source = DataPosition(CPU)
        next(source.batches(loader, lambda: None))
        saved = source.saved()
        assert saved["generator"] is None
        loader.generator = torch.Generator().manual_seed(5)  # type: ignore[attr-defined]
        before = loader.generator.get_state()  # type: ignore[attr-defined]
        again = DataPosition(CPU)
        again.seek(saved | {"batch": 0}, random=all_random_state(CPU))
        assert list(again.batches(loader, lambda: None)) == [0, 1, 2]
        assert torch.equal(loader.generator.get_state(), before)  # type: ignore[attr-defined]


class Kept:
    """Holds the tensors that it was made with, whatever it is given."""

    def __init__(self, **held: Any) -> None:
        self.held = held

    def state_dict(self) -> dict[str, Any]:
        return self.held

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


class TestWhatIsFinite:
    def test_the_largest_number_of_a_training_is_none_too_large(self) -> None:
        held = {"at": torch.tensor([LARGEST]), "above": torch.tensor([LARGEST * 1.001])}
        assert bad_names(held, absurd=True) == ("above",)
        assert bad_names(held) == ()

    def test_another_shape_is_named_with_its_place_and_both_shapes(self) -> None:
        thing = Kept(layers=[{"w": torch.ones(2)}], name="x")
        said = r"'x' was rejected \(layers\[0\].w has shape \[3\] in the checkpoint and \[2\] in this model\)"
        with pytest.raises(CheckpointError, match=said):
            load_kept("x", thing, {"layers": [{"w": torch.ones(3)}]})

    def test_what_it_does_not_hold_itself_is_not_compared(self) -> None:
        load_kept("x", Kept(a=torch.ones(2)), {"b": torch.ones(3), "a": torch.ones(2)})


class Memory:
    def state_dict(self) -> dict[str, Any]:
        return {"format": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


class Odd(torch.optim.Optimizer):
    """Of somebody else; it keeps something that is of no parameter."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state["own"] = state["state"]["own"]


def loop_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> LoopState:
    return LoopState(model, optimizer, Memory(), DataPosition(CPU), device=CPU)


class TestStates:
    def test_random_numbers_that_no_generator_has_are_refused(self) -> None:
        model = nn.Linear(1, 1)
        loop = loop_of(model, torch.optim.SGD(model.parameters(), lr=0.1))
        saved = loop.gather()
        loop.put_back(saved)
        with pytest.raises(CheckpointError, match="random"):
            loop.put_back(saved | {"random": {**saved["random"], "torch": torch.zeros(3)}})
        loop.put_back(saved | {"random": None})

    def test_of_no_parameter(self) -> None:
        model = nn.Linear(1, 1)
        optimizer = Odd(model.parameters())
        optimizer.state["own"] = {"count": torch.tensor(3.0)}  # type: ignore[index]
        loop = loop_of(model, optimizer)
        saved = loop.gather()
        optimizer.state["own"] = {}  # type: ignore[index]
        loop.put_back(saved)
        assert optimizer.state["own"] == {"count": torch.tensor(3.0)}  # type: ignore[index]

    def test_a_buffer_that_cannot_be_copied_into_is_replaced(self) -> None:
        model = nn.Linear(1, 1)
        model.register_buffer("wide", torch.ones(1).expand(3))
        loop = loop_of(model, torch.optim.SGD(model.parameters(), lr=0.1))
        saved = loop.gather()
        three = torch.tensor([1.0, 2.0, 3.0])
        loop.put_weights_back(saved | {"buffers": {"wide": three}})
        assert model.wide.tolist() == [1.0, 2.0, 3.0]
        three.zero_()
        assert model.wide.tolist() == [1.0, 2.0, 3.0]

    def test_moments_of_another_precision_stay_so_and_are_no_part_of_the_state(self) -> None:
        model = nn.Linear(2, 1).bfloat16()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        loop = loop_of(model, optimizer)
        saved = loop.gather()
        fine = torch.full((1, 2), 0.1)
        saved["optimizer"]["state"][0]["momentum_buffer"] = fine
        loop.put_back(saved)
        held = optimizer.state[model.weight]["momentum_buffer"]
        assert held.dtype == torch.float32
        assert torch.equal(held, fine)
        fine.zero_()
        assert held.sum() > 0
        assert optimizer.state[model.bias]["momentum_buffer"].dtype == torch.bfloat16

    def test_how_an_update_is_computed_is_not_looked_at(self) -> None:
        """Torch refuses two ways at once; the saved ones are not those of this program."""
        model = nn.Linear(1, 1)
        loop = loop_of(model, torch.optim.AdamW(model.parameters(), lr=0.1))
        saved = loop.gather()
        saved["optimizer"]["param_groups"][0] |= {"fused": True, "foreach": True}
        loop.put_back(saved)
        saved["optimizer"]["param_groups"][0] |= {"betas": (2.0, 0.9)}
        with pytest.raises(CheckpointError, match="beta"):
            loop.put_back(saved)

    def test_moments_that_are_plain_numbers(self) -> None:
        model = nn.Linear(1, 1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        loop = loop_of(model, optimizer)
        saved = loop.gather()
        saved["optimizer"]["state"][0]["step"] = 3.0
        loop.put_back(saved)
        assert float(optimizer.state[model.weight]["step"]) == 3.0

    def test_an_expanded_buffer_of_another_size_stays(self) -> None:
        model = nn.Linear(1, 1)
        model.register_buffer("wide", torch.ones(1).expand(3), persistent=False)
        loop = loop_of(model, torch.optim.SGD(model.parameters(), lr=0.1))
        loop.put_weights_back(loop.gather() | {"buffers": {"wide": torch.zeros(5)}})
        assert model.wide.tolist() == [1.0] * 3


class Ranks(SingleProcess):
    """Several, of which none but this one does anything."""

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self._rank, self._size, self.waited = rank, size, 0

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def size(self) -> int:
        return self._size

    def all(self, flag: bool) -> bool:
        self.waited += 1
        return flag

    def texts(self, text: str) -> list[str]:
        return [text] * self._size


class Loop:
    gathered = 0

    def gather(self) -> dict[str, Any]:
        self.gathered += 1
        return {"number": self.gathered}


class TestRanks:
    def test_whoever_looks_for_one_waits_for_all_ranks(self, tmp_path: Path) -> None:
        ranks = Ranks()
        checkpointing = Checkpointing(tmp_path, Loop(), Every(steps=5), ranks=ranks)
        for number, look in enumerate((checkpointing.flush, checkpointing.newest_of_this_run, checkpointing.best), 1):
            look()
            assert ranks.waited == number
        checkpointing.close(0, 0, save=False)

    def test_other_ranks_believe_the_first_one_that_it_is_there(self, tmp_path: Path) -> None:
        loop = Loop()
        checkpointing = Checkpointing(tmp_path, loop, Every(steps=5))
        checkpointing.save(4, 4, wait=True)
        (checkpointing.flush() / "manifest.json").parent.rename(tmp_path / "elsewhere")
        checkpointing._ranks = Ranks(size=2)
        checkpointing.save(4, 4, wait=True)
        assert loop.gathered == 1
        checkpointing._ranks = Ranks()
        checkpointing.save(4, 4, wait=True)
        assert loop.gathered == 2
        checkpointing.close(0, 0, save=False)

    def test_before_the_first_save_it_is_the_first_step_that_is_flushed(self, tmp_path: Path) -> None:
        checkpointing = Checkpointing(tmp_path, Loop(), Every(steps=5))
        assert checkpointing.flush().name == "step-00000000"
        checkpointing.close(0, 0, save=False)

    def test_three_stay_and_five_minutes_are_waited(self, tmp_path: Path) -> None:
        store = SharedCheckpointStore(tmp_path, Ranks())
        for step in range(5):
            store.put({"a": step}, step=step, updates=step)
        assert [path.name[-1] for path in sorted(tmp_path.iterdir())] == ["2", "3", "4"]
        assert store._patience == shared_store.PATIENCE_S == 300.0

    def test_only_the_first_rank_tidies_and_warns(self, tmp_path: Path, recwarn: Any) -> None:
        left = tmp_path / ".step-00000001.abcd.parts"
        left.mkdir()
        SharedCheckpointStore(tmp_path, Ranks(rank=1, size=2))
        assert left.exists()
        assert read_shared(tmp_path / "nowhere", Ranks(rank=1, size=2)) is None
        assert recwarn.list == []
        SharedCheckpointStore(tmp_path, Ranks(rank=0, size=2))
        assert not left.exists()
        with pytest.warns(UserWarning, match="nowhere"):
            assert read_shared(tmp_path / "nowhere", Ranks()) is None

    def test_what_cannot_be_tidied_is_in_nobodys_way(self, tmp_path: Path) -> None:
        (tmp_path / ".step-00000001.abcd.parts").write_text("")  # no folder
        SharedCheckpointStore(tmp_path, Ranks())

    def test_what_is_not_finite_is_named_once(self, tmp_path: Path) -> None:
        write_checkpoint(tmp_path, {"parameters": {"w": torch.tensor([float("nan")])}}, step=1, updates=1)
        with pytest.warns(UserWarning, match=r"non-finite values \(parameters.w\)"):
            assert read_shared(tmp_path / "step-00000001", Ranks()) is None

    def test_the_best_is_known_to_the_first_rank(self, tmp_path: Path) -> None:
        store = SharedCheckpointStore(tmp_path, Ranks())
        for step, score in ((1, 0.5), (2, 0.1), (3, 0.3)):
            store.put({"a": step}, step=step, updates=step, score=score)
        best = store.best()
        assert best is not None
        assert (best.step, best.score) == (2, 0.1)
        assert SharedCheckpointStore(tmp_path, Ranks(rank=1, size=2)).best() is None  # the first one is silent here


class TestStores:
    def test_three_stay(self, tmp_path: Path) -> None:
        store = CheckpointStore(tmp_path)
        for step in range(5):
            store.put({"a": step}, step=step, updates=step)
        assert store.steps() == [2, 3, 4]

    def test_a_folder_that_somebody_deleted_is_made_again(self, tmp_path: Path) -> None:
        store = CheckpointStore(tmp_path / "a" / "b")
        (tmp_path / "a" / "b").rmdir()
        (tmp_path / "a").rmdir()
        store.put({"a": 1}, step=1, updates=1)
        assert store.steps() == [1]

    def test_a_step_that_is_written_again_and_finite_counts_again(self, tmp_path: Path) -> None:
        store = CheckpointStore(tmp_path, keep_last=2)
        store.put({"parameters": {"w": torch.tensor([float("inf")])}}, step=1, updates=1)
        with pytest.warns(UserWarning, match="non-finite"):
            assert store.newest() is None
        store.put({"parameters": {"w": torch.ones(1)}}, step=1, updates=1)
        store.put({"parameters": {"w": torch.ones(1)}}, step=2, updates=2)
        assert store.steps() == [1, 2]

    def test_while_one_is_written_nothing_is_reported(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recwarn: Any
    ) -> None:
        store = CheckpointStore(tmp_path)
        writer = BackgroundWriter(store)
        asked, go_on = threading.Event(), threading.Event()

        def put(job: Packed, **details: Any) -> Path:
            asked.set()
            go_on.wait(20)
            return tmp_path

        monkeypatch.setattr(store, "put", put)
        writer.save({"a": 1}, step=1, updates=1)
        asked.wait(20)
        writer._failure = "of a write before"
        writer.report()
        assert recwarn.list == []
        go_on.set()
        writer.close()
        assert recwarn.list == []


@pytest.fixture
def closed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What the lock closes."""
    found: list[int] = []
    close = os.close

    def noted(file: int) -> None:
        found.append(file)
        close(file)

    monkeypatch.setattr(run_lock.os, "close", noted)
    return found


class TestLocks:
    def test_others_may_read_who_holds_it(self, tmp_path: Path) -> None:
        before = os.umask(0o022)
        try:
            lock = RunLock(tmp_path)
            assert (tmp_path / FILE).stat().st_mode & 0o777 == 0o644
            lock.release()
        finally:
            os.umask(before)

    @pytest.mark.parametrize(("gone", "held"), [(0, True), (4, True), (5, False)])
    def test_a_file_that_its_owner_removes_meanwhile(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, closed: list[int], gone: int, held: bool
    ) -> None:
        answers = iter([False] * gone + [True] * 9)
        monkeypatch.setattr(run_lock, "_is_at", lambda file, path: next(answers))
        lock = RunLock(tmp_path)
        assert len(closed) == gone
        key = os.path.realpath(tmp_path / FILE)
        assert (key in run_lock._HELD) is held
        if held:
            assert json.loads((tmp_path / FILE).read_text())["pid"] == os.getpid()
        lock.release()
        assert key not in run_lock._HELD

    def test_a_file_is_at_its_path_or_not(self, tmp_path: Path) -> None:
        path = tmp_path / "a"
        file = os.open(path, os.O_RDWR | os.O_CREAT)
        try:
            assert run_lock._is_at(file, path) is True
            path.rename(tmp_path / "b")
            assert run_lock._is_at(file, path) is False
            path.write_text("")
            assert run_lock._is_at(file, path) is False
        finally:
            os.close(file)

    def test_one_that_was_inherited_is_taken_anew(self, tmp_path: Path) -> None:
        lock = RunLock(tmp_path)
        key = os.path.realpath(tmp_path / FILE)
        held = run_lock._HELD[key]
        held.pid += 1  # as after a fork
        again = RunLock(tmp_path)
        assert run_lock._HELD[key] is not held
        assert (run_lock._HELD[key].pid, run_lock._HELD[key].count) == (os.getpid(), 1)
        again.release()
        assert key not in run_lock._HELD
        lock.release()
        os.close(held.file)

    def test_what_a_process_has_inherited_lets_go_of_nothing(self, tmp_path: Path) -> None:
        lock = RunLock(tmp_path)
        key = os.path.realpath(tmp_path / FILE)
        run_lock._let_go(key, os.getpid() + 1)  # a lock of the process before the fork, in one that has its own
        assert run_lock._HELD[key].count == 1
        assert (tmp_path / FILE).exists()
        lock.release()
        assert key not in run_lock._HELD

    def test_who_could_not_take_it_takes_nobody_elses_away(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with monkeypatch.context() as patched:
            patched.setattr(run_lock, "_open", lambda folder: (_ for _ in ()).throw(OSError()))
            without = RunLock(tmp_path)
        holder = RunLock(tmp_path)
        without.release()
        assert (tmp_path / FILE).exists()
        holder.release()
        assert not (tmp_path / FILE).exists()
