"""Row 8: a loss that is NaN for a constant, with finite gradients, led to three rollbacks and untrained weights."""

import pytest

from tests.seen.tasks import NanMetric
from tests.seen.twins import Way, assert_no_worse, compare


@pytest.mark.parametrize(("in_a_row", "way"), [(40, "guard"), pytest.param(40, "watch", marks=pytest.mark.slow)])
def test_a_nan_that_no_gradient_sees_costs_nothing(in_a_row: int, way: Way) -> None:
    """Regression, Adam 3e-3, 1,000 steps; a NaN metric is added to the loss on 30 % of the batches, 40 in a row."""
    assert_no_worse(compare(NanMetric(in_a_row), [0], way), by=0.10)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["guard", "batch", "watch"])
@pytest.mark.parametrize("in_a_row", [1, 5, 15, 40, 100])
def test_longer_rows_of_them(in_a_row: int, way: Way) -> None:
    """One to a hundred in a row, three seeds."""
    assert_no_worse(compare(NanMetric(in_a_row), range(3), way), by=0.10)
