"""Guard: one bad row in the data does not damage the weights.

Run it: `python examples/guard.py`. Look at the output: one skipped update per epoch with its cause, and a held-out
error close to that of base_loop.py. The plain loop would end with NaN weights.
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


def main() -> tuple[list[tuple[int, str]], float]:
    """Train and return the skipped steps and the held-out error."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    rows = data(1024, seed=1)
    rows.tensors[0][7] = float("nan")  # one bad row
    loader = DataLoader(rows, batch_size=32, shuffle=True)

    def loss_of(batch: list[Tensor]) -> Tensor:
        x, y = batch
        return functional.mse_loss(model(x), y)

    guard = steadystep.Guard(model, optimizer)
    refused = []
    for _ in range(5):
        for batch in loader:
            outcome = guard.step(loss_of, batch=batch)
            if not outcome.stepped:
                refused.append((outcome.step, outcome.diagnosis.cause))

    with torch.no_grad():
        error = loss_of(data(512, seed=2).tensors).item()
    print(f"held-out error {error:.3f} after {guard.updates} updates, {len(refused)} refused")
    return refused, error


if __name__ == "__main__":
    main()
