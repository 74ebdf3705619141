"""Where a loop is in its data: counted, saved, found again."""

import math
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from steadystep._utils.rng import all_random_state
from steadystep.checkpoints.data_position import DataPosition
from steadystep.errors import CheckpointError

CPU = torch.device("cpu")


class Drawn:
    """Six batches whose order is drawn when a pass begins."""

    def __init__(self, length: int = 6, batch_size: int | None = None) -> None:
        self.length = length
        self.generator = torch.Generator().manual_seed(3)
        if batch_size is not None:
            self.batch_size = batch_size

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[tuple[int, float]]:
        for number in torch.randperm(self.length, generator=self.generator).tolist():
            yield number, random.random()


class Stateful:
    """Knows its place itself."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[int]:
        while self.at < 6:
            self.at += 1
            yield self.at
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


def nothing() -> None:
    pass


def some(position: DataPosition, loader: Any, count: int) -> list[Any]:
    """So many batches; then the loop leaves."""
    found = []
    for batch in position.batches(loader, nothing):
        found.append(batch)
        if len(found) == count:
            break
    return found


def test_batches_and_passes_are_counted() -> None:
    position = DataPosition(CPU)
    between: list[tuple[int, int]] = []
    ended: list[bool] = []
    seen = []
    source = position.batches(
        "abc", lambda: between.append((position.epoch, position.batch)), lambda: ended.append(position.open)
    )
    for letter in source:
        seen.append((letter, position.epoch, position.batch, position.left < 1, position.open))
    assert seen == [("a", 0, 0, False, True), ("b", 0, 1, False, True), ("c", 0, 2, True, True)]
    assert between == [(0, 0), (0, 1), (0, 2), (0, 3)]
    assert (position.epoch, position.batch, position.open, ended) == (1, 0, False, [False])
    assert position.left == math.inf


def test_batches_to_skip_are_counted_and_not_given() -> None:
    position = DataPosition(torch.device("cpu"))
    source = position.batches(range(10, 16), nothing, skip={1, 5})
    seen = [(batch, position.place, position.left) for batch in source]
    assert seen == [(10, (0, 0), 3), (12, (0, 2), 2), (13, (0, 3), 1), (14, (0, 4), 0)]
    assert (position.epoch, position.batch, position.place) == (1, 0, None)


def test_without_a_length_no_batch_is_known_to_be_the_last() -> None:
    position = DataPosition(CPU)
    assert [position.left < 1 for _ in position.batches(iter("abc"), nothing)] == [False] * 3


def test_a_batch_counts_once_a_step_was_made_with_it() -> None:
    position = DataPosition(CPU)
    for number, _ in enumerate(position.batches("abc", nothing)):
        assert position.saved()["batch"] == number
        assert position.state_dict() == {"place": [0, number]}
        position.is_used = True
        assert position.saved()["batch"] == number + 1
        assert position.state_dict() == {"place": [0, number + 1]}
    assert not position.is_used


def test_a_pass_that_was_left_is_over_when_the_next_begins() -> None:
    position = DataPosition(CPU)
    assert some(position, "abc", 2) == ["a", "b"]
    assert (position.epoch, position.batch, position.open) == (0, 2, False)
    assert some(position, "abc", 1) == ["a"]
    assert (position.epoch, position.batch) == (1, 1)


def test_another_rank_may_end_the_pass() -> None:
    position = DataPosition(CPU)
    calls: list[int] = []

    def ends() -> bool:
        calls.append(position.batch)
        return position.batch == 2

    position.ends = ends
    assert list(position.batches("abcd", nothing)) == ["a", "b"]
    assert calls == [0, 1, 2]
    assert (position.epoch, position.batch) == (1, 0)


def resumed(saved: dict[str, Any], numbers: dict[str, Any]) -> DataPosition:
    position = DataPosition(CPU)
    position.seek(saved, random=numbers)
    return position


@pytest.mark.parametrize("used", [0, 1, 4])
def test_found_again_within_a_pass(used: int) -> None:
    random.seed(1)
    whole, loader = DataPosition(CPU), Drawn()
    list(whole.batches(loader, nothing))
    source = whole.batches(loader, nothing)
    for _ in range(used):
        next(source)
        whole.is_used = True
    saved, numbers = whole.saved(), all_random_state(CPU)
    expected = list(source if used else whole.batches(loader, nothing))
    after = random.random()
    random.seed(99)
    second, fresh = resumed(saved, numbers), Drawn()
    assert second.saved() == saved  # until a batch is asked for
    assert (second.epoch, second.batch) == (1, used)
    assert list(second.batches(fresh, nothing)) == expected
    assert random.random() == after
    assert (second.epoch, second.batch) == (2, 0)


def test_a_loader_with_a_state_is_asked() -> None:
    position = DataPosition(CPU)
    source = position.batches(Stateful(), nothing)
    next(source)
    next(source)
    position.is_used = True
    saved = position.saved()
    assert saved["loader"] == {"at": 2}
    second = resumed(saved, all_random_state(CPU))
    assert list(second.batches(Stateful(), nothing)) == [3, 4, 5, 6]
    assert second.saved()["loader"] is None  # between two passes

    class Refusing(Stateful):
        def load_state_dict(self, state: dict[str, Any]) -> None:
            raise KeyError("at")

    with pytest.raises(CheckpointError, match="KeyError"):
        next(resumed(saved, all_random_state(CPU)).batches(Refusing(), nothing))


@pytest.mark.parametrize(("then", "now", "used", "expected"), [(4, 2, 2, 4), (2, 4, 3, 1), (3, 3, 2, 2)])
def test_batches_of_another_size(then: int, now: int, used: int, expected: int, recwarn: Any) -> None:
    position = DataPosition(CPU)
    source = position.batches(Drawn(batch_size=then), nothing)
    for _ in range(used):
        next(source)
        position.is_used = True
    second = resumed(position.saved(), all_random_state(CPU))
    rest = second.batches(Drawn(batch_size=now), nothing)
    next(rest)
    assert second.batch == expected
    assert bool(recwarn.list) is (then != now)


def test_fewer_batches_than_were_used_are_told() -> None:
    position = DataPosition(CPU)
    source = position.batches(Drawn(), nothing)
    for _ in range(4):
        next(source)
        position.is_used = True
    second = resumed(position.saved(), all_random_state(CPU))
    with pytest.warns(UserWarning, match=r"3.*4"):
        assert list(second.batches(Drawn(3), nothing)) == []


def test_rolled_back_batches_come_again_within_their_pass() -> None:
    random.seed(1)
    position = DataPosition(CPU)
    seen = []
    for number, batch in enumerate(position.batches(Drawn(), nothing)):
        seen.append(batch[0])
        if number == 3:
            position.load_state_dict({"place": [0, 1]})
    assert seen == [*seen[:4], *seen[1:4], *seen[7:]]
    assert len(seen) == 9
    assert sorted(set(seen)) == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize(("loader", "place"), [(Drawn, [7, 1]), (Stateful, [0, 1])])
def test_those_of_a_pass_that_is_over_do_not(loader: Any, place: list[int]) -> None:
    position = DataPosition(CPU)
    seen = 0
    for _ in position.batches(loader(), nothing):
        seen += 1
        if seen == 3:
            position.load_state_dict({"place": place})
    assert seen == 6


def test_what_a_loader_takes_from_pass_to_pass() -> None:
    position = DataPosition(CPU)
    empty = position.saved()
    assert (empty["generator"], empty["started"], empty["began"], empty["loader"]) == (None, False, {}, None)
    assert "batch_size" not in empty
    loader = Drawn(batch_size=4)
    list(position.batches(loader, nothing))
    saved = position.saved()
    assert torch.equal(saved["generator"], loader.generator.get_state())
    assert (saved["batch_size"], saved["started"]) == (4, False)
    assert not torch.equal(saved["began"]["generator"], saved["generator"])


class Workers(Drawn):
    """Keeps its workers from pass to pass, and draws a seed when it starts them."""

    persistent_workers = True
    _iterator: Any = None

    def __iter__(self) -> Iterator[tuple[int, float]]:
        if self._iterator is None:
            self._iterator = torch.randint(9, (1,), generator=self.generator)
        return super().__iter__()


@pytest.mark.parametrize("used", [0, 2])
def test_workers_that_stay_are_started_where_they_were_started(used: int) -> None:
    random.seed(1)
    whole, loader = DataPosition(CPU), Workers()
    list(whole.batches(loader, nothing))
    assert whole.saved()["started"]
    source = whole.batches(loader, nothing)
    for _ in range(used):
        next(source)
        whole.is_used = True
    saved, numbers = whole.saved(), all_random_state(CPU)
    expected = list(source)
    assert list(resumed(saved, numbers).batches(Workers(), nothing)) == expected


class OnlyLoads(Drawn):
    """Half of the two methods: its state was never asked for, so none may be given to it."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError(state)


class OnlySaves(Drawn):
    def state_dict(self) -> dict[str, Any]:
        return {"at": 2}


@pytest.mark.parametrize("kind", [Drawn, OnlyLoads, OnlySaves])
def test_a_loader_that_cannot_load_is_drawn_from_again(kind: type[Drawn]) -> None:
    position = DataPosition(CPU)
    source = position.batches(kind(), nothing)
    for _ in range(2):
        next(source)
        position.is_used = True
    saved, numbers = position.saved(), all_random_state(CPU)
    assert saved["loader"] is None
    expected = list(source)
    again = resumed({**saved, "loader": {"at": 2}}, numbers)  # as a loader with a state would have written it
    assert list(again.batches(kind(), nothing)) == expected
