"""What `steadystep train --new NAME` writes: a run that works, to be changed."""

from pathlib import Path

from steadystep.errors import ConfigError

_PYTHON = '''"""A model, its optimizer, batches and a loss: `steadystep train {name}.yaml` does the rest."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


@dataclass
class Run:
    model: nn.Module
    optimizer: torch.optim.Optimizer
    batches: Any  # a DataLoader: gone through again and again
    held_out: tuple[torch.Tensor, torch.Tensor]

    def loss(self, batch):
        x, y = batch
        return nn.functional.mse_loss(self.model(x), y)

    def validate(self):
        """Lower is better. Leave it out if there is nothing to validate on."""
        self.model.eval()
        with torch.no_grad():
            value = self.loss(self.held_out).item()
        self.model.train()
        return value


def make(seed: int) -> Run:
    torch.manual_seed(seed)
    x = torch.randn(1024, 16)
    y = x[:, :1] * x[:, 1:2] + 0.1 * torch.randn(1024, 1)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1))
    return Run(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=3e-3),
        batches=DataLoader(TensorDataset(x[:896], y[:896]), batch_size=32, shuffle=True),
        held_out=(x[896:], y[896:]),
    )
'''

_YAML = """# steadystep train {name}.yaml
task: {name}:make            # or a built-in one: gpt, clusters, regression, rnn, ...
seed: 0
validation_frequency: 200    # steps

training:
  total_steps: 1000
  max_grad_norm: 1.0
  lr_scheduler: cosine
  warmup_steps: 0.05         # a fraction of total_steps, or a number of updates
  # mixed_precision: bf16
  # early_stopping: true
monitoring:
  checkpoint_frequency: 200  # steps, or a time such as "10 min"
"""


def write(name: str, folder: Path) -> tuple[Path, Path]:
    """`NAME.py` and `NAME.yaml`; what is there is not overwritten."""
    if not name.isidentifier():
        raise ConfigError(f"--new {name!r}: use a name that Python can import, such as my_run")
    files = (folder / f"{name}.py", folder / f"{name}.yaml")
    taken = [str(path) for path in files if path.exists()]
    if taken:
        raise ConfigError(f"--new {name}: {' and '.join(taken)} exist{'s' * (len(taken) == 1)} already")
    try:
        files[0].write_text(_PYTHON.replace("{name}", name), encoding="utf-8")
        files[1].write_text(_YAML.replace("{name}", name), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--new {name}: cannot be written ({error.strerror})") from None
    return files
