"""Fault injection: which faults does this training survive, with a guard and without?

Run it: `python examples/fault_injection.py`. Look at the columns "unguarded" and "guarded": the error relative to the
run without a fault. By default `kinds` is all of them.
"""

from types import SimpleNamespace

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from steadystep import faults


def data(rows: int, seed: int) -> TensorDataset:
    """Return a smooth function of four of eight features, plus noise."""
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 8, generator=rng)
    y = torch.sin(x[:, :1]) + x[:, 1:2] * x[:, 2:3] + x[:, 3:4] + 0.1 * torch.randn(rows, 1, generator=rng)
    return TensorDataset(x, y)


def training(seed: int) -> SimpleNamespace:
    """Return model, optimizer, batches, loss and a held-out score: the parts of the base loop."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    batches = list(DataLoader(data(1024, seed=1), batch_size=32))

    def loss_of(batch: list[Tensor]) -> Tensor:
        x, y = batch
        return functional.mse_loss(model(x), y)

    def score() -> float:
        with torch.no_grad():
            return loss_of(data(512, seed=2).tensors).item()

    return SimpleNamespace(model=model, optimizer=optimizer, batches=batches, loss=loss_of, score=score)


def main() -> faults.Scorecard:
    """Train once without a fault and twice per fault; return the scorecard."""
    kinds = ["bad-gradient", "bit-flip", {"kind": "lr-scale", "factor": 100, "for": 20}]
    card = faults.scorecard(training, steps=120, kinds=kinds)
    print(card)
    return card


if __name__ == "__main__":
    main()
