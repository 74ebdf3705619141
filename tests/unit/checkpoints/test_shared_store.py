"""Two ranks that write and read checkpoints together, as two threads."""

import json
import math
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # every optimizer imports it: here, so that it is not walked as garbage after each test
from torch import nn

from steadystep.checkpoints import atomic_io, shared_store
from steadystep.checkpoints.atomic_io import header, mark_of, move_in, pieces, read_tensors, remove, write_file
from steadystep.checkpoints.checkpoint import read_manifest
from steadystep.checkpoints.data_position import DataPosition
from steadystep.checkpoints.finite import FiniteParts
from steadystep.checkpoints.loop_state import LoopState
from steadystep.checkpoints.packing import Packed, pack
from steadystep.checkpoints.shared_store import (
    SharedCheckpointStore,
    files_of,
    finish,
    read_shared,
    refuse_part,
    share_is_whole,
    write_part,
)
from steadystep.errors import CheckpointError, ConfigError
from steadystep.parallel import SingleProcess

CPU = torch.device("cpu")


class Rank(SingleProcess):
    """One of several; they exchange texts."""

    sharded = False

    def __init__(self, rank: int, size: int, shared: Any) -> None:
        self._rank, self._size, self._shared = rank, size, shared

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def size(self) -> int:
        return self._size

    def texts(self, text: str) -> list[str]:
        barrier, slots = self._shared
        slots[self._rank] = text
        barrier.wait(20)
        found = list(slots)
        barrier.wait(20)
        return found


def together(work: Callable[[Rank], Any], size: int = 2) -> list[Any]:
    shared = threading.Barrier(size), [""] * size
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(work, [Rank(rank, size, shared) for rank in range(size)]))


def state(rank: int) -> dict[str, Any]:
    own = {"random": {"rank": rank}, "data": {"rank": rank}, "buffers": {"b": torch.tensor([float(rank)])}}
    return own if rank else {**own, "parameters": {"w": torch.ones(2)}, "guard": {"g": 1}, "ranks": 2}


def put(folder: Path, *steps: int, scores: tuple[float | None, ...] = (None,) * 9, **more: Any) -> list[Any]:
    def work(ranks: Rank) -> SharedCheckpointStore:
        store = SharedCheckpointStore(folder, ranks, **more)
        for step, score in zip(steps, scores, strict=False):
            path = store.put(state(ranks.rank), step=step, updates=step + 100, score=score)
            assert path == folder / f"step-{step:08d}"
            ranks.texts("")
        return store

    return together(work)


def test_each_rank_finds_what_all_have_and_what_is_its_own(tmp_path: Path) -> None:
    put(tmp_path, 5)
    manifest = read_manifest(tmp_path / "step-00000005")
    assert (manifest.step, manifest.updates, manifest.score) == (5, 105, None)
    assert sorted(manifest.files) == sorted([*files_of(0), *files_of(1)])
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000005"]
    for rank, found in enumerate(together(lambda ranks: SharedCheckpointStore(tmp_path, ranks).newest())):
        assert (found.step, found.updates) == (5, 105)
        assert (found.state["random"], found.state["data"]) == ({"rank": rank}, {"rank": rank})
        assert found.state["buffers"]["b"].item() == rank
        assert found.state["guard"] == {"g": 1}
        assert found.state["parameters"]["w"].tolist() == [1.0, 1.0]


def test_a_rank_that_the_saved_run_did_not_have_draws_its_own_numbers(tmp_path: Path) -> None:
    put(tmp_path, 5)
    found = together(lambda ranks: read_shared(tmp_path / "step-00000005", ranks), size=3)
    assert [each.state["random"] for each in found] == [{"rank": 0}, {"rank": 1}, None]
    assert [each.state["data"]["rank"] for each in found] == [0, 1, 0]


def test_the_newest_the_best_and_how_many_stay(tmp_path: Path) -> None:
    put(tmp_path, 1, 2, 3, 4, scores=(0.5, 0.1, 0.3, None), keep_last=2)
    assert sorted(path.name[-1] for path in tmp_path.glob("step-*")) == ["2", "3", "4"]

    def look(ranks: Rank) -> tuple[int, int, int, Any]:
        store = SharedCheckpointStore(tmp_path, ranks)
        odd = store.newest(lambda step: step % 2 == 1)
        return store.newest().step, store.best().step, odd.step, store.newest(lambda step: step > 9)

    assert together(look) == [(4, 2, 3, None)] * 2


