"""Early stopping when validation no longer improves, with the best weights restored.

Run it: `python examples/early_stopping.py`. Look at the number of epochs: the model soon overfits its 64 rows. After
three validations in a row without improvement the run ends, long before its 200 epochs.
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
    """Train and return the epochs and the held-out error."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader(data(64, seed=1), batch_size=32, shuffle=True)

    def loss_of(batch: list[Tensor]) -> Tensor:
        x, y = batch
        return functional.mse_loss(model(x), y)

    config = {"training": {"early_stopping": True, "patience": 3}}
    guard = steadystep.Guard(model, optimizer, config=config)
    for _ in range(200):
        for batch in guard.batches(loader):
            guard.step(loss_of, batch=batch)
        with torch.no_grad():
            guard.validate(val_loss=loss_of(data(512, seed=3).tensors).item())
        if guard.should_stop:
            break
    guard.restore_best()

    with torch.no_grad():
        error = loss_of(data(512, seed=2).tensors).item()
    print(f"held-out error {error:.3f} after {guard.epoch} epochs of 200")
    return guard.epoch, error


if __name__ == "__main__":
    main()
