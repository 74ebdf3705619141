"""Row 2: CleanRL's PPO was rolled back in four seeds of four, three times to the untrained weights."""

import pytest

from tests.seen.rl import PPO
from tests.seen.twins import assert_untouched, compare


def test_ppo_is_left_alone() -> None:
    """CartPole, 4 x 128 steps, 4 epochs of 4 minibatches, Adam 2.5e-4 annealed by hand, clip 0.5; 192 updates.

    The loss is mostly the critic's, whose targets grow with what the agent earns: 20 to 30 while it learns.
    """
    assert_untouched(compare(PPO(12), [1], "watch"))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_ppo_is_left_alone_over_1440_updates(seed: int) -> None:
    """The same with 90 iterations, 46,000 steps of the environment."""
    assert_untouched(compare(PPO(90), [seed], "watch"))
