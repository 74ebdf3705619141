"""Validate after each epoch, log the result, and end with the best weights.

Run it: `python examples/validation_and_best.py`. Look at the validation losses: the model overfits its 64 rows, so the
last epoch is not the best. `steadystep report runs/validation_and_best` shows the curve.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import steadystep
from steadystep.tracking import read


def data(rows: int, seed: int) -> TensorDataset:
    """Return a smooth function of four of eight features, plus noise."""
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 8, generator=rng)
    y = torch.sin(x[:, :1]) + x[:, 1:2] * x[:, 2:3] + x[:, 3:4] + 0.1 * torch.randn(rows, 1, generator=rng)
    return TensorDataset(x, y)


def main() -> tuple[list[float], float]:
    """Train and return the validations and the held-out error."""
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
