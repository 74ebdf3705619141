"""`steadystep train`: a whole run from one YAML file. A file is read without torch; `train` loads it on first use."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, final

from pydantic import Field

from steadystep._utils import lazy_names
from steadystep._utils.numbers import with_words
from steadystep._utils.settings import Count, Number, Settings, checked, nearest, read_yaml
from steadystep.config import Config
from steadystep.errors import ConfigError

if TYPE_CHECKING:
    from steadystep.train.job import Job, resolve
    from steadystep.train.loop import train

__all__ = ["Job", "RunPlan", "Summary", "resolve", "train"]

__getattr__ = lazy_names(__name__, {"job": ("Job", "resolve"), "loop": ("train",)})


class GroupRule(Settings):
    """Learning rate and weight decay of some parameters: a `steadystep.groups.Rule`."""

    match: str | tuple[str, ...] = Field(description="a glob over parameter names, or several")
    lr_mult: Number = Field(1.0, gt=0, description="factor for the base learning rate")
    weight_decay: Number | None = Field(None, ge=0, description="overrides the optimizer's")


class RunSettings(Settings):
    """What to train."""

    task: str = Field(description="a built-in task such as gpt, or package.module:factory of your own")
    seed: Count = Field(0, ge=0, description="seed of the model and the batches")
    validation_frequency: Count = Field(200, ge=1, description="steps between two validations")
    init: Literal["xavier", "kaiming", "small", "gpt2", "zero-residual"] | None = Field(
        None, description="a recipe of steadystep.init for the initial weights"
    )
    groups: tuple[GroupRule, ...] | Literal["embed-and-attention"] | None = Field(
        None, description="rules of steadystep.groups; norms, biases and embeddings then get no weight decay"
    )
    distributed: Literal["ddp", "fsdp"] | None = Field(
        None, description="under torchrun: ddp replicates the model on every rank, fsdp (FSDP2) shards it"
    )
    faults: tuple[dict[str, Any], ...] = Field((), description="fault injection; see docs/faults.md")


class RunPlan(Settings):
    """Content of a run's YAML file: what to train, and the settings of the guard."""

    run: RunSettings
    guard: Config

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read the YAML file `path`.

        Raises:
            ConfigError: the file cannot be read, or keys are wrong; the message names every mistake.
        """
        raw = read_yaml(path)
        own = {key: value for key, value in raw.items() if key in RunSettings.model_fields}
        rest = {key: value for key, value in raw.items() if key not in own}
        unknown = [str(key) for key in rest if key not in Config.model_fields]
        known = [*RunSettings.model_fields, *Config.model_fields]
        problems = [f"unknown key {key!r}{nearest(key, known)}" for key in unknown]
        if "task" not in own:
            problems.append("task is missing: a built-in task such as gpt, or package.module:factory of your own")
        if problems:
            raise ConfigError("\n".join(f"{path}: {problem}" for problem in problems))
        plan = cls(run=checked(RunSettings, _tuples(own), where=str(path)), guard=Config.from_mapping(rest, str(path)))
        _refuse_overruled_faults(plan, path)
        return plan


def _tuples(raw: Mapping[str, Any]) -> dict[str, Any]:
    """A single fault or rule may be written without the list."""
    return {k: [v] if k in ("faults", "groups") and isinstance(v, Mapping) else v for k, v in raw.items()}


def _refuse_overruled_faults(plan: RunPlan, path: Path) -> None:
    """The guard's own schedule sets the rate before every update: such a fault would do nothing."""
    training = plan.guard.training
    setter = "lr_scheduler" if training.lr_scheduler else "warmup_steps" if training.warmup_steps else None
    overruled = [str(fault["kind"]) for fault in plan.run.faults if fault.get("kind") in ("lr-scale", "lr-creep")]
    if setter is not None and overruled:
        raise ConfigError(
            f"{path}: faults: {overruled[0]} has no effect here, because training.{setter} makes the guard set the "
            f"learning rate before every update. Remove training.{setter}; put your own scheduler into the factory "
            "(after_step)"
        )


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


def write_example(name: str, folder: Path) -> tuple[Path, Path]:
    """`NAME.py` and `NAME.yaml`; what is there is not overwritten."""
    if not name.isidentifier():
        raise ConfigError(f"--new {name!r}: use a valid Python module name, such as my_run")
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


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Result of a run."""

    run_dir: str
    """Folder of the run."""
    steps: int
    """Steps tried."""
    updates: int
    """Updates in the weights."""
    trained: int
    """Steps of this process; the others were before the resume."""
    final_loss: float
    """Median training loss of the last tenth of the run, as in every other view."""
    validation: float | None
    """Last validation loss."""
    best_validation: float | None
    """Best validation loss, those before a resume included."""
    incidents: int
    """Number of incidents; those close together and of one cause count once."""
    stopped_early: bool
    """Whether early stopping ended the run."""
    seconds: float
    """Duration of this process."""
    diagnosis: tuple[str, ...]
    """Causes from `Guard.diagnose`."""
    interventions: int = 0
    """Number of incidents in which the guard changed something."""
    verdict: str = ""
    """The verdict on the run as `steadystep diagnose` and the report give it."""

    def as_dict(self) -> dict[str, Any]:
        """Return a dictionary for JSON: non-finite numbers as text."""
        told: dict[str, Any] = with_words(asdict(self))
        return told
