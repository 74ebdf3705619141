"""What one rank tells the others: that its memory ran out, and which bits have flipped."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from steadystep.engine.agreed_flips import NAMED, ROOM, AgreedFlips
from steadystep.engine.closures import RankShortage
from steadystep.errors import TrainingHalted
from steadystep.memory.retry import OutOfMemoryRetry
from steadystep.records import BitFlip, Signals

CPU = torch.device("cpu")


@dataclass
class StandIn:
    """Sends zeros for a rank that has none."""

    is_possible: bool = True
    watched: int = 0
    completed: list[bool] = field(default_factory=list)

    @contextmanager
    def watching(self) -> Iterator[None]:
        self.watched += 1
        yield

    def complete(self, *, reduced: bool) -> None:
        self.completed.append(reduced)


@dataclass
class Ranks:
    """This one, and what the others have said."""

    rank: int = 0
    others: list[str] = field(default_factory=lambda: [""])
    others_can: bool = True
    others_saw: bool = False
    stand_in: Any = field(default_factory=StandIn)
    alone: int = 0

    @property
    def size(self) -> int:
        return 1 + len(self.others)

    def any_rank(self, mine: Callable[[], bool]) -> Callable[[], bool]:
        return lambda: mine() or self.others_saw

    def texts(self, text: str) -> list[str]:
        return [*self.others[: self.rank], text, *self.others[self.rank :]]

    def all(self, flag: bool) -> bool:
        return flag and self.others_can

    @contextmanager
    def unreduced(self) -> Iterator[None]:
        self.alone += 1
        yield

    def agree(self, view: Any) -> Any:
        return view


def full(rows: Tensor, weight: float) -> Tensor:
    raise torch.OutOfMemoryError("out of memory\nand where")


class TestShortage:
    def shortage(self, ranks: Ranks, size: int | None = None) -> RankShortage:
        memory = OutOfMemoryRetry()
        memory.size = size
        found = RankShortage.of(memory, ranks, CPU)  # type: ignore[arg-type]
        assert found is not None
        return found

    def test_it_needs_a_memory_and_somebody_who_stands_in(self) -> None:
        assert RankShortage.of(None, Ranks(), CPU) is None  # type: ignore[arg-type]
        assert RankShortage.of(OutOfMemoryRetry(), Ranks(stand_in=None), CPU) is None  # type: ignore[arg-type]

    @pytest.mark.parametrize(("unreduced", "alone"), [(False, 2), (True, 3)])
    def test_only_the_last_part_is_sent(self, unreduced: bool, alone: int) -> None:
        ranks = Ranks()
        shortage = self.shortage(ranks, size=2)
        seen: list[tuple[list[float], float]] = []

        def run(rows: Tensor, weight: float) -> Tensor:
            seen.append((rows.tolist(), weight))
            return rows.mean().requires_grad_()

        found = shortage.attempt(run, torch.tensor([1.0, 2.0, 3.0, 4.0, 9.0, 11.0]), unreduced=unreduced)
        assert [rows for rows, _ in seen] == [[1.0, 2.0], [3.0, 4.0], [9.0, 11.0]]
        assert (found.item(), found.requires_grad) == (pytest.approx(5.0), False)
        assert (ranks.alone, ranks.stand_in.watched, ranks.stand_in.completed) == (alone, 3, [])
        assert not shortage.seen()

    @pytest.mark.parametrize("unreduced", [False, True])
    def test_where_memory_runs_out_zeros_are_sent_and_all_know(self, unreduced: bool) -> None:
        ranks = Ranks()
        shortage = self.shortage(ranks)
        found = shortage.attempt(full, torch.ones(8), unreduced=unreduced)
        assert (found.item(), found.shape) == (0.0, ())
        assert ranks.stand_in.completed == [not unreduced]
        assert shortage.seen()
        with pytest.warns(UserWarning, match=r"out of memory on rank 0: out of memory\. On all ranks: .*4"):
            shortage.split([torch.ones(8)], step=3)
        assert not shortage.seen()

    def test_another_error_or_one_without_a_stand_in_is_raised(self) -> None:
        shortage = self.shortage(Ranks())

        def wrong(rows: Tensor, weight: float) -> Tensor:
            raise RuntimeError("shapes do not match")

        with pytest.raises(RuntimeError, match="shapes"):
            shortage.attempt(wrong, torch.ones(8), unreduced=False)
        alone = self.shortage(Ranks(stand_in=StandIn(is_possible=False)))
        with pytest.raises(torch.OutOfMemoryError):
            alone.attempt(full, torch.ones(8), unreduced=False)
        assert not shortage.seen()
        assert not alone.seen()

    def test_the_parts_of_a_rank_grow_again_only_where_they_were_made_smaller(self) -> None:
        shortage = self.shortage(Ranks())
        fitted: list[int] = []
        shortage._memory.fitted = lambda batch: fitted.append(len(batch))  # type: ignore[method-assign]
        shortage.attempt(lambda rows, weight: rows.mean(), torch.ones(8), unreduced=False)
        assert fitted == []
        shortage._memory.size = 4
        shortage.attempt(lambda rows, weight: rows.mean(), torch.ones(8), unreduced=False)
        assert fitted == [8]

    def test_a_batch_that_cannot_be_split_ends_the_run_on_all_ranks(self) -> None:
        shortage = self.shortage(Ranks(others=["", "no room"]))
        shortage.attempt(full, torch.ones(1), unreduced=False)
        said = "out of memory on rank 0: out of memory; rank 2: no room; and the batch there cannot be split"
        with pytest.raises(TrainingHalted, match=said) as halted:
            shortage.split([torch.ones(1)], step=7)
        assert halted.value.step == 7

    def test_who_did_not_run_out_goes_on_with_a_batch_of_one_row(self, recwarn: Any) -> None:
        self.shortage(Ranks(rank=1, others=["no room"])).split([torch.ones(1)], step=7)
        assert recwarn.list == []  # the first one says it
        with pytest.warns(UserWarning, match=r"rank 1: no room\. On all ranks: the same batch again"):
            self.shortage(Ranks(others=["no room"])).split([torch.ones(1)], step=7)
        with pytest.raises(TrainingHalted):
            self.shortage(Ranks(others=["no room"], others_can=False)).split([torch.ones(8)], step=7)


@dataclass(frozen=True)
class View:
    signals: Signals


def flip(tensor: str = "w", *, repaired: bool = True, rank: int | None = None) -> BitFlip:
    return BitFlip(tensor=tensor, index=3, bit=1, repaired=repaired, rank=rank)


def told(*flips: BitFlip) -> str:
    return json.dumps(
        [{"tensor": f.tensor, "index": 3, "bit": 1, "repaired": f.repaired, "rank": f.rank} for f in flips]
    )


class TestFlips:
    def agreed(self, ranks: Ranks, *mine: BitFlip) -> Signals:
        view: Any = View(Signals(step=1, loss=1.0, grad_norm=1.0, bit_flips=mine))
        found: Any = AgreedFlips(ranks).agree(view)  # type: ignore[arg-type]
        return found.signals

    def test_without_any_nothing_is_sent(self) -> None:
        view: Any = View(Signals(step=1, loss=1.0, grad_norm=1.0))
        assert AgreedFlips(Ranks(others=["not asked"])).agree(view) is view  # type: ignore[arg-type]

    def test_all_know_them_with_their_ranks(self) -> None:
        for ranks, mine in ((Ranks(others=["[]"]), (flip(),)), (Ranks(1, [told(flip(rank=0))], others_saw=True), ())):
            found = self.agreed(ranks, *mine)
            assert found.bit_flips == (flip(rank=0),)
            assert (found.odd_replicas, found.healthy_rank) == ((), None)  # it was repaired

    def test_what_was_not_repaired_comes_from_the_first_rank_that_is_whole(self) -> None:
        other = told(flip("v", repaired=False, rank=1), flip("u", rank=1))
        found = self.agreed(Ranks(others=[other, "[]", "[]"]), flip(repaired=False))
        assert found.odd_replicas == ("w on rank 0", "v on rank 1")
        assert found.healthy_rank == 2
        assert [each.rank for each in found.bit_flips] == [0, 1, 1]

    def test_where_every_rank_has_one_nobody_is_healthy(self) -> None:
        found = self.agreed(Ranks(others=[told(flip(repaired=False, rank=1))]), flip(repaired=False))
        assert (found.odd_replicas, found.healthy_rank) == ((), None)
        assert len(found.bit_flips) == 2

    def test_eight_are_named_and_fewer_where_there_is_no_room(self) -> None:
        assert (NAMED, ROOM) == (8, 1000)
        assert len(self.agreed(Ranks(others=["[]"]), *(flip(f"w{i}") for i in range(10))).bit_flips) == 8
        sent = len(json.dumps([{**json.loads(told(flip(rank=0)))[0], "used": True}]).encode())
        room = ROOM - sent + len("w")  # for the longest name
        assert len(self.agreed(Ranks(others=["[]"]), flip("w" * room)).bit_flips) == 1
        assert len(self.agreed(Ranks(others=["[]"]), flip("w" * (room + 1))).bit_flips) == 0
