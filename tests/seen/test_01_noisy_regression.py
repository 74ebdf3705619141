"""Row 1: noisy regression was rolled back, once to the untrained weights, and halted."""

import pytest

from tests.seen.tasks import NoisyRegression
from tests.seen.twins import Way, assert_untouched, compare

LARGE, SMALL, FEW = NoisyRegression(0.05, 0.3, 32), NoisyRegression(0.03, 0.1, 32), NoisyRegression(0.03, 0.1, 16)


SLOW = pytest.mark.slow
CASES = [pytest.param(LARGE, 1, id="large", marks=SLOW), pytest.param(SMALL, 2, id="small", marks=SLOW)]
CASES += [pytest.param(FEW, 1, id="few")]


@pytest.mark.parametrize(("program", "seed"), CASES)
def test_a_noisy_regression_is_left_alone(program: NoisyRegression, seed: int) -> None:
    """4-32-32-1 tanh, SGD 0.9, 1,200 steps: lr 0.05 with noise 0.3, lr 0.03 with noise 0.1, batches of 32 and 16.

    The loss wanders by a half and falls all the way: 1.5 to 0.12 or less, held out.
    """
    pairs = compare(program, [seed])
    assert pairs[0].held_out_plain < 0.2
    assert_untouched(pairs)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["guard", "batch", "watch"])
@pytest.mark.parametrize("program", [LARGE, SMALL, FEW], ids=["large", "small", "few"])
def test_many_noisy_regressions_are_left_alone(program: NoisyRegression, way: Way) -> None:
    """The same, ten seeds of each and all ways to be guarded."""
    assert_untouched(compare(program, range(10), way))
