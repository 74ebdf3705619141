"""Splitting a batch: every row once, in order, and weights that make the mean of the whole."""

from collections import OrderedDict, UserDict, defaultdict, namedtuple
from dataclasses import dataclass, field
from types import MappingProxyType, SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from steadystep.errors import ConfigError, MisuseError
from steadystep.memory import scale_lr, split_batch


@dataclass(frozen=True)
class Record:
    x: Tensor
    names: list
    note: str = "kept"
    seen: Tensor | None = field(default=None, init=False)


Pair = namedtuple("Pair", ["x", "y"])


@given(rows=st.integers(1, 40), data=st.data())
def test_every_row_comes_once_and_in_order(rows: int, data: st.DataObject) -> None:
    parts = data.draw(st.integers(1, rows))
    split = split_batch(torch.arange(rows), parts)
    assert torch.cat([part.batch for part in split]).tolist() == list(range(rows))
    sizes = [part.size for part in split]
    assert len(split) == parts
    assert max(sizes) - min(sizes) <= 1
    assert sum(part.weight for part in split) == pytest.approx(1.0)
    assert [part.weight for part in split] == pytest.approx([size / rows for size in sizes])


@given(rows=st.integers(1, 24), data=st.data(), seed=st.integers(0, 99))
def test_the_weighted_mean_of_the_parts_is_the_mean_of_the_whole(rows: int, data: st.DataObject, seed: int) -> None:
    parts = data.draw(st.integers(1, rows))
    x = torch.randn(rows, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    mean = sum(part.batch.square().mean() * part.weight for part in split_batch(x, parts))
    torch.testing.assert_close(mean, x.square().mean())


@given(mask=st.lists(st.booleans(), min_size=2, max_size=24), seed=st.integers(0, 99))
def test_and_so_with_a_count_of_tokens(mask: list[bool], seed: int) -> None:
    counted = torch.tensor(mask)
    x = torch.randn(len(mask), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    split = split_batch({"x": x, "on": counted}, 2, count=lambda part: part["on"].sum())
    if not any(mask):
        assert [part.weight for part in split] == [part.size / len(mask) for part in split]
        return
    mean = sum(part.batch["x"][part.batch["on"]].mean() * part.weight for part in split if part.weight)
    torch.testing.assert_close(mean, x[counted].mean())


def test_structures_keep_their_classes() -> None:
    x, y = torch.arange(6), np.arange(12).reshape(6, 2)
    default = defaultdict(list, x=x, y=y)
    for batch in (
        {"x": x, "y": y},
        OrderedDict(x=x, y=y),
        UserDict(x=x, y=y),
        default,
    ):
        first, second = (part.batch for part in split_batch(batch, 2))
        assert type(first) is type(batch)
        assert first["x"].tolist() == [0, 1, 2]
        assert second["y"].tolist() == [[6, 7], [8, 9], [10, 11]]
        assert batch["x"] is x
    for batch in ([x, y], (x, y), Pair(x, y)):
        first, _ = (part.batch for part in split_batch(batch, 2))
        assert type(first) is type(batch)
        assert first[1].tolist() == [[0, 1], [2, 3], [4, 5]]
    read_only = split_batch(MappingProxyType({"x": x}), 3)
    assert [part.batch["x"].tolist() for part in read_only] == [[0, 1], [2, 3], [4, 5]]


def test_dataclasses_and_what_goes_into_every_part() -> None:
    record = Record(x=torch.arange(4), names=["a", "b", "c", "d"])
    object.__setattr__(record, "seen", torch.arange(4) * 2)
    nested = {"record": record, "scale": torch.tensor(2.0), "k": 3, "empty": [], "none": None, "shape": (8, 8, 3, 1)}
    _, second = (part.batch for part in split_batch(nested, 2))
    assert second["record"].x.tolist() == [2, 3]
    assert second["record"].names == ["c", "d"]
    assert second["record"].seen.tolist() == [4, 6]
    assert second["record"].note == "kept"
    assert second["scale"] is nested["scale"]
    assert (second["k"], second["empty"], second["none"], second["shape"]) == (3, [], None, (8, 8, 3, 1))
    assert record.x.tolist() == [0, 1, 2, 3]


def test_what_a_loader_collates() -> None:
    rows = [(torch.ones(2) * i, i, f"file {i}") for i in range(4)]
    batch = next(iter(torch.utils.data.DataLoader(rows, batch_size=4)))
    _, (x, number, name) = (part.batch for part in split_batch(batch, 2))
    assert x.tolist() == [[2, 2], [3, 3]]
    assert number.tolist() == [2, 3]
    assert name == ("file 2", "file 3")


def test_parts_are_views_and_one_part_is_the_batch_itself() -> None:
    x = torch.zeros(4, 2)
    assert split_batch(x, 2)[1].batch.data_ptr() == x[2:].data_ptr()
    assert split_batch(x, 1)[0].batch is x


def itself() -> list:
    loop: list = []
    loop.append(loop)
    return loop


@pytest.mark.parametrize(
    ("batch", "says"),
    [
        ({"x": torch.ones(4, 2), "mask": torch.ones(3)}, r"batch\['x'\] has 4, batch\['mask'\] has 3"),
        ((torch.ones(4), ["a", "b"]), r"batch\[0\] has 4, batch\[1\] has 2"),
        ({"x": SimpleNamespace(y=torch.ones(4))}, r"batch\['x'\]: no rule for a SimpleNamespace"),
        (torch.nn.utils.rnn.pack_sequence([torch.ones(2), torch.ones(1)]), "PackedSequence"),
        (torch.ones(4, 2).to_sparse(), "nested or sparse"),
        (torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged), "nested or sparse"),
        (3.0, "nothing in this batch has rows"),
        (None, "nothing in this batch has rows"),
        (torch.tensor(1.0), "nothing in this batch has rows"),
        (itself(), "contains itself"),
    ],
)
def test_a_batch_that_cannot_be_split_says_why(batch: object, says: str) -> None:
    with pytest.raises(MisuseError, match=says):
        split_batch(batch, 2)


@pytest.mark.parametrize("parts", [0, -1, 5])
def test_a_number_of_parts_that_cannot_be(parts: int) -> None:
    with pytest.raises(MisuseError, match="4 rows can be split into 1 to 4 parts"):
        split_batch(torch.ones(4), parts)


@pytest.mark.parametrize("bad", [-1.0, float("nan"), float("inf")])
def test_a_count_that_is_none(bad: float) -> None:
    with pytest.raises(MisuseError, match="count returned"):
        split_batch(torch.ones(4), 2, count=lambda _: bad)


@given(lr=st.floats(1e-6, 1.0), batch=st.integers(1, 10**6), base=st.integers(1, 10**6))
def test_learning_rate_and_batch(lr: float, batch: int, base: int) -> None:
    linear = scale_lr(lr, batch_size=batch, base_batch_size=base)
    root = scale_lr(lr, batch_size=batch, base_batch_size=base, rule="sqrt")
    assert linear / lr == pytest.approx(batch / base)
    assert (root / lr) ** 2 == pytest.approx(batch / base)
    assert scale_lr(linear, batch_size=base, base_batch_size=batch) == pytest.approx(lr)


@pytest.mark.parametrize(
    "wrong", [{"lr": 0.0}, {"batch_size": -1}, {"base_batch_size": float("nan")}, {"rule": "cube"}]
)
def test_learning_rate_settings_that_mean_nothing(wrong: dict) -> None:
    given = {"lr": 0.1, "batch_size": 8, "base_batch_size": 8, **wrong}
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        scale_lr(given.pop("lr"), **given)
