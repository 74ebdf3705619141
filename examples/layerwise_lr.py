"""Layer-wise learning rates and no weight decay on biases, by parameter groups.

Run it: `python examples/layerwise_lr.py`. Look at the table: three equal blocks, each with half the learning rate of
the next, and the head at the full rate.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import steadystep
from steadystep.groups import LayerDecay, param_groups, table


def data(rows: int, seed: int) -> TensorDataset:
    """Return a smooth function of four of eight features, plus noise."""
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 8, generator=rng)
    y = torch.sin(x[:, :1]) + x[:, 1:2] * x[:, 2:3] + x[:, 3:4] + 0.1 * torch.randn(rows, 1, generator=rng)
    return TensorDataset(x, y)


def main() -> list[float]:
    """Train and return the learning rates of all groups."""
    torch.manual_seed(0)
    blocks = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)))
    model = nn.Sequential(blocks, nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1))
    groups = param_groups(model, lr=1e-2, weight_decay=0.1, layer_decay=LayerDecay(0.5, blocks="0.*"))
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    print(table(groups))
    loader = DataLoader(data(1024, seed=1), batch_size=32, shuffle=True)

    def loss_of(batch: list[Tensor]) -> Tensor:
        x, y = batch
        return functional.mse_loss(model(x), y)

    guard = steadystep.Guard(model, optimizer)
    for _ in range(5):
        for batch in loader:
            guard.step(loss_of, batch=batch)

    with torch.no_grad():
        error = loss_of(data(512, seed=2).tensors).item()
    print(f"held-out error {error:.3f} after 160 updates")
    return [group["lr"] for group in optimizer.param_groups]


if __name__ == "__main__":
    main()
