"""Row 10: with `recovery.snapshots: 2` a NaN weight cost a large part of the run."""

import pytest

from tests.seen.broken import nan_weights, train
from tests.seen.twins import lost_updates


@pytest.mark.parametrize("at", [1000, *(pytest.param(at, marks=pytest.mark.slow) for at in (1300, 3000))])
def test_two_snapshots_lose_170_updates_at_most(at: int) -> None:
    """A small classifier, Adam 3e-3, no batch=; one weight becomes NaN at step 1,000, 1,300 or 3,000."""
    outcomes = train(at + 50, fault=nan_weights(at), config={"recovery": {"snapshots": 2}})
    lost = lost_updates(outcomes)
    assert len(lost) == 1
    assert lost[0] <= 170


@pytest.mark.slow
@pytest.mark.parametrize("snapshots", [1, 2, 3, 4])
def test_no_place_in_the_run_loses_more(snapshots: int) -> None:
    """The same at many steps: states are taken and dropped in a rhythm, and the worst moment counts."""
    for at in (640, 1290, 1930, 2570):
        outcomes = train(at + 10, fault=nan_weights(at), config={"recovery": {"snapshots": snapshots}})
        assert max(lost_updates(outcomes)) <= (340 if snapshots == 1 else 170), at
