"""Gradient accumulation: four micro-batches per update, one of them bad.

Run it: `python examples/accumulation.py`. Look at the output: 40 updates from 160 micro-batches. The group that holds
the bad row is updated without that micro-batch.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import steadystep


def data(rows: int, seed: int) -> TensorDataset:
    """Return a smooth function of four of eight features, plus noise."""
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 8, generator=rng)
    y = torch.sin(x[:, :1]) + x[:, 1:2] * x[:, 2:3] + x[:, 3:4] + 0.1 * torch.randn(rows, 1, generator=rng)
    return TensorDataset(x, y)


def main() -> tuple[int, int]:
    """Train and return the number of updates, and how many of them left out a micro-batch."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    rows = data(1024, seed=1)
    rows.tensors[0][7] = float("nan")  # one bad row
    loader = DataLoader(rows, batch_size=32, shuffle=True)

    def loss_of(batch: list[Tensor]) -> Tensor:
        x, y = batch
        return functional.mse_loss(model(x), y)

    config = {"training": {"gradient_accumulation_steps": 4}}
    guard = steadystep.Guard(model, optimizer, config=config)
    left_out = 0
    for _ in range(5):
        for batch in guard.batches(loader):  # flushes an incomplete last group
            outcome = guard.step(loss_of, batch=batch, weight=len(batch[0]))
            left_out += bool(outcome.left_out)

    with torch.no_grad():
        error = loss_of(data(512, seed=2).tensors).item()
    print(f"held-out error {error:.3f} after {guard.updates} updates, {left_out} of them without a micro-batch")
    return guard.updates, left_out


if __name__ == "__main__":
    main()
