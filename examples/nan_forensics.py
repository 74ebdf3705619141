"""From a NaN to the module that made it, and the same step again from a file.

Run it: `python examples/nan_forensics.py`. Look at: `outcome.origin`. The row of zeros is finite, the weights too; the
module that divides by its length is named. The bundle runs elsewhere as well, as the printed command says.
"""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import steadystep
from steadystep.incidents import replay


def data(rows: int, seed: int) -> TensorDataset:
    """A smooth function of four of eight numbers; one row is empty."""
    x = torch.randn(rows, 8, generator=torch.Generator().manual_seed(seed))
    x[7] = 0.0
    return TensorDataset(x, torch.sin(x[:, :1]) + x[:, 1:2] * x[:, 2:3] + x[:, 3:4])


class UnitLength(nn.Module):
    """Divides each row by its length. A row of zeros has none."""

    def forward(self, x: Tensor) -> Tensor:
        return x / x.norm(dim=1, keepdim=True)


def make() -> tuple[nn.Module, Callable[[list[Tensor]], Tensor]]:
    """The model and its loss: all that a replay needs."""
    model = nn.Sequential(UnitLength(), nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1))
    return model, lambda batch: functional.mse_loss(model(batch[0]), batch[1])


def main() -> tuple[str, bool]:
    """Trains until a step is refused; returns its origin, and whether a replay shows it again."""
    torch.manual_seed(0)
    model, loss_of = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with steadystep.Guard(
        model, optimizer, run_dir="runs/nan_forensics", config={"monitoring": {"sinks": []}}
    ) as guard:
        for batch in DataLoader(data(1024, seed=1), batch_size=32, shuffle=True):
            outcome = guard.step(loss_of, batch=batch)
            if not outcome.stepped:
                break

    again = replay(Path(outcome.incident), make)
    print(f"step {outcome.step}: {outcome.origin}\nreplayed: {again.now.origin.place}, again: {again.reproduces}")
    print(f"steadystep replay {outcome.incident} --factory nan_forensics:make  # with examples/ on PYTHONPATH")
    return outcome.origin, again.reproduces


if __name__ == "__main__":
    main()
