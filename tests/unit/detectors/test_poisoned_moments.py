"""Adam's second moments, blown up at any step: found at the next probe, and those from before put back."""

import pytest
import torch
from torch import nn

from steadystep import Guard, Outcome


def trained(*, poison_at: int | None, beta2: float, steps: int) -> list[Outcome]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))
    direction = torch.randn(8, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, betas=(0.9, beta2))
    guard, outcomes = Guard(model, optimizer), []
    for step in range(steps):
        if step == poison_at:
            for state in optimizer.state.values():
                state["exp_avg_sq"].mul_(1e6)
        x = torch.randn(32, 8)
        outcomes.append(guard.step(lambda x: (model(x) - torch.sin(x @ direction)).square().mean(), batch=x))
    return outcomes


@pytest.mark.parametrize("beta2", [0.999, 0.95])
@pytest.mark.parametrize(("poison_at", "found_at"), [(100, 129), (200, 257), (300, 385)])
def test_poison_before_step_500_is_found_at_the_next_probe(poison_at: int, found_at: int, beta2: float) -> None:
    outcomes = trained(poison_at=poison_at, beta2=beta2, steps=found_at + 2)
    (restored,) = [outcome for outcome in outcomes if "restore-moments" in outcome.plan.actions]
    assert restored.step == found_at
    assert restored.plan.to is not None
    assert restored.plan.to < poison_at
    assert restored.stepped
