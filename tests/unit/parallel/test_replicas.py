"""Checksums of weights, and how many ranks hold a part."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from steadystep.errors import UnsupportedError
from steadystep.parallel import replicas
from steadystep.parallel.replicas import (
    Replicas,
    copies,
    copies_of_all,
    healthy_rank,
    is_here,
    mesh_size,
    odd_ones,
    refuse_join,
    reshard,
)


class Holding(nn.Module):
    def __init__(self, *values: torch.Tensor) -> None:
        super().__init__()
        for place, value in enumerate(values):
            self.register_parameter(f"p{place}", nn.Parameter(value, requires_grad=False))


DTYPES = [
    torch.float8_e4m3fn,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
]


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_has_a_checksum_that_sees_a_change(dtype: torch.dtype) -> None:
    def number(*values: float) -> int:
        return Replicas(Holding(torch.tensor(values).to(dtype))).checksum(0)

    assert number(1.0, 2.0) == number(1.0, 2.0)
    assert number(1.0, 2.0) != number(1.0, 4.0)


def test_the_same_values_in_another_tensor_show() -> None:
    one, two = torch.full((2,), 1.0), torch.full((2,), 3.0)
    assert Replicas(Holding(one, two)).checksum(0) != Replicas(Holding(two, one)).checksum(0)
    assert Replicas(Holding(one, torch.zeros(2))).checksum(0) != Replicas(Holding(torch.zeros(2), one)).checksum(0)


def test_it_is_a_whole_number_of_twenty_bits() -> None:
    model = nn.Sequential(nn.Linear(30, 30), nn.Linear(30, 30))
    number = Replicas(model).checksum(0)
    assert isinstance(number, int)
    assert 0 <= number < 2**20
    assert Replicas(nn.ReLU()).checksum(0) == 0


def test_how_often() -> None:
    model = Holding(torch.ones(3))
    every = Replicas(model, every=5)
    assert [step for step in range(21) if every.checksum(step)] == [0, 5, 10, 15, 20]
    assert [step for step in range(41) if Replicas(model).checksum(step)] == [0, 20, 40]


def test_one_by_one_by_name_without_what_is_sharded(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Holding(torch.ones(2), torch.ones(2, 2), torch.zeros(1))
    names, numbers = Replicas(model).each()
    assert names == ["p0", "p1", "p2"]
    assert numbers[2] == 0
    monkeypatch.setattr(replicas, "is_sharded", lambda tensors: any(t.dim() > 1 for t in tensors))
    assert Replicas(model).each() == (["p0", "p2"], [numbers[0], 0])


@pytest.mark.parametrize(
    ("rows", "odd"),
    [
        ([[1], [1], [2]], [2]),
        ([[1], [2], [1], [3], [1]], [1, 3]),
        ([[1], [1], [2], [2]], None),
        ([[1], [2], [3]], None),
    ],
)
def test_odd_ranks_are_named_where_there_is_a_majority(rows: list[list[int]], odd: list[int] | None) -> None:
    (said,) = odd_ones(["a"], rows)
    assert said.startswith("a on ")
    assert [int(letter) for letter in said if letter.isdigit()] == (odd or [])


@pytest.mark.parametrize(
    ("rows", "rank"),
    [
        ([[1, 7], [1, 2], [1, 2]], 1),
        ([[1], [2]], None),
        ([[1], [1], [2], [2]], None),
        ([[9], [1], [1], [1]], 1),
        ([[1, 2], [1, 9], [8, 2]], None),  # each tensor has a majority, no rank has all of it
        ([[3], [3]], 0),
    ],
)
def test_a_healthy_rank_holds_what_most_hold(rows: list[list[int]], rank: int | None) -> None:
    assert healthy_rank(rows) == rank


class TestCopies:
    """The number of ranks that hold the same part; stand-ins for DTensors, real ones are in tests/distributed."""

    def spread(self, sizes: tuple[int, ...], *replicated: bool) -> Any:
        mesh = SimpleNamespace(
            size=lambda dim=None: math.prod(sizes) if dim is None else sizes[dim], get_coordinate=lambda: [0]
        )
        placements = [SimpleNamespace(is_replicate=lambda c=c: c) for c in replicated]
        return SimpleNamespace(device_mesh=mesh, placements=placements)

    def test_a_plain_tensor_is_on_every_rank(self) -> None:
        assert copies(torch.zeros(2), holders=3) == 3

    @pytest.mark.parametrize(
        ("sizes", "replicated", "holders", "expected"),
        [
            ((4,), [False], 4, 1),  # FSDP2
            ((4,), [True], 4, 4),
            ((2, 2), [True, False], 4, 2),  # HSDP
            ((2, 3), [False, True], 6, 3),  # FSDP2 with a replicated dimension for tensor parallelism
            ((2,), [False], 4, 2),  # on a mesh of half the ranks, of which there are two
            ((2,), [True], 4, 4),
            ((2,), [False], 2, 1),  # the other ranks hold no part of it
            ((2, 2), [False, False], 8, 2),
        ],
    )
    def test_on_a_mesh(
        self,
        monkeypatch: pytest.MonkeyPatch,
        sizes: tuple[int, ...],
        replicated: list[bool],
        holders: int,
        expected: float,
    ) -> None:
        monkeypatch.setattr(replicas, "is_sharded", lambda tensors: True)
        assert copies(self.spread(sizes, *replicated), holders=holders) == expected

    def test_a_rank_outside_of_a_mesh_holds_nothing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert is_here(torch.zeros(2))
        assert mesh_size(torch.zeros(2)) == 1
        monkeypatch.setattr(replicas, "is_sharded", lambda tensors: True)
        inside = self.spread((2,), False)
        assert is_here(inside)
        assert mesh_size(inside) == 2
        inside.device_mesh.get_coordinate = lambda: None
        assert not is_here(inside)

    @pytest.mark.parametrize("outside", [False, True])
    def test_of_several_meshes_the_ranks_say_who_holds_what(
        self, monkeypatch: pytest.MonkeyPatch, outside: bool
    ) -> None:
        """Six ranks: one parameter on all of them, one on two meshes of three each, one on two ranks only."""
        monkeypatch.setattr(replicas, "is_sharded", lambda tensors: not isinstance(tensors[0], torch.Tensor))
        whole, half, pair = self.spread((2, 3), True, False), self.spread((3,), False), self.spread((2,), True)
        if outside:
            pair.device_mesh.get_coordinate = lambda: None
        asked: list[list[float]] = []

        def summed(here: list[float]) -> list[float]:
            asked.append(here)
            return [6.0, 6.0, 2.0, 6.0]

        parameters: list[Any] = [whole, half, pair, torch.zeros(2)]
        assert copies_of_all(parameters, 6, summed) == [2.0, 2.0, 2.0, 6.0]
        assert asked == [[1.0, 1.0, 0.0 if outside else 1.0, 1.0]]
        assert copies_of_all(parameters, 6, summed, own={id(half)}) == [2.0, 1.0, 2.0, 6.0]
        asked.clear()
        assert copies_of_all([whole, parameters[3]], 6, summed) == [2.0, 6.0]
        assert asked == []  # a mesh of all ranks tells by itself


def test_a_parameter_that_has_no_replica_is_left_out() -> None:
    model = Holding(torch.ones(2), torch.full((2,), 3.0))
    assert Replicas(model, own={id(model.p0)}).each() == (["p1"], Replicas(model).each()[1][1:])


def test_a_join_is_refused_while_it_is_used() -> None:
    for config in (None, SimpleNamespace(enable=False)):
        refuse_join(SimpleNamespace(_join_config=config))
    refuse_join(None)
    with pytest.raises(UnsupportedError, match="remove join"):
        refuse_join(SimpleNamespace(_join_config=SimpleNamespace(enable=True)))


def test_who_has_not_loaded_fsdp_has_nothing_to_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(replicas.sys.modules, "torch.distributed.fsdp", raising=False)
    reshard(nn.Linear(1, 1))
