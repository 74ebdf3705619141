"""Settings: one schema for a YAML file, a mapping and keyword arguments. Unknown keys are errors."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from steadystep._deprecated import new_settings
from steadystep._utils.settings import (
    Count,
    Frequency,
    MixedPrecision,
    Number,
    Settings,
    Switch,
    checked,
    read_yaml,
    sections_of,
    unknown_keys,
)
from steadystep.errors import ConfigError
from steadystep.schedule import NAMES, Schedule, named

DEFAULT_MAX_NORM = 1.0  # what `gradient_clipping: true` means without a number
_MOST = 2**31  # of things that are remembered, or added up


class TrainingSettings(Settings):
    """Settings of the update: learning rate, clipping, accumulation, precision, recovery."""

    learning_rate: Number | None = Field(None, gt=0, description="base learning rate; omit to keep the optimizer's")
    max_grad_norm: Number | None = Field(
        None, gt=0, description="gradients are scaled down to this global L2 norm; 0.5 to 5 is usual"
    )
    max_grad_value: Number | None = Field(None, gt=0, description="each gradient element is clamped to [-value, value]")
    clip_rule: Literal["zscore", "percentile", "tensor-ema", "agc"] | None = Field(
        None, description="adaptive limits from the run's own norms, in addition to max_grad_norm; see docs/clip.md"
    )
    gradient_clipping: Switch | None = Field(
        None, description="true clips to max_grad_norm, or to 1.0 without one; false disables clipping"
    )
    gradient_accumulation_steps: Count = Field(
        1, ge=1, le=_MOST, description="calls of step() per update; 1 means no accumulation"
    )
    lr_scaling: Literal["none", "linear", "sqrt"] = Field(
        "none",
        description="multiplies a learning rate tuned for one micro-batch by gradient_accumulation_steps (linear, "
        "for SGD) or by its square root (sqrt, for Adam)",
    )
    lr_scheduler: str | None = Field(None, description=f"one of {', '.join(NAMES)}")
    warmup_steps: Annotated[Count, Field(ge=0)] | Annotated[Number, Field(gt=0, lt=1)] = Field(
        0, description="updates over which the learning rate rises from 0: a count, or a fraction of total_steps"
    )
    total_steps: Count = Field(10_000, ge=1, description="updates in the whole run, where a decay ends")
    min_lr: Number = Field(0.0, ge=0, description="the learning rate a decay ends at")
    scheduler_options: dict[str, Any] = Field(
        default_factory=dict, description="arguments of the schedule, such as power or num_cycles"
    )
    fp32_modules: tuple[str, ...] = Field((), description="name globs of modules kept in fp32 under mixed precision")
    mixed_precision: MixedPrecision = Field("fp32", description="fp16 uses a loss scaler; bf16 needs none")
    autocast: Switch = Field(True, description="false: your own code calls autocast")
    split_when_out_of_memory: Switch = Field(
        True, description="on out of memory, split the batch= of step() and retry; false: raise the error"
    )
    stability_monitoring: Switch = Field(True, description="false: check for NaN and infinity only, without baselines")
    auto_recovery: Switch = Field(True, description="false: no snapshots, so no rollbacks and no learning-rate cuts")
    early_stopping: Switch = Field(
        False, description="guard.should_stop becomes true after `patience` validations without improvement"
    )
    patience: Count = Field(10, ge=1, description="validations without improvement before early stopping")
    max_recovery_attempts: Count = Field(
        3, ge=0, description="rollbacks per 1,000 steps before the run is stopped; skips have their own limits"
    )

    @model_validator(mode="after")
    def _check_schedule(self) -> Self:
        self.schedule(base_lr=self.learning_rate or 1.0)
        return self

    def schedule(self, *, base_lr: float) -> Schedule | None:
        """Return the schedule that these settings describe, as multipliers of `base_lr`; None if they describe none."""
        if self.lr_scheduler is None and not self.warmup_steps:
            if self.min_lr or self.scheduler_options:
                raise ConfigError("min_lr and scheduler_options have no effect without lr_scheduler")
            return None
        if self.min_lr > base_lr:
            raise ConfigError(f"min_lr = {self.min_lr} is above the learning rate {base_lr}")
        name = self.lr_scheduler or "constant"
        floor = self.min_lr / base_lr
        return named(
            name, total_steps=self.total_steps, warmup_steps=self.warmup_steps, floor=floor, **self.scheduler_options
        )

    @property
    def lr_times(self) -> float:
        """Factor that `lr_scaling` applies to the learning rate."""
        size = self.gradient_accumulation_steps
        return {"none": 1.0, "linear": float(size), "sqrt": math.sqrt(size)}[self.lr_scaling]

    @property
    def clip_norm(self) -> float | None:
        """Global norm to clip to; None without clipping."""
        if self.gradient_clipping is False:
            return None
        others = (self.max_grad_norm, self.max_grad_value, self.clip_rule)
        if self.gradient_clipping and all(other is None for other in others):
            return DEFAULT_MAX_NORM
        return self.max_grad_norm

    @property
    def clip_value(self) -> float | None:
        """Value to clamp gradient elements to; None without clamping."""
        return None if self.gradient_clipping is False else self.max_grad_value


class MonitoringSettings(Settings):
    """Settings of logging, detection thresholds and checkpoints."""

    log_frequency: Count = Field(
        100, ge=1, description="steps between two logs of per-layer gradient norms; incidents always log them"
    )
    sinks: tuple[Literal["tensorboard", "wandb", "mlflow", "trackio", "console"], ...] | None = Field(
        None,
        description="where to show the run in addition to run_dir/run.jsonl: any of tensorboard, wandb, mlflow, "
        "trackio, console; default: tensorboard if it is installed and there is a run_dir; [] for none",
    )
    alerts: str | None = Field(None, description="webhook or command that gets incidents and stalls as JSON")
    sink_frequency: Count = Field(
        10, ge=1, description="steps between two rows for the sinks; the first 100 and incidents are always sent"
    )
    loss_window_size: Count = Field(
        128, ge=32, le=_MOST, description="number of past losses in the baseline, at least 32"
    )
    divergence_threshold: Number = Field(
        8.0, ge=3, description="sigmas above its baseline at which a loss counts as raised; below 3, noise would count"
    )
    gradient_history_size: Count = Field(
        128, le=_MOST, ge=32, description="number of past gradient norms in the baseline, at least 32"
    )
    explosion_threshold: Number = Field(
        10.0, ge=2, description="multiple of its baseline at which a gradient norm is limited; below 2, noise would be"
    )
    lr_min: Number | None = Field(None, ge=0, description="warn when the learning rate drops below this")
    lr_max: Number | None = Field(None, gt=0, description="warn when the learning rate exceeds this")

    corruption_checks: Literal["off", "sampled", "full"] = Field(
        "sampled",
        description="compare every bit of weights, optimizer state and buffers between updates and put flipped ones "
        "back: full at every step, sampled half of the tensors at every 16th step",
    )
    recompute_every: Count = Field(
        0,
        ge=0,
        description="steps between two that are computed twice and compared bit for bit, which finds errors of the "
        "hardware; in a single process also steps that stand out, at most as many; needs a closure; 0 for none",
    )
    save_checkpoints: Switch | None = Field(
        None, description="write checkpoints to run_dir/checkpoints; default: only with Guard.resume"
    )
    checkpoint_frequency: Frequency = Field(
        1000, description='steps between two checkpoints, or a time such as "10 min"'
    )
    keep_checkpoints: Count = Field(
        3, ge=1, description="how many of the newest checkpoints to keep; the best one is kept as well"
    )


class RecoverySettings(Settings):
    """Settings of recovery: limits on skips and rollbacks, snapshots, replay and incident bundles."""

    max_skips_in_a_row: Count = Field(20, ge=1, description="skipped updates in a row before the run is stopped")
    max_skips: Count = Field(100, ge=1, description="skipped updates within 200 steps before the run is stopped")
    max_exceptions: Count = Field(
        0,
        ge=0,
        description="exceptions of the closure that are caught per 1,000 steps: the step is skipped and the "
        "learning rate halved, never below a hundredth; the next one is raised; 0 raises all. Single "
        "process only",
    )
    trust_steps: Count = Field(20, ge=1, description="healthy steps after which a snapshot may be used for a rollback")
    lr_mult: Number = Field(
        0.7, gt=0, le=1, description="factor for the learning rate after a rollback; 1 leaves it unchanged"
    )
    rewarm_steps: Count = Field(
        50, ge=0, description="updates over which the learning rate is warmed up again after a rollback; 0 for none"
    )
    skip_batches: Switch = Field(
        True,
        description="false: your loop repeats the batches after a rollback, so the random state is rolled back "
        "with the weights",
    )
    snapshots: Count = Field(
        4, ge=0, description="number of snapshots in memory, each 12 bytes per parameter with Adam"
    )
    snapshot_memory_gb: Number | None = Field(
        None, gt=0, description="memory limit for all snapshots; default: a quarter of this machine's memory"
    )
    snapshot_disk_gb: Number | None = Field(
        None,
        ge=0,
        description="with a run_dir: disk limit for snapshots when memory holds fewer than two; default: a quarter "
        "of the free space, 0 for none",
    )
    replay_memory_mb: Number = Field(
        256.0,
        ge=0,
        description="memory for batches given as batch=, so that a rollback can replay their updates; 0 for none",
    )
    incident_bundles: Switch = Field(
        True,
        description="with a run_dir: write a bundle of each refused step, for `steadystep replay`, to "
        "run_dir/incidents",
    )
    incident_batch_mb: Number = Field(64.0, ge=0, description="largest batch stored in a bundle; 0 stores no data")
    snapshot_time_share: Number = Field(
        0.005,
        gt=0,
        lt=1,
        description="deprecated, no effect: the snapshot interval follows from the size of a snapshot",
    )

    @property
    def unused(self) -> tuple[str, ...]:
        """Keys that were set and no longer have an effect."""
        default = type(self).model_fields["snapshot_time_share"].default
        return () if self.snapshot_time_share == default else ("recovery.snapshot_time_share",)


class Config(Settings):
    """All settings of a guard. `Config.load` also takes a mapping or a YAML file.

    >>> config = Config.load({"mode": "careful", "training": {"max_grad_norm": 1.0}})
    >>> config.training.max_grad_norm, config.recovery.trust_steps
    (1.0, 20)
    """

    mode: Literal["observe", "careful", "autopilot"] = Field(
        "autopilot",
        description="observe only records; careful skips and clips; autopilot also rolls back and limits the "
        "learning rate",
    )
    training: TrainingSettings = Field(default_factory=TrainingSettings)
    monitoring: MonitoringSettings = Field(default_factory=MonitoringSettings)
    recovery: RecoverySettings = Field(default_factory=RecoverySettings)

    @classmethod
    def load(cls, source: "Config | Mapping[str, Any] | str | Path | None") -> Self:
        """Return the settings in `source`.

        Args:
            source: a Config, a mapping shaped like the YAML file, the path of a YAML file, or None for the defaults.

        Raises:
            ConfigError: keys are unknown, values are not allowed, or the file cannot be read; all problems in one
                message.
        """
        if source is None:
            return cls()
        if isinstance(source, cls):
            return source
        if isinstance(source, Mapping):
            return cls.from_mapping(source, "config")
        if isinstance(source, str | Path):
            return cls.from_mapping(read_yaml(Path(source)), str(source))
        raise ConfigError(f"config: expected a Config, a mapping or a path to a YAML file, got {type(source).__name__}")

    def with_checkpoints(self) -> Self:
        """Return these settings with checkpoints on, unless `save_checkpoints` is set."""
        if self.monitoring.save_checkpoints is not None:
            return self
        return self.model_copy(update={"monitoring": self.monitoring.model_copy(update={"save_checkpoints": True})})

    @classmethod
    def from_mapping(cls, raw: Mapping[Any, Any], where: str) -> Self:
        """Return the settings in `raw`, a mapping shaped like the YAML file; error messages begin with `where`."""
        # why: an empty section ("training:" and nothing under it) is what is left after commenting keys out
        sections = sections_of(cls)
        filled = {key: {} if value is None and key in sections else value for key, value in raw.items()}
        filled |= {"recovery": new_settings(filled["recovery"])} if "recovery" in filled else {}
        problems = [*unknown_keys(cls, filled)]
        if problems:
            raise ConfigError("\n".join(f"{where}: {problem}" for problem in problems))
        return checked(cls, filled, where=where)


def observe() -> Config:
    """Return a `Config` that measures and records, and never changes the run."""
    return Config(mode="observe")


def careful() -> Config:
    """Return a `Config` that refuses or scales down bad updates; weights, moments and learning rate stay untouched."""
    return Config(mode="careful")


def autopilot() -> Config:
    """Return a `Config` with all interventions, rollback and replay included. The default."""
    return Config(mode="autopilot")
