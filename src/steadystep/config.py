"""The settings: one schema for a YAML file, a mapping and keyword arguments, with messages a person can act on.

No key is parsed and then ignored in silence.
"""

import difflib
import math
import re
from collections.abc import Hashable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, field_validator, model_validator

from steadystep._deprecated import new_settings
from steadystep._utils.text import text_of
from steadystep.errors import ConfigError
from steadystep.schedule import NAMES, Schedule, named

DEFAULT_MAX_NORM = 1.0  # what `gradient_clipping: true` means without a number


def _no_bool(value: object) -> object:
    if isinstance(value, bool):
        raise ValueError("expected a number, got true/false")
    return value


def _only_bool(value: object) -> object:
    if isinstance(value, bool) or (isinstance(value, str) and value.lower() in ("true", "false")):
        return value
    raise ValueError("expected true or false")


Switch = Annotated[bool, BeforeValidator(_only_bool)]
Number = Annotated[float, BeforeValidator(_no_bool), Field(allow_inf_nan=False)]
Count = Annotated[int, BeforeValidator(_no_bool)]
_MOST = 2**31  # of things that are remembered, or added up


class Settings(BaseModel):
    """Base of every section: frozen, and unknown keys are an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")


Checked = TypeVar("Checked", bound=Settings)


class TrainingSettings(Settings):
    """How the update is made."""

    learning_rate: Number | None = Field(
        None,
        gt=0,
        description="a learning rate of zero or less would not train; leave it out to keep the optimizer's",
    )
    max_grad_norm: Number | None = Field(
        None, gt=0, description="gradients are scaled down to this global L2 norm; 0.5 to 5 is usual"
    )
    max_grad_value: Number | None = Field(None, gt=0, description="each gradient element is clamped to [-value, value]")
    clip_rule: Literal["zscore", "percentile", "tensor-ema", "agc"] | None = Field(
        None, description="limits from the run's own gradient norms or weights, beside max_grad_norm; see docs/clip.md"
    )
    gradient_clipping: Switch | None = Field(
        None, description="the limit itself is max_grad_norm; true without one means 1.0, false switches clipping off"
    )
    gradient_accumulation_steps: Count = Field(
        1, ge=1, le=_MOST, description="calls of step() that share one update; 1 is no accumulation"
    )
    lr_scaling: Literal["none", "linear", "sqrt"] = Field(
        "none",
        description="the learning rate was right for one micro-batch: times gradient_accumulation_steps (linear, for "
        "SGD) or its square root (sqrt, for Adam)",
    )
    lr_scheduler: str | None = Field(None, description=f"one of {', '.join(NAMES)}")
    warmup_steps: Annotated[Count, Field(ge=0)] | Annotated[Number, Field(gt=0, lt=1)] = Field(
        0, description="a count, or a fraction of total_steps; the learning rate rises from 0 over these updates"
    )
    total_steps: Count = Field(10_000, ge=1, description="updates in the whole run; where a decay ends")
    min_lr: Number = Field(0.0, ge=0, description="the learning rate a decay ends at")
    scheduler_options: dict[str, Any] = Field(
        default_factory=dict, description="what the schedule itself takes, such as power or num_cycles"
    )
    fp32_modules: tuple[str, ...] = Field((), description="name globs of modules kept in fp32 under mixed precision")
    mixed_precision: Literal["fp32", "bf16", "fp16"] = Field(
        "fp32", description="fp16 brings a loss scaler with it; bf16 needs none"
    )
    autocast: Switch = Field(True, description="false: your own code does the autocasting")
    split_when_out_of_memory: Switch = Field(
        True, description="halve a batch given as step(closure, batch=...) and try it again; false: the error is yours"
    )
    stability_monitoring: Switch = Field(
        True, description="false: only NaN and infinity are looked for; nothing is learned from the run"
    )
    auto_recovery: Switch = Field(
        True, description="false: no states are kept in memory, so there is no rolling back and no cutting of the rate"
    )
    early_stopping: Switch = Field(
        False, description="guard.should_stop becomes true when validation has not improved for `patience` times"
    )
    patience: Count = Field(10, ge=1, description="validations without improvement before early stopping")
    max_recovery_attempts: Count = Field(
        3, ge=0, description="rollbacks in 1,000 steps before the run is stopped; skipped batches have their own budget"
    )

    @model_validator(mode="after")
    def _check_schedule(self) -> Self:
        self.schedule(base_lr=self.learning_rate or 1.0)
        return self

    def schedule(self, *, base_lr: float) -> Schedule | None:
        """The schedule these settings ask for, as multipliers of `base_lr`; None when they ask for none."""
        if self.lr_scheduler is None and not self.warmup_steps:
            if self.min_lr or self.scheduler_options:
                raise ConfigError("min_lr and scheduler_options do nothing without lr_scheduler")
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
        """What the learning rate is multiplied by for the effective batch."""
        size = self.gradient_accumulation_steps
        return {"none": 1.0, "linear": float(size), "sqrt": math.sqrt(size)}[self.lr_scaling]

    @property
    def clip_norm(self) -> float | None:
        """The global norm to clip to, or None."""
        if self.gradient_clipping is False:
            return None
        others = (self.max_grad_norm, self.max_grad_value, self.clip_rule)
        if self.gradient_clipping and all(other is None for other in others):
            return DEFAULT_MAX_NORM
        return self.max_grad_norm

    @property
    def clip_value(self) -> float | None:
        """The value to clamp gradient elements to, or None."""
        return None if self.gradient_clipping is False else self.max_grad_value


class MonitoringSettings(Settings):
    """What is written down."""

    log_frequency: Count = Field(
        100,
        ge=1,
        description="per-layer gradient norms are logged every so many steps (and at every incident)",
    )
    sinks: tuple[Literal["tensorboard", "wandb", "mlflow", "console"], ...] | None = Field(
        None,
        description="where the run is shown beside run_dir/run.jsonl: any of tensorboard, wandb, mlflow, console; left "
        "out: tensorboard, where it is installed and there is a run_dir; [] for none",
    )
    sink_frequency: Count = Field(
        10, ge=1, description="sinks are shown every so many steps, the first 100 and what is slow or wrong in full"
    )
    loss_window_size: Count = Field(
        128, ge=32, le=_MOST, description="losses that a new one is compared with; 32 at least"
    )
    divergence_threshold: Number = Field(
        8.0, ge=3, description="sigma above its own level at which a loss counts as raised; below 3 noise would"
    )
    gradient_history_size: Count = Field(
        128, le=_MOST, ge=32, description="gradient norms that a new one is compared with; 32 at least"
    )
    explosion_threshold: Number = Field(
        10.0, ge=2, description="times its usual value at which a gradient norm is held back; below 2 noise would be"
    )
    lr_min: Number | None = Field(None, ge=0, description="a learning rate that drops below this is worth a warning")
    lr_max: Number | None = Field(None, gt=0, description="a learning rate above this is worth a warning")

    save_checkpoints: Switch | None = Field(
        None, description="write the whole state of the loop to run_dir/checkpoints; left out: only with Guard.resume"
    )
    checkpoint_frequency: Annotated[Count, Field(ge=1)] | str = Field(
        1000, description='steps between two of them, or a time such as "10 min"'
    )
    keep_checkpoints: Count = Field(3, ge=1, description="the newest so many stay, and the best one")

    @field_validator("checkpoint_frequency", mode="before")
    @classmethod
    def _steps_as_text(cls, value: object) -> object:
        return int(value) if isinstance(value, str) and value.strip().isdigit() else value

    @field_validator("checkpoint_frequency")
    @classmethod
    def _check_frequency(cls, value: int | str) -> int | str:
        seconds_in(value)
        return value


def seconds_in(frequency: int | str) -> float | None:
    """None for a number of steps; for a time such as "90 s", "10 min" or "1.5 h" its seconds."""
    if isinstance(frequency, int):
        return None
    found = re.fullmatch(r"([0-9.]+) *(s|min|h)", frequency.strip())
    try:
        seconds = float(found[1]) * {"s": 1.0, "min": 60.0, "h": 3600.0}[found[2]] if found else 0.0
    except ValueError:
        seconds = 0.0
    if not seconds > 0.0:
        raise ConfigError('a number of steps, or a time above zero such as "90 s", "10 min" or "1.5 h"')
    return seconds


class RecoverySettings(Settings):
    """How much trouble is too much."""

    max_skips_in_a_row: Count = Field(
        20, ge=1, description="so many refused updates one after another mean that skipping does not help"
    )
    max_skips: Count = Field(100, ge=1, description="so many refused updates within 200 steps are too many")
    max_exceptions: Count = Field(
        0,
        ge=0,
        description="exceptions of a closure that are caught in 1,000 steps: the step is skipped and the learning rate "
        "halved, never below a hundredth; the next one is raised; 0 raises all. Not with several ranks",
    )
    trust_steps: Count = Field(20, ge=1, description="healthy steps after which a remembered state may be gone back to")
    lr_mult: Number = Field(
        0.7, gt=0, le=1, description="the learning rate after a rollback, as a share of what it was; 1 leaves it alone"
    )
    rewarm_steps: Count = Field(50, ge=0, description="updates over which the learning rate rises again; 0 for none")
    skip_batches: Switch = Field(
        True,
        description="false: your loop gives the same batches again, so random numbers are rolled back with the weights",
    )
    snapshots: Count = Field(4, ge=0, description="states kept in memory, each 12 bytes per parameter with Adam")
    snapshot_memory_gb: Number | None = Field(
        None, gt=0, description="the most that all of them may take; a quarter of this machine's memory when left out"
    )
    snapshot_disk_gb: Number | None = Field(
        None,
        ge=0,
        description="with a run_dir: the most that states may take there when memory does not hold two; a quarter of "
        "what is free when left out, 0 for none",
    )
    replay_memory_mb: Number = Field(
        256.0,
        ge=0,
        description="batches given as batch= are remembered for a rollback to make their updates again; 0 for none",
    )
    incident_bundles: Switch = Field(
        True, description="with a run_dir: write what is needed to run a refused step again to run_dir/incidents"
    )
    incident_batch_mb: Number = Field(
        64.0, ge=0, description="the largest batch that goes into a bundle; 0 keeps your data out of it"
    )
    snapshot_time_share: Number = Field(
        0.005,
        gt=0,
        lt=1,
        description="deprecated, without effect: how often a state is kept follows from its size, never from a clock",
    )

    @property
    def unused(self) -> tuple[str, ...]:
        """Keys that were set and that have no effect any more."""
        default = type(self).model_fields["snapshot_time_share"].default
        return () if self.snapshot_time_share == default else ("recovery.snapshot_time_share",)


class Config(Settings):
    """All settings. `Config.load` also takes a mapping or a YAML file."""

    mode: Literal["observe", "careful", "autopilot"] = Field(
        "autopilot",
        description="observe looks and never touches; careful skips and clips; autopilot does all it can",
    )
    training: TrainingSettings = Field(default_factory=TrainingSettings)
    monitoring: MonitoringSettings = Field(default_factory=MonitoringSettings)
    recovery: RecoverySettings = Field(default_factory=RecoverySettings)

    @classmethod
    def load(cls, source: "Config | Mapping[str, Any] | str | Path | None") -> Self:
        """Settings from whatever the user has: a Config, a mapping shaped like the YAML, a YAML file, or nothing."""
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
        """The same with checkpoints on, unless it says otherwise."""
        if self.monitoring.save_checkpoints is not None:
            return self
        return self.model_copy(update={"monitoring": self.monitoring.model_copy(update={"save_checkpoints": True})})

    @classmethod
    def from_mapping(cls, raw: Mapping[Any, Any], where: str) -> Self:
        """Settings from a mapping shaped like the YAML; `where` is what messages begin with."""
        # why: an empty section ("training:" and nothing under it) is what is left after commenting keys out
        filled = {key: {} if value is None and key in _SECTIONS else value for key, value in raw.items()}
        filled |= {"recovery": new_settings(filled["recovery"])} if "recovery" in filled else {}
        problems = [*_unknown_keys(filled)]
        if problems:
            raise ConfigError("\n".join(f"{where}: {problem}" for problem in problems))
        return checked(cls, filled, where=where)


def checked(kind: type[Checked], raw: Mapping[Any, Any], *, where: str) -> Checked:
    """`raw` as settings of that kind; every problem is named, with the key and what would be right."""
    try:
        return kind.model_validate(raw)
    except ValidationError as error:
        problems = [_say(issue, kind) for issue in error.errors()]
    raise ConfigError("\n".join(f"{where}: {problem}" for problem in problems))


def observe() -> Config:
    """Looks and records; never touches the run."""
    return Config(mode="observe")


def careful() -> Config:
    """Refuses or scales down bad updates; never touches weights, moments or the learning rate."""
    return Config(mode="careful")


def autopilot() -> Config:
    """Everything that keeps the run on course. The default."""
    return Config(mode="autopilot")


_SECTIONS: dict[str, type[Settings]] = {
    "training": TrainingSettings,
    "monitoring": MonitoringSettings,
    "recovery": RecoverySettings,
}


def _known_keys() -> list[str]:
    nested = [f"{name}.{key}" for name, section in _SECTIONS.items() for key in section.model_fields]
    return [*Config.model_fields, *nested]


def _unknown_keys(raw: Mapping[Any, Any]) -> Iterator[str]:
    for key, value in raw.items():
        if key not in Config.model_fields:
            yield f"unknown key {key!r}{nearest(str(key))}"
        elif key in _SECTIONS and isinstance(value, Mapping):
            for inner in value:
                full = f"{key}.{inner}"
                if inner not in _SECTIONS[key].model_fields:
                    yield f"unknown key '{full}'{nearest(full)}"


# What other tools call it.
_ALIASES = {
    "lr": "training.learning_rate",
    "scheduler": "training.lr_scheduler",
    "warmup": "training.warmup_steps",
    "max_steps": "training.total_steps",
    "precision": "training.mixed_precision",
    "accumulation_steps": "training.gradient_accumulation_steps",
    "grad_clip": "training.max_grad_norm",
    "clip_grad_norm": "training.max_grad_norm",
}


def nearest(key: str, known: Sequence[str] | None = None) -> str:
    """A clause for an error message: the known key that was probably meant."""
    known = known or _known_keys()
    leaf = key.rpartition(".")[2]
    if leaf in _ALIASES:
        return f": did you mean '{_ALIASES[leaf]}'?"
    # A right key in the wrong section is the likeliest slip, then a misspelling.
    elsewhere = [k for k in known if k.rpartition(".")[2] == leaf]
    close = elsewhere or difflib.get_close_matches(key, known, n=1, cutoff=0.75)
    if not close:
        by_leaf = {k.rpartition(".")[2]: k for k in known}
        close = [by_leaf[m] for m in difflib.get_close_matches(leaf, by_leaf, n=1, cutoff=0.6)]
    sections = sorted(name for name in known if "." not in name)
    return f": did you mean '{close[0]}'?" if close else f"; known keys: {', '.join(sections)}"


def _say(issue: Any, kind: type[Settings]) -> str:
    path = [str(part) for part in issue["loc"]]
    key = ".".join(path)
    owner = _SECTIONS[path[0]].model_fields if len(path) > 1 and path[0] in _SECTIONS else kind.model_fields
    why = owner[path[-1]].description if path[-1] in owner else None
    message = issue["msg"].removeprefix("Value error, ")
    message = message[:1].lower() + message[1:]
    if issue["type"] == "value_error" and key in _SECTIONS:  # about several keys of a section
        return f"{key}: {message}"
    return f"{key} = {issue['input']!r}: {message}" + (f" ({why})" if why else "")


class _UniqueKeyLoader(yaml.SafeLoader):
    """A safe loader that refuses a key written twice: YAML would keep the last and lose the first in silence."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Hashable, Any]:
        seen = set()
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, Hashable):
                raise yaml.constructor.ConstructorError(None, None, "a key must be a word", key_node.start_mark)
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"key {key!r} is written twice", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)


