"""A rule of your own beside the built-in ones: no base class, four members.

Run it: `python examples/your_own_detector.py`. Look at: `SmallShare.update`. It reads what was measured anyway.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from steadystep import Finding, Guard, Signals
from steadystep.testing import check_detector


def data(rows: int, seed: int) -> TensorDataset:
    """A smooth function of four of eight numbers."""
    x = torch.randn(rows, 8, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(x, torch.sin(x[:, :1]) + x[:, 1:2] * x[:, 2:3] + x[:, 3:4])


class SmallShare:
    """Speaks when the first tensor has little part in the gradient."""

    name = "small-share"

    def update(self, signals: Signals) -> tuple[Finding, ...]:
        share = signals.norms[0] / signals.grad_norm if signals.norms and signals.grad_norm else 1.0
        if not share < 0.35:  # NaN is not below anything
            return ()
        return (Finding(detector=self.name, step=signals.step, severity="info", value=share, limit=0.35),)

    def state_dict(self) -> dict[str, float]:
        return {}

    def load_state_dict(self, state: dict[str, float]) -> None: ...


def main() -> list[int]:
    """Trains, and returns the steps at which it spoke."""
    check_detector(SmallShare)  # raises where a promise is broken
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1))
    guard = Guard(model, torch.optim.AdamW(model.parameters(), lr=1e-2), detectors=[SmallShare()])

    def loss_of(batch: list[Tensor]) -> Tensor:
        return functional.mse_loss(model(batch[0]), batch[1])

    spoke = []
    for batch in DataLoader(data(1024, seed=1), batch_size=32, shuffle=True):
        outcome = guard.step(loss_of, batch=batch)
        spoke += [finding.step for finding in outcome.findings if finding.detector == "small-share"]
    print(f"the first layer's share was below 0.35 at {len(spoke)} of {guard.attempts} steps: {spoke}")
    return spoke


if __name__ == "__main__":
    main()
