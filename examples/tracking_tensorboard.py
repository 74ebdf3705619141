"""Curves, layers and incidents in TensorBoard.

Run it: `python examples/tracking_tensorboard.py`. Look at the result with `tensorboard --logdir runs`. It needs `pip
install 'steadystep[tensorboard]'`; wandb and mlflow work the same way, by name.
"""

from pathlib import Path

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


def main() -> list[Path]:
    """Train and return the event files."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    rows = data(1024, seed=1)
    rows.tensors[0][7] = float("nan")  # one bad row
    loader = DataLoader(rows, batch_size=32, shuffle=True)

    def loss_of(batch: list[Tensor]) -> Tensor:
        x, y = batch
        return functional.mse_loss(model(x), y)

    config = {"monitoring": {"sinks": ["tensorboard"]}}
    guard = steadystep.Guard(model, optimizer, config=config, run_dir="runs/tensorboard_example")
    for _ in range(5):
        for batch in guard.batches(loader):
            guard.step(loss_of, batch=batch)
        with torch.no_grad():
            guard.validate(val_loss=loss_of(data(512, seed=2).tensors).item())
    guard.close()

    files = sorted(Path("runs/tensorboard_example").rglob("*tfevents*"))
    print(f"{guard.updates} updates in {files[-1]}")
    return files


if __name__ == "__main__":
    main()
