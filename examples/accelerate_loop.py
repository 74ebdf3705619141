"""An Accelerate loop with one added line. Run it: python examples/accelerate_loop.py (a few seconds)."""

import math

import torch
from accelerate import Accelerator
from torch import nn

from steadystep.integrations import accelerate as steady


def main(*, guarded: bool = True) -> tuple[bool, int]:
    """Train with a NaN in one of 100 batches; return whether the weights are finite, and the skipped steps."""
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
    data = [torch.randn(32, 8) for _ in range(100)]
    data[40][0, 0] = math.nan
    model, optimizer, loader = accelerator.prepare(
        net, torch.optim.Adam(net.parameters(), lr=1e-2), torch.utils.data.DataLoader(data, batch_size=None)
    )
    watcher = steady.watch(accelerator, model, optimizer) if guarded else None  # <- the added line

    for x in loader:
        with accelerator.accumulate(model):
            accelerator.backward((model(x).squeeze(-1) - x.sum(-1)).square().mean())
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

    refused = 0 if watcher is None else watcher.guard.attempts - watcher.guard.updates
    if watcher is not None:
        watcher.remove()
    return all(bool(p.isfinite().all()) for p in net.parameters()), refused


if __name__ == "__main__":
    finite, refused = main()
    print(f"guarded: weights finite: {finite}, {refused} step refused")
    print(f"unguarded: weights finite: {main(guarded=False)[0]}")
