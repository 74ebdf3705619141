"""Row 7: raw inputs behind BatchNorm were diagnosed as "unscaled-data" while the loss fell twentyfold."""

import pytest

from tests.seen.tasks import RawInputs
from tests.seen.twins import assert_untouched, compare


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)])
def test_raw_inputs_behind_batchnorm_are_healthy(seed: int) -> None:
    """Eight features of size 1 to 10,000 around 0 to 1,000, BatchNorm first, Adam 1e-2, 800 steps, with batch=."""
    pairs = compare(RawInputs(), [seed], "batch")
    losses = [outcome.loss for outcome in pairs[0].outcomes]
    assert sum(losses[-50:]) * 20 < sum(losses[:5]) * 10
    assert_untouched(pairs)
