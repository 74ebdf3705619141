"""fp16 with a loss scaler, by one setting.

Run it: `python examples/mixed_precision.py`. Look at the loss scale: one overflow halved it, as it should. Five losses
were NaN, which no scale can fix, and did not change it; a plain GradScaler would halve it for each of them.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import steadystep
from steadystep.precision import ScalerReport


def data(rows: int, seed: int) -> TensorDataset:
    """Return a smooth function of four of eight features, plus noise."""
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 8, generator=rng)
    y = torch.sin(x[:, :1]) + x[:, 1:2] * x[:, 2:3] + x[:, 3:4] + 0.1 * torch.randn(rows, 1, generator=rng)
    return TensorDataset(x, y)


def main() -> ScalerReport:
    """Train and return the report of the loss scaler."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    rows = data(1024, seed=1)
    rows.tensors[0][7] = float("nan")  # one bad row
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
    print(f"loss scale {told.scale:g}, {told.overflows} overflows, {told.bad_losses} non-finite losses")
    return told


if __name__ == "__main__":
    main()
