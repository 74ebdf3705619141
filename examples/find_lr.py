"""A learning rate from a range test that leaves model and optimizer unchanged.

Run it: `python examples/find_lr.py`. Look at the printed curve. The suggestion is a good starting point, not the end
of tuning: 1e-2, as in base_loop.py, does better here.
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


def main() -> tuple[float, float]:
    """Train at the suggested rate; return that rate and the held-out error."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)  # a bad guess
    loader = DataLoader(data(1024, seed=1), batch_size=32, shuffle=True)

    def loss_of(batch: list[Tensor]) -> Tensor:
        x, y = batch
        return functional.mse_loss(model(x), y)

    curve = steadystep.find_lr(model, optimizer, loader, loss_fn=functional.mse_loss, num_steps=200)
    print(curve)
    optimizer.param_groups[0]["lr"] = curve.suggested
    for _ in range(5):
        for batch in loader:
            loss = loss_of(batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    with torch.no_grad():
        error = loss_of(data(512, seed=2).tensors).item()
    print(f"held-out error {error:.3f} after 160 updates")
    return curve.suggested, error


if __name__ == "__main__":
    main()
