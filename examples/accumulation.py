"""Four micro-batches per update, and a bad one among them.

Run it: `python examples/accumulation.py`. Look at: 40 updates from 160 micro-batches. The group that holds the broken
row updates without that micro-batch.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import steadystep


def data(rows: int, seed: int) -> TensorDataset:
    """A smooth function of four of eight numbers, and a little noise."""
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 8, generator=rng)
    y = torch.sin(x[:, :1]) + x[:, 1:2] * x[:, 2:3] + x[:, 3:4] + 0.1 * torch.randn(rows, 1, generator=rng)
    return TensorDataset(x, y)


def main() -> tuple[int, int]:
    """Trains, and returns the updates and how many of them left a micro-batch out."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    rows = data(1024, seed=1)
    rows.tensors[0][7] = float("nan")  # one broken row
    loader = DataLoader(rows, batch_size=32, shuffle=True)

    def loss_of(batch: list[Tensor]) -> Tensor:
        x, y = batch
        return functional.mse_loss(model(x), y)

    config = {"training": {"gradient_accumulation_steps": 4}}
    guard = steadystep.Guard(model, optimizer, config=config)
    left_out = 0
    for _ in range(5):
        for batch in guard.batches(loader):  # flushes a short last group
            outcome = guard.step(loss_of, batch=batch, weight=len(batch[0]))
            left_out += bool(outcome.left_out)

    with torch.no_grad():
        error = loss_of(data(512, seed=2).tensors).item()
    print(f"held-out error {error:.3f} after {guard.updates} updates, {left_out} of them without a micro-batch")
    return guard.updates, left_out


if __name__ == "__main__":
    main()
