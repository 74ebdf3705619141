"""fp16 with the loss scaler, as one setting.

Run it: `python examples/mixed_precision.py`. Look at: the loss scale. An overflow halved it once, as it
must. Five losses were NaN, which no scale cures, and did not move it; the plain recipe would halve it for each.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import steadystep
from steadystep.precision import ScalerReport


def data(rows: int, seed: int) -> TensorDataset:
    """A smooth function of four of eight numbers, and a little noise."""
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 8, generator=rng)
    y = torch.sin(x[:, :1]) + x[:, 1:2] * x[:, 2:3] + x[:, 3:4] + 0.1 * torch.randn(rows, 1, generator=rng)
    return TensorDataset(x, y)


def main() -> ScalerReport:
    """Trains, and returns what the loss scaler went through."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    rows = data(1024, seed=1)
    rows.tensors[0][7] = float("nan")  # one broken row
    loader = DataLoader(rows, batch_size=32, shuffle=True)

    def loss_of(batch: list[Tensor]) -> Tensor:
        x, y = batch
        return functional.mse_loss(model(x), y)

    guard = steadystep.Guard(model, optimizer, config={"training": {"mixed_precision": "fp16"}})
    for _ in range(5):
        for batch in loader:
            guard.step(loss_of, batch=batch)

    with torch.no_grad():
        error = loss_of(data(512, seed=2).tensors).item()
    print(f"held-out error {error:.3f} after {guard.updates} updates")
    told = guard.precision.report()
    print(f"loss scale {told.scale:g}, {told.overflows} overflows, {told.bad_losses} losses that were not finite")
    return told


if __name__ == "__main__":
    main()
