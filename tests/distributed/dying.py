"""A training for `steadystep train` in which one rank is killed in its first life, if the environment says so."""

import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from steadystep.train import RunPlan, train
from steadystep.train.loop import Crew

STEPS = 24
PLAN = f"""
task: tests.distributed.dying:make
distributed: ddp
validation_frequency: 12
faults: [{{kind: bad-input, at: 5, rank: 1}}]
training: {{total_steps: {STEPS}, max_grad_norm: 1.0}}
monitoring: {{checkpoint_frequency: 6}}
"""


def make(seed: int) -> Any:
    torch.manual_seed(seed)
    x = torch.randn(150, 6)
    model = nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.2), nn.ReLU(), nn.Linear(16, 1))
    calls = []

    def loss(batch: Any) -> torch.Tensor:
        calls.append(1)
        rank, life = os.environ.get("RANK"), os.environ.get("TORCHELASTIC_RESTART_COUNT")
        if os.environ.get("DIES") and (rank, life) == ("1", "0") and len(calls) == 17:
            os.kill(os.getpid(), signal.SIGKILL)
        return nn.functional.mse_loss(model(batch[0]), batch[1])

    def validate() -> float:
        model.eval()
        with torch.no_grad():
            value = nn.functional.mse_loss(model(x), x.sum(1, keepdim=True)).item()
        model.train()
        return value

    return SimpleNamespace(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2),
        batches=DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8, shuffle=True),
        loss=loss,
        validate=validate,
    )


def whole_run(folder: Path) -> None:
    """The same without a death, in the process group that is there."""
    plan = folder / f"whole-{dist.get_rank()}.yaml"  # each its own: one may read while the other writes
    plan.write_text(PLAN)
    crew = Crew("ddp", rank=dist.get_rank(), size=dist.get_world_size())
    summary = train(RunPlan.load(plan), folder / "whole", watch=lambda outcome, guard: None, crew=crew)
    assert summary.steps == STEPS
    assert summary.incidents == 1
