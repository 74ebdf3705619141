"""Row 13: a learning rate that leapt late in a decay was held at the largest ever, not at the last one."""

import math

import pytest

from tests.seen.broken import train


def _decayed(step: int) -> float:
    return 0.2 * 0.5 * (1.0 + math.cos(math.pi * step / 1100)) + 1e-4


@pytest.mark.parametrize("at", [600, 900])
@pytest.mark.parametrize(
    "steps", [20, pytest.param(1, marks=pytest.mark.slow), pytest.param(100, marks=pytest.mark.slow)]
)
def test_a_leap_late_in_a_decay_is_held_at_the_last_rate(steps: int, at: int) -> None:
    """SGD, a cosine by hand from 0.2 to almost nothing over 1,100 steps; x 50 from step 600 or 900 on, for a while."""
    leapt = range(at, at + steps)
    outcomes = train(at + 130, optimizer="SGD", lr=0.2, rates=lambda s: _decayed(s) * (50.0 if s in leapt else 1.0))
    last = _decayed(at - 1)
    used = [o.signals.lr * o.lr_mult for o in outcomes[at : at + steps] if o.stepped and o.signals is not None]
    assert "hold-lr" in outcomes[at].plan.actions
    assert outcomes[at].plan.lr is not None
    assert outcomes[at].plan.lr <= 1.1 * last
    assert max(used, default=0.0) <= 1.1 * last
