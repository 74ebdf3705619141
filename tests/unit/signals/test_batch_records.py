"""When a record of the batches is due, and of how much of them."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from steadystep.records import BatchPartStats
from steadystep.signals.batch_stats import BatchStatistics, PartStats, batch_tensors

X = torch.tensor([[0.0, 1.0], [2.0, 5.0]])


def part(*batches: Tensor, **options: Any) -> BatchPartStats:
    made = PartStats("x", batches[0], **options)
    for batch in batches:
        made.add(batch)
    return made.read(iter(made.pending().tolist()))


class TestCadence:
    def test_the_first_sixteen_then_powers_of_two_and_every_128th(self) -> None:
        statistics, counts = BatchStatistics(), {}
        for step in range(600):
            statistics.add((X,), step)
            if statistics.waiting:
                counts[step] = statistics.read(statistics.waiting[0].tolist()).batches
                assert statistics.waiting == []
        assert counts == {15: 16, 16: 17, 32: 18, 64: 19, 128: 20, 256: 21, 384: 22, 512: 23}

    def test_a_record_that_nobody_has_read_is_made_again(self) -> None:
        statistics = BatchStatistics()
        for step in range(4):
            statistics.add((X,), step, enough=2)
            assert bool(statistics.waiting) is (step in (1, 2))

    @pytest.mark.parametrize(
        "second", [None, {"y": X}, {"x": torch.tensor(1.0)}, {"x": X.to(torch.complex64)}, {"x": X.to_sparse()}]
    )
    def test_a_part_that_is_missing_ends_it(self, second: Any) -> None:
        statistics = BatchStatistics()
        for step, batch in enumerate(({"x": X}, second, {"x": X}, {"x": X})):
            statistics.add(batch, step, enough=1)
            assert bool(statistics.waiting) is (step == 0)

    def test_of_two_parts_both_must_come(self) -> None:
        statistics = BatchStatistics()
        for step, batch in enumerate(({"x": X, "y": X}, {"x": X}, {"x": X, "y": X})):
            statistics.add(batch, step, enough=1)
            assert bool(statistics.waiting) is (step == 0)

    def test_each_part_has_numbers_of_its_own(self) -> None:
        statistics = BatchStatistics()
        statistics.add((X, X + 1.0), 0, enough=1)
        first, second = statistics.read(statistics.waiting[0].tolist()).parts
        assert second.mean == pytest.approx(first.mean + 1.0)

    def test_a_batch_with_nothing_ends_it_at_once(self) -> None:
        statistics = BatchStatistics()
        for batch in ("text", (X,), (X,)):
            statistics.add(batch, 0, enough=1)
            assert statistics.waiting == []

    def test_what_cannot_be_measured_costs_the_record(self, monkeypatch: pytest.MonkeyPatch) -> None:
        statistics = BatchStatistics()
        statistics.add((X,), 0, enough=1)
        monkeypatch.setattr(PartStats, "add", lambda *_: 1 / 0)
        statistics.add((X,), 1, enough=1)
        assert statistics.waiting == []
        monkeypatch.undo()
        statistics.add((X,), 2, enough=1)
        assert statistics.waiting == []


def test_the_first_six_of_64_parts() -> None:
    found = batch_tensors([torch.tensor(1.0), *[X.clone().requires_grad_() for _ in range(9)]])
    assert [name for name, _ in found] == [f"[{i}]" for i in range(1, 7)]
    assert not any(tensor.requires_grad for _, tensor in found)
    assert batch_tensors([X.to(torch.complex64)]) == []
    assert batch_tensors([0] * 62 + [X])  # with the list itself 64
    assert batch_tensors([0] * 63 + [X]) == []
    assert batch_tensors([0] * 80 + [X]) == []


class TestLengths:
    def test_another_length_makes_it_one_feature(self) -> None:
        statistics = BatchStatistics()
        wide = torch.tensor([[4.0, 6.0, 8.0]])
        for step, batch in enumerate((X, wide, X)):
            statistics.add((batch,), step, enough=3)
        (found,) = statistics.read(statistics.waiting[0].tolist()).parts
        assert found.mean == pytest.approx((18.0 + 8.0) / 7)  # of those since, by value
        assert (found.smallest, found.largest, found.rows, found.counted) == (0.0, 8.0, 2, 7)

    def test_as_many_rows_as_fill_what_is_measured(self) -> None:
        rows = torch.zeros(3, 1 << 15)
        rows[1], rows[2] = 1.0, 7.0
        assert part(rows).largest == 1.0
        wide = torch.full((2, 1 << 17), 3.0)
        wide[1] = 7.0
        assert part(wide).largest == 3.0, "one row at least, and no more"


class TestLabels:
    @pytest.mark.parametrize(("largest", "known"), [(1022, True), (1023, False)])
    def test_small_whole_numbers(self, largest: int, known: bool) -> None:
        found = part(torch.tensor([0, largest]))
        assert found.values == (2 if known else 0)
        assert math.isnan(found.entropy) is not known
        assert part(torch.tensor([0.0, float(largest)])).values == found.values

    @pytest.mark.parametrize(("width", "known"), [(4096, True), (4097, False)])
    def test_rows_of_many_values_are_no_labels(self, width: int, known: bool) -> None:
        assert part(torch.arange(width)[None] % 3).values == (3 if known else 0)

    @pytest.mark.parametrize("odd", [0.5, -1.0, math.nan, math.inf])
    def test_one_that_is_none_settles_it(self, odd: float) -> None:
        assert part(torch.tensor([0.0, 1.0])).values == 2
        assert part(torch.tensor([0.0, 1.0]), torch.tensor([odd, 1.0])).values == 0


class TestShares:
    @pytest.mark.parametrize(
        ("row", "known"),
        [
            ((0.25, 0.75), True),
            ((0.25, 0.7509), True),
            ((0.25, 0.7511), False),
            ((0.25, 0.7489), False),
            ((-0.25, 1.25), False),
        ],
    )
    def test_rows_that_add_up_to_one(self, row: tuple[float, float], known: bool) -> None:
        found = part(torch.tensor([row, (0.5, 0.5)]))
        assert math.isnan(found.conditional) is math.isnan(found.marginal) is not known
        alone = part(torch.tensor([[1.0], [1.0]]))
        assert math.isnan(alone.conditional)  # a single number is no share

    def test_the_entropy_within_rows_and_of_their_mean(self) -> None:
        found = part(torch.tensor([[0.5, 0.5], [1.0, 0.0]]))
        assert found.conditional == pytest.approx(math.log(2.0) / 2.0)
        assert found.marginal == pytest.approx(-0.75 * math.log(0.75) - 0.25 * math.log(0.25))

    @pytest.mark.parametrize(
        ("largest", "smallest", "known"), [(1.0, 0.0, True), (1.01, 0.0, False), (1.0, -0.01, False)]
    )
    def test_values_between_zero_and_one(self, largest: float, smallest: float, known: bool) -> None:
        found = part(torch.tensor([largest, smallest, 0.5, 0.5]))
        assert math.isnan(found.binary) is not known


class TestRows:
    @pytest.mark.parametrize(("rows", "counted"), [(2048, 4096), (2049, 2049)])
    def test_up_to_4096_are_told_apart(self, rows: int, counted: int) -> None:
        found = part(torch.arange(float(rows)), torch.arange(float(rows)) + 0.5)
        assert found.counted == found.distinct == counted

    def test_equal_rows_count_once(self) -> None:
        assert (part(X, X.clone()).counted, part(X, X.clone()).distinct) == (4, 2)
        swapped = X.flip(1)
        assert part(X, swapped).distinct == 4

    @pytest.mark.parametrize(("at", "counted"), [(1, 2), (7, 14), (8, 24), (11, 24)])
    def test_the_same_memory_holds_no_further_samples(self, at: int, counted: int) -> None:
        """Of the first eight batches; later ones are not held, so that their memory may be used again."""
        batches = [X + i for i in range(12)]
        batches[at] = batches[at - 1]
        found = part(*batches)
        assert found.counted == counted
        assert not found.repeated

    def test_equal_batches_are_repeated_where_each_is_a_new_tensor(self) -> None:
        assert part(X, X.clone()).repeated
        assert not part(X, X).repeated  # the whole data set in one batch
        assert not part(X.long(), x := X.long(), x).repeated
        assert part(X.long(), X.long()).repeated
        assert not part(X).repeated
        assert not part(X, X.clone(), X + 1.0, X.clone()).repeated
        assert not part(X, X.flip(0)).repeated
