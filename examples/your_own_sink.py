"""A custom tracker: any object with these seven methods.

Run it: `python examples/your_own_sink.py`. Look at `Diary`. A background thread calls it, so a slow sink does not
delay training; a sink that raises is dropped, and the run continues.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import steadystep
from steadystep.testing import check_sink
from steadystep.tracking import GradientSample, Incident, RunStart, StepRow


class Diary:
    """Collect losses and incidents in lists."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.incidents: list[str] = []

    def step(self, row: StepRow) -> None:
        self.losses.append(row.loss)

    def incident(self, incident: Incident) -> None:
        self.incidents.append(f"step {incident.step}: {incident.cause}, {incident.done}")

    def start(self, run: RunStart) -> None: ...
    def validation(self, step: int, metrics: dict[str, float]) -> None: ...
    def layers(self, step: int, norms: dict[str, float]) -> None: ...
    def histograms(self, sample: GradientSample) -> None: ...
    def close(self) -> None: ...


def main() -> Diary:
    """Train and return the collected records."""
    check_sink(Diary)  # raises if the contract is broken
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    x = torch.randn(1024, 8)
    rows = TensorDataset(x, torch.sin(x[:, :1]) + x[:, 1:2] * x[:, 2:3])
    x[7] = float("nan")  # one bad row

    def loss_of(batch: list[Tensor]) -> Tensor:
        return functional.mse_loss(model(batch[0]), batch[1])

    with steadystep.Guard(model, optimizer, sinks=[diary := Diary()]) as guard:
        for batch in DataLoader(rows, batch_size=32, shuffle=True):
            guard.step(loss_of, batch=batch)
    print(*diary.incidents, f"{len(diary.losses)} losses, the last {diary.losses[-1]:.3f}", sep="\n")
    return diary


if __name__ == "__main__":
    main()
