"""Warmup, then cosine decay. A skipped update does not advance the schedule.

Run it: `python examples/schedule.py`. Look at the last learning rate: five updates were skipped, so the schedule is at
update 155, not 160.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import steadystep
from steadystep.schedule import cosine, then, warmup


def data(rows: int, seed: int) -> TensorDataset:
    """Return a smooth function of four of eight features, plus noise."""
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 8, generator=rng)
    y = torch.sin(x[:, :1]) + x[:, 1:2] * x[:, 2:3] + x[:, 3:4] + 0.1 * torch.randn(rows, 1, generator=rng)
    return TensorDataset(x, y)


def main() -> list[float]:
    """Train and return the learning rates."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    rows = data(1024, seed=1)
    rows.tensors[0][7] = float("nan")  # one bad row
    loader = DataLoader(rows, batch_size=32, shuffle=True)

    def loss_of(batch: list[Tensor]) -> Tensor:
        x, y = batch
        return functional.mse_loss(model(x), y)

    schedule = then(warmup(20), 20, cosine(140, floor=0.1))
    guard = steadystep.Guard(model, optimizer, schedule=schedule)
    rates = []
    for _ in range(5):
        for batch in loader:
            outcome = guard.step(loss_of, batch=batch)
            rates.append(outcome.signals.lr)

    with torch.no_grad():
        error = loss_of(data(512, seed=2).tensors).item()
    print(f"held-out error {error:.3f} after {guard.updates} updates")
    print(f"learning rate {rates[0]:.4f} -> {max(rates):.4f} -> {rates[-1]:.5f}")
    return rates


if __name__ == "__main__":
    main()
