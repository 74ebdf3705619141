"""What the replay buffer holds: which updates, in how many bytes, and when it gives up."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from steadystep.records import Signals
from steadystep.snapshots.replay_buffer import RecordedMicroBatch, RecordedUpdate, ReplayBuffer

SIGNALS = Signals(step=1, loss=2.0, grad_norm=1.0, lr=0.1)


class Recipe:
    """A batch of so many bytes; counts how often its size is asked for."""

    rng = None
    closure = None

    def __init__(self, size: int, asked: list[int] | None = None) -> None:
        self._batch = torch.zeros(size, dtype=torch.uint8)
        self._asked = [] if asked is None else asked

    @property
    def batch(self) -> Any:
        self._asked.append(self._batch.numel())
        return self._batch

    def again(self) -> Any:
        raise AssertionError("nothing is replayed here")


def update(number: int, *sizes: int, asked: list[int] | None = None) -> RecordedUpdate:
    micro_batches = tuple(RecordedMicroBatch(Recipe(size, asked), None) for size in sizes)
    return RecordedUpdate(micro_batches, SIGNALS, ({"lr": 0.1},), updates=number)


def filled(count: int, *, size: int = 10, max_bytes: float = 1e6) -> ReplayBuffer:
    buffer = ReplayBuffer(max_bytes=max_bytes)
    for number in range(1, count + 1):
        buffer.add(update(number, size))
    return buffer


def held(buffer: ReplayBuffer, *, after: int, until: int) -> list[int]:
    return [done.updates for done in buffer.since(after, until=until)]


def test_an_update_still_to_be_taken_has_no_number() -> None:
    assert RecordedUpdate((), SIGNALS, ()).is_at_hand
    assert not update(1).is_at_hand


def test_only_a_buffer_with_room_is_open() -> None:
    assert [ReplayBuffer(max_bytes=room).open for room in (0, 0.5, 1, 1e9)] == [False, True, True, True]


def test_updates_come_back_in_order_or_not_at_all() -> None:
    buffer = filled(5)
    assert held(buffer, after=0, until=5) == [1, 2, 3, 4, 5]
    assert held(buffer, after=3, until=5) == [4, 5]
    assert held(buffer, after=5, until=5) == []
    assert held(buffer, after=3, until=6) == []  # the last one is missing
    assert held(buffer, after=3, until=4) == []  # one too many: these are not the updates of this run
    buffer.add(update(7, 10))
    assert held(buffer, after=3, until=7) == []  # 6 is missing
    assert held(buffer, after=6, until=7) == [7]


@pytest.mark.parametrize(("until", "rest"), [(0, [1, 2, 3, 4]), (1, [2, 3, 4]), (3, [4]), (4, []), (9, [])])
def test_what_a_state_contains_is_dropped(until: int, rest: list[int]) -> None:
    buffer = filled(4)
    buffer.forget_until(until)
    assert held(buffer, after=4 - len(rest), until=4) == rest
    if rest and until:
        assert held(buffer, after=until - 1, until=4) == []


@pytest.mark.parametrize(("until", "rest"), [(0, []), (1, [1]), (3, [1, 2, 3]), (4, [1, 2, 3, 4]), (9, [1, 2, 3, 4])])
def test_what_a_rollback_undid_is_dropped(until: int, rest: list[int]) -> None:
    buffer = filled(4)
    buffer.keep_until(until)
    assert held(buffer, after=0, until=len(rest)) == rest
    buffer.add(update(len(rest) + 1, 10))
    assert held(buffer, after=0, until=len(rest) + 1) == [*rest, len(rest) + 1]


@pytest.mark.parametrize("sizes", [(101,), (60, 41), (10, 91)])
def test_a_batch_that_is_too_large_closes_it_at_once(sizes: tuple[int, ...]) -> None:
    buffer = ReplayBuffer(max_bytes=100)
    buffer.add(update(1, *sizes))
    assert not buffer.open
    assert held(buffer, after=0, until=1) == []


def test_what_fits_exactly_is_kept() -> None:
    buffer = ReplayBuffer(max_bytes=100)
    buffer.add(update(1, 60, 40))
    assert buffer.open
    assert held(buffer, after=0, until=1) == [1]


def test_the_bytes_of_all_updates_count_together() -> None:
    buffer = ReplayBuffer(max_bytes=100)
    for number in range(1, 11):
        buffer.add(update(number, 10))
    assert buffer.open
    buffer.add(update(11, 10))
    assert not buffer.open
    assert held(buffer, after=0, until=11) == []


def test_once_closed_it_keeps_nothing_for_the_rest_of_the_run() -> None:
    buffer = ReplayBuffer(max_bytes=100)
    buffer.add(update(1, 101))
    buffer.add(update(2, 1))
    assert not buffer.open
    assert held(buffer, after=1, until=2) == []


@pytest.mark.parametrize("end", ["front", "back", "all", "most"])
def test_dropped_updates_free_their_bytes(end: str) -> None:
    """Room for 1000 bytes: 600 are held and dropped, and 900 more fit."""
    most = 512
    buffer = ReplayBuffer(max_bytes=1000)
    for number in range(1, 7):
        buffer.add(update(number, 100))
    if end == "front":
        buffer.forget_until(6)
    elif end == "back":
        buffer.keep_until(0)
    elif end == "all":
        buffer.clear()
    else:
        for number in range(7, 7 + most):
            buffer.add(update(number, 0))
    for number in range(1000, 1006):
        buffer.add(update(number, 150))
    buffer.forget_until(999)  # weighs them
    assert buffer.open
    assert held(buffer, after=999, until=1005) == [*range(1000, 1006)]
    buffer.add(update(1006, 101))
    buffer.forget_until(0)
    assert not buffer.open


def test_it_holds_the_last_512_updates() -> None:
    buffer = filled(512, size=1)
    assert len(buffer.since(0, until=512)) == 512
    buffer.add(update(513, 1))
    assert buffer.since(0, until=513) == ()
    assert [done.updates for done in buffer.since(1, until=513)] == [*range(2, 514)]


def test_small_batches_are_weighed_in_lumps() -> None:
    """The first at once, the others 16 at a time."""
    asked: list[int] = []
    buffer = ReplayBuffer(max_bytes=1e6)
    seen = []
    for number in range(1, 35):
        buffer.add(update(number, 10, asked=asked))
        seen.append(len(asked))
    assert seen == [1] * 16 + [17] * 16 + [33] * 2
    buffer.forget_until(0)  # weighs the rest; nothing twice
    assert len(asked) == 34


def test_near_the_limit_each_batch_is_weighed_at_once() -> None:
    asked: list[int] = []
    buffer = ReplayBuffer(max_bytes=10 + 16 * 10)
    buffer.add(update(1, 10, asked=asked))
    buffer.add(update(2, 10, asked=asked))
    assert len(asked) == 1  # a lump of the largest would just fit
    buffer = ReplayBuffer(max_bytes=10 + 16 * 10 - 1)
    asked.clear()
    buffer.add(update(1, 10, asked=asked))
    buffer.add(update(2, 10, asked=asked))
    assert len(asked) == 2


def test_the_largest_batch_decides_how_near_the_limit_is() -> None:
    asked: list[int] = []
    buffer = ReplayBuffer(max_bytes=200)
    for number, size in enumerate((20, 1, 1), start=1):
        buffer.add(update(number, size, asked=asked))
    assert len(asked) == 3


@given(st.lists(st.integers(0, 40), max_size=60), st.integers(1, 1000))
def test_it_never_holds_more_than_it_may_plus_one_lump(sizes: list[int], room: int) -> None:
    buffer = ReplayBuffer(max_bytes=room)
    for number, size in enumerate(sizes, start=1):
        buffer.add(update(number, size))
    buffer.forget_until(0)
    known = buffer.since(0, until=len(sizes))
    if buffer.open:
        assert len(known) == len(sizes)
        assert sum(sizes) <= room
    else:
        assert sum(sizes) > room


def test_whether_it_is_open_survives_a_resume() -> None:
    buffer = filled(3)
    buffer.load_state_dict({"open": True})
    assert buffer.open
    assert buffer.since(2, until=3) == ()  # batches are not saved
    buffer.add(update(4, 10))
    assert held(buffer, after=3, until=4) == [4]
    assert buffer.state_dict() == {"open": True}
    buffer.load_state_dict({"open": False})
    assert buffer.state_dict() == {"open": False}
    buffer.add(update(5, 10))
    assert not buffer.open
    assert held(buffer, after=4, until=5) == []


@pytest.mark.parametrize(
    ("place", "sizes", "epoch", "places"),
    [
        (None, (1, 1), None, ()),
        ((2, 5), (1,), 2, (5,)),
        ((2, 5), (1, 1, 1), 2, (3, 4, 5)),
        ((2, 1), (1, 1), 2, (0, 1)),
        ((2, 1), (1, 1, 1), 2, (0, 1)),  # the first one was of the epoch before
    ],
)
def test_which_batches_of_the_epoch_an_update_was_made_of(
    place: tuple[int, int] | None, sizes: tuple[int, ...], epoch: int | None, places: tuple[int, ...]
) -> None:
    done = replace(update(1, *sizes), place=place)
    assert (done.epoch, done.places) == (epoch, places)


def test_the_newest_batches_the_oldest_of_them_first() -> None:
    buffer = ReplayBuffer(max_bytes=1e6)
    for number in range(1, 4):
        buffer.add(update(number, 10 * number, 10 * number + 1))
    assert [recipe.batch.numel() for recipe in buffer.newest(3)] == [21, 30, 31]
    assert len(buffer.newest(99)) == 6
    without = SimpleNamespace(batch=None, closure=None, rng=None)
    buffer.add(RecordedUpdate((RecordedMicroBatch(without, None),), SIGNALS, (), updates=4))
    assert [recipe.batch.numel() for recipe in buffer.newest(2)] == [30, 31]
