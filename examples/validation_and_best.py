"""Validates each epoch, logs it, and ends with the weights of the best one.

Run it: `python examples/validation_and_best.py`. Look at: with 64 rows it soon learns them by heart, so that the last
epoch is not the best; runs/validation_and_best has the curve (`steadystep report runs/validation_and_best`).
"""

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import steadystep
from steadystep.tracking import read


def data(rows: int, seed: int) -> TensorDataset:
    """A smooth function of four of eight numbers, and a little noise."""
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 8, generator=rng)
    y = torch.sin(x[:, :1]) + x[:, 1:2] * x[:, 2:3] + x[:, 3:4] + 0.1 * torch.randn(rows, 1, generator=rng)
    return TensorDataset(x, y)


def main() -> tuple[list[float], float]:
    """Trains, and returns the validations and the error on data it has not seen."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loader = DataLoader(data(64, seed=1), batch_size=2, shuffle=True)

    def loss_of(batch: list[Tensor]) -> Tensor:
        x, y = batch
        return functional.mse_loss(model(x), y)

    config = {"training": {"early_stopping": True}, "monitoring": {"sinks": []}}  # keeps the best weights in memory
    guard = steadystep.Guard(model, optimizer, config=config, run_dir="runs/validation_and_best")
    for _ in range(5):
        for batch in guard.batches(loader):
            guard.step(loss_of, batch=batch)
        with torch.no_grad():
            guard.validate(val_loss=loss_of(data(512, seed=2).tensors).item())
    guard.restore_best()
    guard.close()

    with torch.no_grad():
        error = loss_of(data(512, seed=2).tensors).item()
    print(f"held-out error {error:.3f} after {guard.updates} updates")
    validations = read("runs/validation_and_best").validation["val_loss"].values.tolist()[-5:]
    print("per epoch:", ", ".join(f"{loss:.3f}" for loss in validations))
    return validations, error


if __name__ == "__main__":
    main()
