"""Row 12: of fifteen gradients a thousand times too large eleven were refused and the twelfth let through."""

import pytest

from tests.seen.broken import train


@pytest.mark.parametrize(
    ("optimizer", "lr", "at"),
    [("SGD", 0.01, 400), pytest.param("SGD", 0.1, 1000, marks=pytest.mark.slow), ("Adam", 3e-3, 1000)],
)
@pytest.mark.parametrize("row", [15, pytest.param(19, marks=pytest.mark.slow)])
def test_a_row_of_huge_gradients_never_gets_through(optimizer: str, lr: float, at: int, row: int) -> None:
    """A small classifier; all gradients x 1,000 for 15 steps: the loss must stay where it was."""
    fault = [{"kind": "grad-scale", "at": at, "for": row, "factor": 1000}]
    losses = [outcome.loss for outcome in train(at + 150, fault=fault, optimizer=optimizer, lr=lr)]
    assert max(losses[at:]) < 1.5 * max(losses[at - 200 : at])
    assert sum(losses[-50:]) < 1.2 * sum(losses[at - 50 : at])
