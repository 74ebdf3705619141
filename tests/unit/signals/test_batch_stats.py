"""What is measured of batches: how much of them, after how many, and of sequences."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from steadystep.records import BatchStats
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
    assert copies.read(*copies.pending(torch.device("cpu")).tolist()) == found


@pytest.mark.parametrize(("width", "shifted"), [(3, False), (4, True)])
def test_the_next_token_is_recognized_from_four_on(width: int, shifted: bool) -> None:
    tokens = torch.arange(2 * (width + 1)).reshape(2, width + 1)
    batches = [(tokens[:, :-1].clone(), tokens[:, 1:].clone())] * 2
    assert measured(batches).shifted is shifted
    assert not measured([(tokens[:, :-1].clone(), tokens[:, :-1].clone())] * 2).shifted


def test_sparse_gradients_are_compared_by_what_they_hold() -> None:
    dense = torch.tensor([[0.0, 1.0], [0.0, 0.0]])
    assert _equal(dense.to_sparse(), dense.to_sparse())
    assert not _equal(dense.to_sparse(), (2.0 * dense).to_sparse())
    assert _equal(None, None)
    assert not _equal(None, dense)
