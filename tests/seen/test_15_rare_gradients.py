"""Row 15: zero gradients in nine steps of ten were warned of again and again."""

import pytest

from tests.seen.tasks import RareReward
from tests.seen.twins import Way, compare


@pytest.mark.parametrize("way", [pytest.param("guard", marks=pytest.mark.slow), "watch"])
def test_rare_gradients_are_mentioned_a_few_times_at_most(way: Way) -> None:
    """Regression, SGD 0.05, 1,000 steps of which every tenth has a loss; the others are exactly zero."""
    pair = compare(RareReward(), [0], way)[0]
    assert pair.bit_identical, pair
    assert len(pair.warnings) <= 3, pair