@pytest.mark.parametrize("name", [*files_of(0), *files_of(1)])
def test_what_one_rank_finds_damaged_no_rank_uses(tmp_path: Path, name: str) -> None:
    put(tmp_path, 1, 2)
    file = tmp_path / "step-00000002" / name
    raw = bytearray(file.read_bytes())
    raw[-1] ^= 1
    file.write_bytes(raw)
    manifest = read_manifest(file.parent)
    assert sum(bool(share_is_whole(file.parent, manifest, rank=rank, size=2)) for rank in range(2)) == 1
    assert share_is_whole(file.parent, manifest, rank=0, size=1)
    assert not share_is_whole(tmp_path / "step-00000001", read_manifest(tmp_path / "step-00000001"), rank=0, size=1)
    with pytest.warns(UserWarning, match="step-00000002"):
        found = together(lambda ranks: SharedCheckpointStore(tmp_path, ranks).newest())
    assert [each.step for each in found] == [1, 1]


def test_a_part_that_does_not_come(tmp_path: Path) -> None:
    staging, path = tmp_path / ".parts", tmp_path / "step-00000001"
    write_part(staging, pack(state(0)), rank=0)
    more = {"size": 2, "step": 1, "updates": 1, "score": None}
    with pytest.raises(CheckpointError, match="rank 1"):
        finish(staging, path, **more, patience=lambda: 0.0)
    refuse_part(staging, rank=1)
    with pytest.raises(CheckpointError, match="rank 1"):
        finish(staging, path, **more)
    assert not path.exists()
    with pytest.raises(FileExistsError):
        write_part(staging, pack(state(0)), rank=0)


def test_shards_are_listed_with_the_rest(tmp_path: Path) -> None:
    staging, path = tmp_path / ".parts", tmp_path / "step-00000001"
    packed = pack({"a": 1})
    write_part(staging, Packed(packed.tree, packed.tensors, {"w": torch.ones(2)}, {"w": (4,)}), rank=0)
    finish(staging, path, size=1, step=1, updates=1, score=2)
    manifest = read_manifest(path)
    assert sorted(manifest.files) == ["shards/rank-00000.safetensors", "state.json", "tensors.safetensors"]
    assert manifest.score == 2.0
    assert read_tensors(path / "shards/rank-00000.safetensors")["w"].tolist() == [1.0, 1.0]
    raw = (path / "shards/rank-00000.safetensors").read_bytes()
    written = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])["__metadata__"]
    assert written == header({"w": (4,)})
    assert json.loads(written["DCP_SHARDING_INFO"]) == {"w": {"saved_offsets": [4]}}


def test_what_a_killed_run_left_is_removed_by_the_first_rank(tmp_path: Path) -> None:
    (tmp_path / ".step-00000001.abcd.parts").mkdir()
    stores = put(tmp_path)
    assert list(tmp_path.iterdir()) == []
    stores[1].refuse(3)
    assert len(list(tmp_path.glob(".step-00000003.*.parts/*.done"))) == 1
    stores[0].refuse(4)
    assert list(tmp_path.iterdir()) == []
    stores[0].hurry()
    assert stores[0]._patience == 3.0