_DEEPEST = 200  # brackets within brackets
_TOO_DEEP = "nested too deeply: settings are keys with values below them"


def _brackets(text: str) -> int:
    """The most that are open at once."""
    depth = most = 0
    for found in re.finditer(r"[\[\]{}]", text):
        depth = depth + 1 if found[0] in "[{" else max(0, depth - 1)
        most = max(most, depth)
    return most


def read_yaml(path: Path) -> Mapping[Any, Any]:
    """The mapping in a file; a key written twice is an error, and so is anything that is no mapping."""
    text = text_of(path, largest=1 << 20)
    if _brackets(text) > _DEEPEST:  # why beforehand: the time that the parser takes grows with the square
        raise ConfigError(f"{path}: {_TOO_DEEP}")
    try:
        raw = yaml.load(text, Loader=_UniqueKeyLoader)
    except yaml.MarkedYAMLError as error:
        line = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
        raise ConfigError(f"{path}{line}: not valid YAML ({error.problem})") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not valid YAML ({' '.join(str(error).split())[:300]})") from None
    except RecursionError:
        raise ConfigError(f"{path}: {_TOO_DEEP}") from None
    except (ValueError, OverflowError) as error:  # a number of thousands of digits, the 31st of February
        raise ConfigError(f"{path}: a value that cannot be read ({str(error)[:100]})") from None
    if raw is None:
        return {}
    if not isinstance(raw, Mapping):
        raise ConfigError(f"{path}: expected keys such as 'training:', got a {type(raw).__name__}")
    return raw
