"""All settings from a YAML file.

Run it: `python examples/config_yaml.py`. Look at config_yaml.yaml next to it, and at the error message for an unknown
key.
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


def main() -> tuple[int, float, str]:
    """Train and return the updates, the last learning rate and the message for a misspelled key."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    loader = DataLoader(data(1024, seed=1), batch_size=32, shuffle=True)

    def loss_of(batch: list[Tensor]) -> Tensor:
        x, y = batch
        return functional.mse_loss(model(x), y)

    guard = steadystep.Guard(model, optimizer, config=Path(__file__).with_suffix(".yaml"))
    for _ in range(5):
        for batch in guard.batches(loader):
            outcome = guard.step(loss_of, batch=batch)

    with torch.no_grad():
        error = loss_of(data(512, seed=2).tensors).item()
    print(f"held-out error {error:.3f} after {guard.updates} updates, learning rate {outcome.signals.lr:.1e}")
    try:
        steadystep.Config.load({"training": {"max_gradnorm": 1.0}})
    except steadystep.ConfigError as wrong:
        said = str(wrong)
    print(said)
    return guard.updates, outcome.signals.lr, said


if __name__ == "__main__":
    main()
