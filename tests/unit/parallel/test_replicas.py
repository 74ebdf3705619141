"""Checksums of weights, and whose gradient counts."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from steadystep.errors import UnsupportedError
from steadystep.parallel import replicas
from steadystep.parallel.replicas import Replicas, counts_here, healthy_rank, odd_ones, reshard


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


class TestCountsHere:
    def spread(self, size: int, place: list[int] | None, *copied: bool) -> Any:
        mesh = SimpleNamespace(size=lambda: size, get_coordinate=lambda: place)
        placements = [SimpleNamespace(is_replicate=lambda c=c: c) for c in copied]
        return SimpleNamespace(device_mesh=mesh, placements=placements)

    def test_a_copy_counts_on_the_first_rank(self) -> None:
        weight = torch.zeros(2)
        assert [counts_here("w", weight, rank=rank, size=3) for rank in range(3)] == [True, False, False]

    @pytest.mark.parametrize(
        ("place", "copied", "counts"),
        [
            ([0], [False], True),
            ([3], [False], True),
            ([0], [True], True),
            ([1], [True], False),
            ([0, 1], [True, False], True),  # a part, in the first of its copies
            ([1, 0], [True, False], False),
            ([1, 1], [False, True], False),
            (None, [True], True),
        ],
    )
    def test_every_part_counts_once(
        self, monkeypatch: pytest.MonkeyPatch, place: list[int] | None, copied: list[bool], counts: bool
    ) -> None:
        monkeypatch.setattr(replicas, "is_sharded", lambda tensors: True)
        for rank in (0, 3):
            assert counts_here("w", self.spread(4, place, *copied), rank=rank, size=4) is counts

    def test_spread_over_some_ranks_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(replicas, "is_sharded", lambda tensors: True)
        with pytest.raises(UnsupportedError, match="w "):
            counts_here("w", self.spread(2, [0], False), rank=0, size=4)


def test_who_has_not_loaded_fsdp_has_nothing_to_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(replicas.sys.modules, "torch.distributed.fsdp", raising=False)
    reshard(nn.Linear(1, 1))