def test_what_the_first_rank_cannot_do_none_can(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    def work(ranks: Rank) -> str:
        with pytest.raises(ConfigError) as refused:
            SharedCheckpointStore(tmp_path / "file", ranks)
        return str(refused.value)

    first, second = together(work)
    assert first == second


class TestFiles:
    def test_a_file_is_written_in_pieces_and_marked(self, tmp_path: Path) -> None:
        data = bytes(range(256)) * 5000  # more than a piece
        mark = write_file(tmp_path / "a", [data, b"", memoryview(b"xyz")])
        assert (tmp_path / "a").read_bytes() == data + b"xyz"
        assert mark == mark_of(tmp_path / "a")
        assert mark.size == len(data) + 3
        with pytest.raises(FileExistsError):
            write_file(tmp_path / "a", [])

    def test_wide_numbers_come_first_and_the_header_is_aligned(self) -> None:
        tensors = {"a": torch.ones(3, dtype=torch.uint8), "b": torch.ones(2, dtype=torch.float64), "c": torch.ones(0)}
        head, *rest = pieces(tensors)
        size = int.from_bytes(head[:8], "little")
        assert (size % 8, len(head)) == (0, size + 8)
        places = {name: entry["data_offsets"] for name, entry in json.loads(bytes(head[8:])).items()}
        assert places == {"b": [0, 16], "c": [16, 16], "a": [16, 19]}
        assert [len(piece) for piece in rest] == [16, 3]

    def test_a_folder_gets_its_name_and_replaces_one(self, tmp_path: Path) -> None:
        for number in ("1", "2"):
            new = tmp_path / f"new{number}"
            new.mkdir()
            (new / "x").write_text(number)
            move_in(new, tmp_path / "name")
        assert (tmp_path / "name" / "x").read_text() == "2"
        assert [path.name for path in tmp_path.iterdir()] == ["name"]
        with pytest.raises(OSError, match="nothing"):
            move_in(tmp_path / "nothing", tmp_path / "name")
        assert (tmp_path / "name" / "x").read_text() == "2"
        remove(tmp_path / "name")
        assert list(tmp_path.iterdir()) == []


class Part:
    """Stands for a guard, or a kept object."""

    def __init__(self, value: float = 0.0, *, refuses: bool = False) -> None:
        self.value, self.refuses = value, refuses

    def state_dict(self) -> dict[str, Any]:
        return {"format": 1, "value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.refuses and state["value"] > 0:
            raise ValueError("no")
        self.value = state["value"]


class TestLoopState:
    def made(self, **more: Any) -> tuple[nn.Module, torch.optim.Optimizer, LoopState]:
        model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        model.register_buffer("cache", torch.zeros(2), persistent=False)
        model.register_buffer("none", None)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        return model, optimizer, LoopState(model, optimizer, Part(1.0), DataPosition(CPU), device=CPU, **more)

    def test_ranks_are_resharded_before_anything_is_gathered_or_put_back(self) -> None:
        calls = []

        class Counted(SingleProcess):
            def reshard(self) -> None:
                calls.append(1)

        _, _, loop = self.made(ranks=Counted())
        gathered = loop.gather()
        assert len(calls) == 1
        loop.put_weights_back(gathered)
        assert len(calls) == 2
        loop.put_back(gathered)
        loop.roll_back(gathered)
        assert len(calls) >= 4

    def test_the_first_rank_gathers_what_all_have(self) -> None:
        parts = {"parameters", "buffers", "optimizer", "guard", "kept", "random", "data", "finite"}
        assert self.made()[2].gather().keys() == parts
        shared = threading.Barrier(1), [""]
        assert self.made(ranks=Rank(0, 2, shared))[2].gather().keys() == parts | {"ranks"}
        assert self.made(ranks=Rank(1, 2, shared))[2].gather().keys() == {"buffers", "random", "data", "finite"}
        sharded = Rank(1, 2, shared)
        sharded.sharded = True
        own = {"buffers", "random", "data", "finite", "parameters", "optimizer"}
        assert self.made(ranks=sharded)[2].gather().keys() == own

    def test_a_rollback_leaves_learning_rates_and_place(self) -> None:
        model, optimizer, loop = self.made()
        thing = Part(2.0)
        loop.keep("thing", thing)
        saved = json.loads(json.dumps({"value": 2.0, "format": 1}))
        gathered = {**loop.gather(), "kept": {"thing": saved, "other": {}}}
        gathered["parameters"] = {name: p.clone() for name, p in gathered["parameters"].items()}
        expected = model[0].weight.detach().clone()
        with torch.no_grad():
            model[0].weight.zero_()
        optimizer.param_groups[0]["lr"], thing.value = 0.7, 9.0
        loop.roll_back(gathered)
        assert torch.equal(model[0].weight, expected)
        assert (optimizer.param_groups[0]["lr"], thing.value) == (0.7, 2.0)
        loop.keep("scheduler", torch.optim.lr_scheduler.StepLR(optimizer, 5))
        optimizer.param_groups[0]["lr"] = 0.6
        loop.roll_back(gathered)
        assert optimizer.param_groups[0]["lr"] == 0.1  # as the scheduler that is rolled back with it expects

    def test_buffers_come_go_and_stay(self) -> None:
        model, _, loop = self.made()
        saved = {**loop.gather()}
        saved["buffers"] = {name: b.clone() for name, b in saved["buffers"].items()} | {"none": torch.ones(3)}
        saved["buffers"]["cache"] = torch.ones(2)
        mean = model[1].running_mean
        saved["buffers"]["1.running_mean"] = torch.full((2,), 5.0)
        loop.put_weights_back(saved)
        assert model.none.tolist() == [1.0] * 3
        assert model.cache.tolist() == [1.0] * 2
        assert mean.tolist() == [5.0, 5.0]
        saved["buffers"]["cache"] = torch.ones(7)
        model.cache.fill_(3.0)
        loop.put_weights_back(saved)
        assert model.cache.tolist() == [3.0] * 2
        del saved["buffers"]["cache"], saved["buffers"]["none"]
        loop.put_weights_back(saved)
        assert model.none is None
        assert model.cache.tolist() == [3.0] * 2

    def test_what_is_refused_leaves_everything_as_it_was(self) -> None:
        model, optimizer, loop = self.made()
        first, second = Part(1.0), Part(-1.0, refuses=True)
        loop.keep("first", first)
        loop.keep("second", second)
        saved = loop.gather()
        saved["kept"] = {"first": {"format": 1, "value": 5.0}, "second": {"format": 1, "value": 5.0}}
        saved["parameters"] = {name: torch.zeros_like(p) for name, p in saved["parameters"].items()}
        before, numbers = model[0].weight.detach().clone(), torch.get_rng_state()
        moments, groups = optimizer.state, optimizer.param_groups
        optimizer.param_groups[0]["weight_decay"] = 0.3
        with pytest.raises(CheckpointError):
            loop.put_back(saved)
        assert (first.value, second.value) == (1.0, -1.0)
        assert torch.equal(model[0].weight, before)
        assert torch.equal(torch.get_rng_state(), numbers)
        assert optimizer.state is moments
        assert optimizer.param_groups is groups
        assert groups[0]["weight_decay"] == 0.3

    def test_what_is_kept_later_gets_its_state_then(self) -> None:
        _, _, loop = self.made()
        saved = loop.gather()
        saved["kept"] = {"late": {"format": 1, "value": 5.0}}
        loop.put_back(saved)
        with pytest.warns(UserWarning, match="late"):
            loop.gather()
        late = Part(0.0)
        loop.keep("late", late)
        assert late.value == 5.0
        loop.gather()

    @pytest.mark.parametrize(("there", "batch", "expected"), [(2, 3, 6), (1, 3, 3)])
    def test_the_place_of_as_many_ranks(self, there: int, batch: int, expected: int, recwarn: Any) -> None:
        _, _, loop = self.made()
        saved = loop.gather() | {"ranks": there}
        saved["data"] |= {"batch": batch, "loader": {"a": 1}}
        loop.put_back(saved)
        assert loop.gather()["data"]["batch"] == expected
        assert bool(recwarn.list) is (there != 1)

    def test_with_a_check_what_is_kept_must_be_finite(self) -> None:
        model = nn.Linear(1, 1)
        finite = FiniteParts(model, lambda: ())
        loop = LoopState(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            Part(),
            DataPosition(CPU),
            device=CPU,
            finite=finite,
        )
        loop.keep("net", nn.Linear(1, 1, bias=False), check=True)
        loop.keep("other", nn.Linear(1, 1))
        assert loop.gather()["finite"]["kept"] == ["kept.net.weight"]
        assert math.isfinite(model.weight.item())


def test_at_most_64_are_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in range(70):
        (tmp_path / f"step-{step:08d}").mkdir()
    tried: list[str] = []
    monkeypatch.setattr(shared_store, "read_shared", lambda path, ranks: tried.append(path.name))
    store = SharedCheckpointStore(tmp_path, Rank(0, 1, (threading.Barrier(1), [""])))
    assert store.newest() is None
    assert tried == [f"step-{step:08d}" for step in range(69, 5, -1)]


def test_an_old_one_without_its_successor_gets_its_name_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[Path] = []
    monkeypatch.setattr(atomic_io, "sync_folder", synced.append)
    for name in ("a", "b"):
        old = atomic_io.hidden(tmp_path / name, "old")
        old.mkdir()
        (old / name).write_text("")
    (tmp_path / "b").mkdir()
    (tmp_path / ".other").mkdir()
    atomic_io.clear_leftovers(tmp_path)
    assert (tmp_path / "a" / "a").exists()
    assert synced == [tmp_path]
    # the one of b has a successor, and is this process's own
    assert sorted(path.name.split(".")[1] for path in tmp_path.glob(".*")) == ["b", "other"]


@pytest.mark.parametrize(("rank", "begins"), [(0, (0,)), (1, (3,)), (2, None), (3, None)])
def test_where_a_part_begins_and_that_copies_are_left_to_others(rank: int, begins: tuple[int, ...] | None) -> None:
    """Two copies over two parts each, of five elements and of one."""
    fake = pytest.importorskip("torch.testing._internal.distributed.fake_pg")
    from torch.distributed.tensor import DTensor, Replicate, Shard, init_device_mesh

    torch.distributed.init_process_group("fake", store=fake.FakeStore(), rank=rank, world_size=4)
    try:
        mesh = init_device_mesh("cpu", (2, 2))
        for size, expected in ((5, begins), (1, begins if rank == 0 else None)):
            local = torch.ones(torch.arange(size).chunk(2)[rank % 2].numel() if rank % 2 < size else 0)
            spread = DTensor.from_local(
                local, mesh, [Replicate(), Shard(0)], run_check=False, shape=torch.Size((size,)), stride=(1,)
            )
            assert atomic_io.offsets(spread) == expected
    finally:
        torch.distributed.destroy_process_group()
