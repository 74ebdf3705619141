"""A custom detector next to the built-in ones: no base class, four members.

Run it: `python examples/your_own_detector.py`. Look at `SmallShare.update`: it reads values that are measured anyway.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from steadystep import Finding, Guard, Signals
from steadystep.testing import check_detector


def data(rows: int, seed: int) -> TensorDataset:
    """Return a smooth function of four of eight features."""
    x = torch.randn(rows, 8, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(x, torch.sin(x[:, :1]) + x[:, 1:2] * x[:, 2:3] + x[:, 3:4])


class SmallShare:
    """Report steps in which the first tensor has a small share of the gradient norm."""

    name = "small-share"

    def update(self, signals: Signals) -> tuple[Finding, ...]:
        share = signals.norms[0] / signals.grad_norm if signals.norms and signals.grad_norm else 1.0
        if not share < 0.35:  # also true for NaN
            return ()
        return (Finding(detector=self.name, step=signals.step, severity="info", value=share, limit=0.35),)

    def state_dict(self) -> dict[str, float]:
        return {}

    def load_state_dict(self, state: dict[str, float]) -> None: ...


def main() -> list[int]:
    """Train and return the steps that were reported."""
    check_detector(SmallShare)  # raises if the contract is broken
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1))
    guard = Guard(model, torch.optim.AdamW(model.parameters(), lr=1e-2), detectors=[SmallShare()])

    def loss_of(batch: list[Tensor]) -> Tensor:
        return functional.mse_loss(model(batch[0]), batch[1])

    reported = []
    for batch in DataLoader(data(1024, seed=1), batch_size=32, shuffle=True):
        outcome = guard.step(loss_of, batch=batch)
        reported += [finding.step for finding in outcome.findings if finding.detector == "small-share"]
    print(f"the first layer's share was below 0.35 at {len(reported)} of {guard.attempts} steps: {reported}")
    return reported


if __name__ == "__main__":
    main()
