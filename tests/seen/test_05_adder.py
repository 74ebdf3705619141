"""Row 5: minGPT's adder clips at 1.0 by itself, and still had a gradient rescaled at step 225."""

import pytest

from tests.seen.text import Adder
from tests.seen.twins import assert_untouched, compare


def test_the_adder_is_left_alone() -> None:
    """Two digits, two blocks of width 32, AdamW 5e-4 (0.9, 0.95), decay 0.1, batches of 32, clip 1.0; 250 steps."""
    assert_untouched(compare(Adder(250), [0], "watch"))


@pytest.mark.slow
@pytest.mark.parametrize("digits", [1, 2, 3])
def test_adders_of_all_sizes_are_left_alone(digits: int) -> None:
    """One to three digits, 1,000 steps, three seeds."""
    assert_untouched(compare(Adder(1000, digits), range(3), "watch"))
