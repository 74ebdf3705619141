"""A batch that does not fit in memory is retried in halves, with the same update.

Run it: `python examples/out_of_memory.py`. Look at the batch sizes. The example simulates a small device by raising an
error above 16 rows: batches of 32 rows go in, and all 160 updates are applied.
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


def main() -> tuple[list[int], float]:
    """Train and return the sizes of the first passes and the held-out error."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader(data(1024, seed=1), batch_size=32, shuffle=True)
    sizes: list[int] = []

    def loss_of(batch: list[Tensor]) -> Tensor:
        x, y = batch
        sizes.append(len(x))
        if model.training and len(x) > 16:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return functional.mse_loss(model(x), y)

    guard = steadystep.Guard(model, optimizer)
    for _ in range(5):
        for batch in loader:
            guard.step(loss_of, batch=batch)
    model.eval()

    with torch.no_grad():
        error = loss_of(data(512, seed=2).tensors).item()
    print(f"held-out error {error:.3f} after {guard.updates} updates")
    print(f"rows per pass: {sizes[:6]} ...")
    return sizes[:6], error


if __name__ == "__main__":
    main()
