"""Clipping by global norm, and how often it applied.

Run it: `python examples/clipping.py`. Look at the number of clipped updates and the norms before clipping, which a
plain loop usually discards.
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


def main() -> tuple[int, float]:
    """Train and return the number of clipped updates and the largest norm before clipping."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader(data(1024, seed=1), batch_size=32, shuffle=True)

    def loss_of(batch: list[Tensor]) -> Tensor:
        x, y = batch
        return functional.mse_loss(model(x), y)

    guard = steadystep.Guard(model, optimizer, config={"training": {"max_grad_norm": 1.0}})
    clipped, largest = 0, 0.0
    for _ in range(5):
        for batch in loader:
            outcome = guard.step(loss_of, batch=batch)
            clipped += outcome.clipped
            largest = max(largest, outcome.signals.grad_norm)

    with torch.no_grad():
        error = loss_of(data(512, seed=2).tensors).item()
    print(f"held-out error {error:.3f} after 160 updates")
    print(f"{clipped} updates were clipped; the largest norm was {largest:.2f}")
    return clipped, largest


if __name__ == "__main__":
    main()
