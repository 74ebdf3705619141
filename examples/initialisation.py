"""Initialization by a named recipe, and a check before the first step.

Run it: `python examples/initialisation.py`. Look at the two reports: fifteen sigmoid layers with torch's default
initialization pass hardly any gradient; ReLU layers with "kaiming" have no findings.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import steadystep
from steadystep.init import check_init, initialise_


def data(rows: int, seed: int) -> TensorDataset:
    """Return a smooth function of four of eight features, plus noise."""
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 8, generator=rng)
    y = torch.sin(x[:, :1]) + x[:, 1:2] * x[:, 2:3] + x[:, 3:4] + 0.1 * torch.randn(rows, 1, generator=rng)
    return TensorDataset(x, y)


def main() -> tuple[list[str], bool]:
    """Train the second model; return the findings of the first, and whether the second is healthy."""
    torch.manual_seed(0)

    def deep(activation: type[nn.Module]) -> nn.Sequential:
        blocks = [layer for _ in range(15) for layer in (nn.Linear(16, 16), activation())]
        return nn.Sequential(nn.Linear(8, 16), *blocks, nn.Linear(16, 1))

    batch = list(data(64, seed=1).tensors)
    before = check_init(deep(nn.Sigmoid), (batch[0], batch[1]))
    model = deep(nn.ReLU)
    initialise_(model, "kaiming", seed=0)
    after = check_init(model, (batch[0], batch[1]))
    print(f"sigmoid: {before.findings[0].what}\nReLU: {len(after.findings)} findings")  # print(before) lists all layers
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
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
    return [finding.detector for finding in before.findings], after.healthy


if __name__ == "__main__":
    main()
