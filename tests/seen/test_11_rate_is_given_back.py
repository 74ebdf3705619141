"""Row 11: after a second rollback the learning rate was never given back."""

import pytest

from tests.seen.broken import nan_weights, train


def test_the_rate_comes_back_after_two_rollbacks() -> None:
    """A small classifier, Adam 3e-3, no batch=; weights become NaN at steps 400 and 700 of 1,100."""
    outcomes = train(1100, fault=nan_weights(400, 700))
    assert sum(outcome.restored is not None for outcome in outcomes) == 2
    assert [o.step for o in outcomes[-200:] if o.lr_mult < 1.0] == []


@pytest.mark.slow
def test_a_fault_every_500_steps_leaves_the_rate_alone_most_of_the_time() -> None:
    """The same for 6,000 steps: eleven NaN weights."""
    outcomes = train(6000, fault=nan_weights(*range(500, 6000, 500)))
    assert sum(outcome.restored is not None for outcome in outcomes) == 11
    low = sum(outcome.lr_mult < 0.9 for outcome in outcomes)
    assert low < 0.05 * len(outcomes), f"{low} of {len(outcomes)} steps at a lowered rate"
