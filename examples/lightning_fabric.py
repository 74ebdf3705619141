"""A Fabric loop with one added line. Run it: python examples/lightning_fabric.py (a few seconds)."""

import math

import torch
from lightning.fabric import Fabric
from torch import nn

from steadystep.integrations import fabric as steady


def main(*, guarded: bool = True) -> tuple[bool, int]:
    """Train with a NaN in one of 100 batches; return whether the weights are finite, and the skipped steps."""
    torch.manual_seed(0)
    fabric = Fabric(accelerator="cpu")
    net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
    model, optimizer = fabric.setup(net, torch.optim.Adam(net.parameters(), lr=1e-2))
    watcher = steady.watch(fabric, model, optimizer) if guarded else None  # <- the added line

    for step in range(100):
        x = torch.randn(32, 8)
        if step == 40:
            x[0, 0] = math.nan
        optimizer.zero_grad()
        fabric.backward((model(x).squeeze(-1) - x.sum(-1)).square().mean())
        optimizer.step()

    refused = 0 if watcher is None else watcher.guard.attempts - watcher.guard.updates
    if watcher is not None:
        watcher.remove()
    return all(bool(p.isfinite().all()) for p in net.parameters()), refused


if __name__ == "__main__":
    finite, refused = main()
    print(f"guarded: weights finite: {finite}, {refused} step refused")
    print(f"unguarded: weights finite: {main(guarded=False)[0]}")
