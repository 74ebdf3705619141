"""Two cuts of the learning rate in a run, and what has to become of it: low at once, never above, given back."""

import pytest
import torch
from torch import Tensor, nn

from steadystep.schedule.learning_rate_cut import Ceiling

LR = 1e-2
FIRST, SECOND, STEPS = 5, 10, 510
X = torch.randn(16, 4, generator=torch.Generator().manual_seed(0))


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).squeeze(-1)


def loss_of(model: nn.Module) -> Tensor:
    return (model(X) - X.sum(-1)).square().mean() + 0.1


def cut(ceiling: Ceiling, step: int, asked: float) -> None:
    """What a rollback for damage by updates does to the rate, at two steps."""
    if step in (FIRST, SECOND):
        ceiling.limit((0.7 if step == FIRST else 0.35) * asked)
        ceiling.rewarm(50)


def check(used: list[float], asked: list[float]) -> None:
    """Low after both cuts, never above what is asked, and given back by the rule."""
    assert len(used) == len(asked) == STEPS
    assert used[FIRST] < 0.2 * asked[FIRST]
    assert used[SECOND] < 0.2 * asked[SECOND]
    assert all(u <= a * (1 + 1e-6) for u, a in zip(used, asked, strict=True))
    assert used[-30:] == pytest.approx(asked[-30:], rel=1e-6)
