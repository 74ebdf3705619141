"""What is measured of batches: how much of them, after how many, and of sequences."""

import dataclasses
import math
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tools.step_calls import Operators

from steadystep.records import BatchPartStats, BatchStats
from steadystep.signals.batch_stats import BatchStatistics, PartStats
from steadystep.signals.gradients import _equal
from steadystep.signals.losses import Copies


def measured(batches: list[tuple[torch.Tensor, ...]]) -> BatchStats:
    statistics = BatchStatistics()
    for step, batch in enumerate(batches):
        statistics.add(batch, step, enough=len(batches))
    (waiting,) = statistics.waiting
    return statistics.read(waiting.tolist())


@given(st.lists(st.integers(0, 5), min_size=2, max_size=40), st.integers(1, 4))
def test_labels_of_all_batches_together(labels: list[int], times: int) -> None:
    (part,) = measured([(torch.tensor(labels),)] * times).parts
    shares = [labels.count(kind) / len(labels) for kind in set(labels)]
    entropy = -sum(share * math.log(share) for share in shares)
    assert part.entropy == pytest.approx(entropy, abs=1e-5)
    assert part.entropy_within == pytest.approx(entropy, abs=1e-5)
    assert part.values == len(set(labels))
    assert part.mean == pytest.approx(sum(labels) / len(labels), abs=1e-5)
    assert (part.smallest, part.largest) == (min(labels), max(labels))


KINDS = ("numbers", "labels", "ignored", "shares", "unit", "mixed", "not finite", "double", "half")


def batches_of(kind: str, count: int, seed: int, *, width: int = 3) -> list[torch.Tensor]:
    rng = torch.Generator().manual_seed(seed)
    made = []
    for i in range(count):
        normal, whole = torch.randn(6, width, generator=rng), torch.randint(0, 4, (6, width), generator=rng)
        made.append(
            {
                "numbers": normal,
                "labels": whole,
                "ignored": torch.where(whole == 3, -100, whole),
                "shares": normal.softmax(1),
                "unit": normal.sigmoid(),
                "mixed": normal if i == count // 2 else (whole == 0).float(),
                "not finite": normal / (whole != 2),
                "double": normal.double(),
                "half": normal.bfloat16(),
            }[kind]
        )
    return made


def fields_of(record: BatchPartStats) -> dict[str, str]:
    return {field.name: repr(getattr(record, field.name)) for field in dataclasses.fields(record)}


def record_of(part: PartStats) -> BatchPartStats:
    return part.read(iter(part.pending().float().tolist()))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("repeated", [False, True])
def test_what_a_record_has_settled_is_left_out_of_the_next_without_a_difference(
    kind: str, width: int, repeated: bool
) -> None:
    batches = batches_of(kind, 20, 0, width=width)
    batches = [batches[0].clone() for _ in batches] if repeated else batches
    often, once = PartStats("x", batches[0]), PartStats("x", batches[0])
    for batch in batches:
        often.add(batch)
        once.add(batch)
        record_of(often)
    assert fields_of(record_of(often)) == fields_of(record_of(once))
    same = repeated or (kind, width) == ("shares", 1)  # a share of one is 1
    assert record_of(once).repeated is same or kind == "not finite"


@pytest.mark.parametrize("kind", KINDS[:5])
@given(count=st.integers(1, 20), seed=st.integers(0, 99))
def test_the_record_is_that_of_all_values_at_once(kind: str, count: int, seed: int) -> None:
    batches = batches_of(kind, count, seed)
    part = PartStats("x", batches[0])
    for batch in batches:
        part.add(batch)
    found, values = record_of(part), np.stack([batch.double().numpy() for batch in batches])
    rows = values.reshape(-1, 3)
    means, apart = (
        rows.mean(0),
        np.abs(values - np.stack([batch.median(0).values.double() for batch in batches])[:, None]),
    )
    near = partial(pytest.approx, rel=1e-4, abs=1e-5)
    assert (found.mean, found.std, found.variance) == (near(rows.mean()), near(rows.std()), near(rows.var(0).mean()))
    assert found.within == near(values.var(1).mean() / rows.var(0).mean(), nan_ok=True)
    assert found.deviation == near(apart.mean())
    assert found.huber == near(np.where(apart < 1, apart**2 / 2, apart - 0.5).mean())
    kept = rows[rows != -100] if kind == "ignored" else rows
    assert (found.smallest, found.largest, found.ignored) == (
        near(kept.min()),
        near(kept.max()),
        near((rows == -100).mean()),
    )
    assert (found.rows, found.counted, found.distinct) == (6, len(rows[:96]), len(np.unique(rows[:96], axis=0)))
    is_unit, is_shares = kept.min() >= 0 and kept.max() <= 1, kind == "shares"
    assert found.binary == near(
        np.mean([entropy([m, 1 - m]) for m in means.clip(0, 1)]) if is_unit else math.nan, nan_ok=True
    )
    assert found.marginal == near(entropy(means) if is_shares else math.nan, nan_ok=True)
    assert found.conditional == near(np.mean([entropy(row) for row in rows]) if is_shares else math.nan, nan_ok=True)
    counts = np.unique(kept, return_counts=True)[1] if kind in ("labels", "ignored") else None
    assert found.values == (0 if counts is None else len(counts))
    assert found.entropy == near(math.nan if counts is None else entropy(counts / counts.sum()), nan_ok=True)


