"""Your own loop, guarded by one added line. Run it: python examples/watch.py (a few seconds on a CPU).

One batch holds a NaN, and the gradients of one step are a thousand times too large. Without the marked line the
weights are NaN from step 60 on.
"""

import math

import torch
from torch import nn

import steadystep


def main(*, guarded: bool = True, steps: int = 200) -> float:
    """Train with injected faults and return the held-out loss."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    watcher = steadystep.watch(model, optimizer) if guarded else None  # <- the added line

    for step in range(steps):
        x = torch.randn(32, 8)
        y = x.sum(-1) + torch.randn(32)
        if step == 60:
            x[3, 3] = math.nan
        loss = (model(x).squeeze(-1) - y).square().mean()
        optimizer.zero_grad()
        loss.backward()
        if step == 120:
            for parameter in model.parameters():
                parameter.grad *= 1000.0
        optimizer.step()
        scheduler.step()
        if watcher is not None and watcher.outcome is not None and watcher.outcome.plan.actions:
            print(f"step {step}: {', '.join(watcher.outcome.plan.actions)} [{watcher.outcome.diagnosis.cause}]")

    if watcher is not None:
        watcher.remove()
    model.eval()
    with torch.no_grad():
        x = torch.randn(4096, 8, generator=torch.Generator().manual_seed(1))
        return float((model(x).squeeze(-1) - x.sum(-1)).square().mean())


if __name__ == "__main__":
    print(f"held-out error, guarded:   {main():.3f}")
    print(f"held-out error, unguarded: {main(guarded=False):.3f}")
