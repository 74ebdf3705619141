"""Lightning's `Trainer` with one added callback. Run it: python examples/lightning_trainer.py (a few seconds)."""

import math
import tempfile
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn

from steadystep.integrations.lightning import StabilityCallback


class Regression(LightningModule):
    """Learn to add eight numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, x: Tensor) -> Tensor:
        """Return the predicted sums."""
        return self.net(x).squeeze(-1)

    def training_step(self, x: Tensor, number: int) -> Tensor:
        """Return the loss of one batch. Through `self(x)` the forward pass is recorded and can be run again."""
        return (self(x) - x.sum(-1)).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return Adam."""
        return torch.optim.Adam(self.parameters(), lr=1e-2)


def main(folder: Path, *, guarded: bool = True) -> tuple[bool, Any]:
    """Train with a NaN in one of 100 batches; return whether the weights are finite, and the callback."""
    torch.manual_seed(0)
    data = [torch.randn(32, 8) for _ in range(100)]
    data[40][0, 0] = math.nan
    callback = StabilityCallback()
    module = Regression()
    trainer = Trainer(
        accelerator="cpu",
        max_epochs=1,
        default_root_dir=folder,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[callback] if guarded else [],  # <- the added line
    )
    trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=None))
    return all(bool(p.isfinite().all()) for p in module.parameters()), callback


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        finite, callback = main(Path(folder))
        for outcome in callback.incidents:
            print(f"step {outcome.step}: {', '.join(outcome.plan.actions)} [{outcome.diagnosis.cause}]")
        print(f"guarded: weights finite: {finite}")
        print(f"unguarded: weights finite: {main(Path(folder), guarded=False)[0]}")