def entropy(shares: Any) -> float:
    return -sum(share * math.log(share) for share in shares if share > 0.0)


def test_settled_parts_launch_less() -> None:
    batches = batches_of("numbers", 20, 0)
    part, launches = PartStats("x", batches[0]), []
    for batch in batches:
        with Operators() as counted:
            part.add(batch)
            part.pending()
        launches.append(counted.launched.total())
        record_of(part)
    assert launches[-1] == min(launches) <= 31
    assert launches[0] > 60


def test_a_part_that_was_measured_elsewhere_is_taken_over() -> None:
    statistics, target = BatchStatistics(), PartStats("['y']", torch.zeros(6, 3))
    for step, (x, y) in enumerate(zip(batches_of("numbers", 4, 0), batches_of("unit", 4, 1), strict=True)):
        target.add(y)
        statistics.add({"x": x, "y": y}, step, enough=4, measured={"['y']": target})
    record = statistics.read(statistics.waiting[0].tolist())
    assert [part.name for part in record.parts] == ["['x']", "['y']"]
    assert fields_of(record.parts[1]) == fields_of(record_of(target))
    assert (record.batches, record.shifted) == (4, False)
    assert statistics._parts["['y']"] is target, "and not measured again"


def test_of_a_large_tensor_the_first_rows_are_measured() -> None:
    rows = torch.zeros(4, 1 << 15)
    rows[2:] = 7.0
    part = PartStats("x", rows)
    part.add(rows)
    read = part.read(iter(part.pending().tolist()))
    assert (read.rows, read.largest) == (4, 0.0)  # two rows fill what is measured


def test_a_value_below_zero_is_no_label() -> None:
    (part,) = measured([(torch.tensor([-1, 0, 1]),)]).parts
    assert math.isnan(part.entropy)
    (part,) = measured([(torch.tensor([-100, 0, 1]),)]).parts
    assert part.entropy == pytest.approx(math.log(2.0))
    assert part.ignored == pytest.approx(1 / 3)


@pytest.mark.parametrize(("times", "found"), [(2, ""), (3, "feature 1 of the input")])
def test_a_copy_of_the_target_takes_three_batches(times: int, found: str) -> None:
    rng, copies = torch.Generator().manual_seed(0), Copies()
    for _ in range(times):
        inputs = torch.randn(16, 3, generator=rng)
        target = torch.randint(0, 4, (16,), generator=rng)
        inputs[:, 1] = 2.0 * target + 1.0
        copies.add(inputs, target)
        assert copies.read(*copies.pending(torch.device("cpu")).tolist()) == (found if _ == 2 else "")


def test_features_that_are_no_copy_once_are_not_compared_again() -> None:
    rng, copies = torch.Generator().manual_seed(0), Copies()
    home = torch.device("cpu")
    for i in range(6):
        inputs, target = torch.randn(16, 3, generator=rng), torch.randint(0, 4, (16,), generator=rng)
        inputs[:, 1] = target if i != 2 else inputs[:, 1]
        with Operators() as counted:
            copies.add(inputs, target)
        assert bool(counted.launched) is (i < 3)
        assert copies.read(*copies.pending(home).tolist()) == ""


@pytest.mark.parametrize(("width", "shifted"), [(3, False), (4, True)])
def test_the_next_token_is_recognized_from_four_on(width: int, shifted: bool) -> None:
    tokens = torch.arange(2 * (width + 1)).reshape(2, width + 1)
    batches = [(tokens[:, :-1].clone(), tokens[:, 1:].clone())] * 2
    assert measured(batches).shifted is shifted
    assert not measured([(tokens[:, :-1].clone(), tokens[:, :-1].clone())] * 2).shifted
    assert not measured([(tokens[:, :-1].clone(), tokens[:, 1:].float())] * 2).shifted


def test_sparse_gradients_are_compared_by_what_they_hold() -> None:
    dense = torch.tensor([[0.0, 1.0], [0.0, 0.0]])
    assert _equal(dense.to_sparse(), dense.to_sparse())
    assert not _equal(dense.to_sparse(), (2.0 * dense).to_sparse())
    assert _equal(None, None)
    assert not _equal(None, dense)
