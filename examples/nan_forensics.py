"""Find the module that produced a NaN, and run the same step again from a file.

Run it: `python examples/nan_forensics.py`. Look at `outcome.origin`: the row of zeros and the weights are finite; the
module that divides by the norm is named. The printed command runs the incident bundle again, also on another machine.
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
    """Return a smooth function of four of eight features; one row is all zeros."""
    x = torch.randn(rows, 8, generator=torch.Generator().manual_seed(seed))
    x[7] = 0.0
    return TensorDataset(x, torch.sin(x[:, :1]) + x[:, 1:2] * x[:, 2:3] + x[:, 3:4])


class UnitLength(nn.Module):
    """Divide each row by its norm, which is zero for a row of zeros."""

    def forward(self, x: Tensor) -> Tensor:
        return x / x.norm(dim=1, keepdim=True)


def make() -> tuple[nn.Module, Callable[[list[Tensor]], Tensor]]:
    """Return the model and its loss: all that a replay needs."""
    model = nn.Sequential(UnitLength(), nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1))
    return model, lambda batch: functional.mse_loss(model(batch[0]), batch[1])


def main() -> tuple[str, bool]:
    """Train until a step is skipped; return its origin, and whether a replay reproduces it."""
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
