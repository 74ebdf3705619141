"""Observe mode: every check runs, and the training is never changed.

Run it: `python examples/observe_only.py`. Look at the output: the weights end as NaN, as they would without a guard.
The step where it began was reported at once, with its cause.
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


def main() -> tuple[int, float]:
    """Train and return the step of the first alarm and the held-out error."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    rows = data(1024, seed=1)
    rows.tensors[0][7] = float("nan")  # one bad row
    loader = DataLoader(rows, batch_size=32, shuffle=True)

    def loss_of(batch: list[Tensor]) -> Tensor:
        x, y = batch
        return functional.mse_loss(model(x), y)

    guard = steadystep.Guard(model, optimizer, config=steadystep.observe())
    alarms = []
    for batch in loader:  # one epoch is enough
        outcome = guard.step(loss_of, batch=batch)
        alarms += [(f.step, outcome.diagnosis) for f in outcome.findings if f.severity == "critical"]

    with torch.no_grad():
        error = loss_of(data(512, seed=2).tensors).item()
    print(f"held-out error {error:.3f} after {guard.updates} updates")
    step, diagnosis = alarms[0]
    print(f"first alarm at step {step}: {diagnosis.cause}: {diagnosis.advice}")
    return step, error


if __name__ == "__main__":
    main()
