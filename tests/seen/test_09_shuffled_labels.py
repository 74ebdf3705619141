"""Row 9: ten batches of shuffled labels were rolled back: 1.046 of the clean twin, 1.018 without a guard."""

import pytest

from tests.seen.text import CharModel
from tests.seen.twins import Way, compare, plain


def _ratios(kind: str, steps: int, first: int, seed: int, way: Way) -> tuple[float, float, str]:
    clean = plain(CharModel(kind, (), steps), seed).held_out
    pair = compare(CharModel(kind, tuple(range(first, first + 10)), steps), [seed], way)[0]
    return pair.held_out_plain / clean, pair.held_out_guarded / clean, str(pair)


@pytest.mark.parametrize(
    ("kind", "steps", "first"), [pytest.param("nanogpt", 400, 250, marks=pytest.mark.slow), ("makemore", 800, 500)]
)
def test_ten_batches_of_shuffled_labels_cost_no_more_than_without_a_guard(kind: str, steps: int, first: int) -> None:
    """nanoGPT: two blocks of 32, AdamW 1e-3, clip 1.0, 16 x 32 letters. makemore: 8 letters, tanh 100, SGD 0.1."""
    alone, guarded, said = _ratios(kind, steps, first, 0, "guard")
    assert guarded <= alone + 0.01, f"{guarded:.4f} of the clean twin, {alone:.4f} without a guard: {said}"


@pytest.mark.slow
@pytest.mark.parametrize("way", ["guard", "batch", "watch"])
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(("kind", "steps", "first"), [("nanogpt", 600, 300), ("makemore", 1500, 1000)])
def test_the_same_later_and_in_all_ways(kind: str, steps: int, first: int, seed: int, way: Way) -> None:
    """As above over 600 and 1,500 steps."""
    alone, guarded, said = _ratios(kind, steps, first, seed, way)
    assert guarded <= alone + 0.01, f"{guarded:.4f} of the clean twin, {alone:.4f} without a guard: {said}"
