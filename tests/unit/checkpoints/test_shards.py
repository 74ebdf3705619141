"""Tensors that are spread over ranks: which part is written by whom, and how it is read into another layout."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # every optimizer imports it: here, so that it is not walked as garbage after each test
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from steadystep.checkpoints.atomic_io import (
    Spread,
    header,
    laid_out,
    offsets,
    pieces,
    read_spread,
    room_for,
    write_file,
)
from steadystep.checkpoints.data_position import DataPosition
from steadystep.checkpoints.loop_state import LoopState
from steadystep.checkpoints.shared_store import SharedCheckpointStore
from steadystep.errors import CheckpointError
from steadystep.parallel import SingleProcess

CPU = torch.device("cpu")
WHOLE = torch.arange(12.0).reshape(4, 3)


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """Of one rank, which has everything."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield init_device_mesh("cpu", (1,))
    finally:
        dist.destroy_process_group()


def as_rank(rank: int, *shape: int) -> DeviceMesh:
    """A mesh of ranks that are not there, seen from one of them."""
    size = torch.Size(shape).numel()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    return init_device_mesh("cpu", shape)


@pytest.fixture
def fake() -> Iterator[Any]:
    yield as_rank
    dist.destroy_process_group()


def spread(mesh: DeviceMesh, whole: Tensor, *how: Any) -> Tensor:
    """Each rank its part, without a message."""
    return distribute_tensor(whole, mesh, list(how), src_data_rank=None)


def test_a_rank_that_is_no_part_of_the_mesh_holds_nothing(fake: Any) -> None:
    fake(1, 2)
    held = DTensor.from_local(torch.ones(2), DeviceMesh("cpu", [0]), [Shard(0)], run_check=False)
    assert offsets(held) is None


def test_the_only_copy_is_written(fake: Any) -> None:
    assert offsets(spread(fake(0, 2), WHOLE, Replicate())) == (0, 0)
    assert offsets(spread(init_device_mesh("cpu", (2,)), WHOLE, Shard(1))) == (0, 0)


class TestLayouts:
    def test_a_whole_tensor_takes_the_layout_of_another(self, fake: Any) -> None:
        mesh = fake(1, 2)
        model = spread(mesh, torch.zeros(4, 3), Shard(0))
        found = laid_out(WHOLE, model)
        assert isinstance(found, DTensor)
        assert found.placements == model.placements
        assert torch.equal(found.to_local(), WHOLE[2:])

    def test_what_has_a_layout_or_another_shape_stays(self, fake: Any) -> None:
        mesh = fake(1, 2)
        model = spread(mesh, torch.zeros(4, 3), Shard(0))
        other = spread(mesh, WHOLE, Shard(1))
        step = torch.tensor(3.0)
        assert laid_out(other, model) is other
        assert laid_out(step, model) is step
        assert laid_out(WHOLE, torch.zeros(4, 3)) is WHOLE

    def test_room_is_laid_out_as_the_parameter_or_whole(self, fake: Any) -> None:
        mesh = fake(0, 2)
        model = spread(mesh, torch.zeros(4, 3), Shard(0))
        saved = Spread("w", torch.Size((4, 3)), torch.float64)
        found = room_for(saved, model, CPU)
        assert isinstance(found, DTensor)
        assert (found.to_local().shape, found.dtype, found.shape) == ((2, 3), torch.float64, (4, 3))
        for like, device in ((None, CPU), (torch.zeros(4, 3), CPU), (spread(mesh, torch.zeros(4), Shard(0)), CPU)):
            plain = room_for(saved, like, device)
            assert type(plain) is Tensor
            assert (plain.shape, plain.dtype) == ((4, 3), torch.float64)
        assert room_for(saved, None, torch.device("meta")).device.type == "meta"


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """As two ranks have written them."""
    for rank, begin in enumerate((0, 2)):
        file = tmp_path / f"rank-{rank:05d}.safetensors"
        write_file(file, pieces({"w": WHOLE[begin : begin + 2]}, header({"w": (begin, 0)})))
    return tmp_path


class TestReading:
    def test_a_plain_tensor_gets_all_parts(self, shards: Path, recwarn: Any) -> None:
        found = torch.zeros(4, 3)
        read_spread(shards, {"w": found})
        assert torch.equal(found, WHOLE)
        assert recwarn.list == []

    def test_with_a_group_of_processes_too(self, shards: Path, mesh: DeviceMesh) -> None:
        plain, by_columns = torch.zeros(4, 3), spread(mesh, torch.zeros(4, 3), Shard(1))
        read_spread(shards, {"w": plain})
        read_spread(shards, {"w": by_columns})
        assert torch.equal(plain, WHOLE)
        assert torch.equal(by_columns.to_local(), WHOLE)  # type: ignore[attr-defined]

    def test_nothing_wanted_reads_nothing(self, tmp_path: Path) -> None:
        read_spread(tmp_path / "nowhere", {})

    def test_what_cannot_be_read_is_refused(self, shards: Path) -> None:
        for folder, wanted in ((shards / "nowhere", "w"), (shards, "other")):
            with pytest.raises(CheckpointError, match="cannot be read"):
                read_spread(folder, {wanted: torch.zeros(4, 3)})


class Memory:
    def state_dict(self) -> dict[str, Any]:
        return {"format": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def trained(mesh: DeviceMesh | None, value: float) -> tuple[nn.Module, torch.optim.Optimizer, LoopState]:
    """A layer after one update, spread over a mesh or not."""
    model = nn.Linear(3, 4)
    for name, parameter in list(model.named_parameters()):
        start = torch.full_like(parameter.detach(), value)
        setattr(model, name, nn.Parameter(start if mesh is None else spread(mesh, start, Shard(0))))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, value)
    optimizer.step()
    return model, optimizer, LoopState(model, optimizer, Memory(), DataPosition(CPU), device=CPU)


def full(tensor: Tensor) -> Tensor:
    return tensor.detach().full_tensor() if isinstance(tensor, DTensor) else tensor.detach()


@pytest.mark.parametrize("again", [True, False], ids=["spread", "whole"])
def test_a_model_that_is_spread_comes_back_spread_or_whole(tmp_path: Path, mesh: DeviceMesh, again: bool) -> None:
    model, optimizer, loop = trained(mesh, 2.0)
    store = SharedCheckpointStore(tmp_path, SingleProcess())
    store.put(loop.gather(), step=1, updates=1)
    found = store.newest()
    assert found is not None
    assert isinstance(found.state["parameters"]["weight"], Spread)
    other, of_other, into = trained(mesh if again else None, 5.0)
    into.put_back(found.state)
    for mine, theirs in zip(other.parameters(), model.parameters(), strict=True):
        assert isinstance(mine, DTensor) is again
        assert torch.equal(full(mine), full(theirs))
        for slot, value in optimizer.state[theirs].items():
            assert isinstance(of_other.state[mine][slot], DTensor) is (again and value.dim() > 0), slot
            assert torch.equal(full(of_other.state[mine][slot]), full(value)), slot


def test_a_whole_state_is_laid_out_over_the_ranks(mesh: DeviceMesh) -> None:
    model, optimizer, loop = trained(None, 2.0)
    other, of_other, into = trained(mesh, 5.0)
    into.put_back(loop.gather())
    for mine, theirs in zip(other.parameters(), model.parameters(), strict=True):
        assert torch.equal(full(mine), theirs)
        moments = of_other.state[mine]["exp_avg"]
        assert isinstance(moments, DTensor)
        assert torch.equal(full(moments), optimizer.state[theirs]["exp_avg"])
