"""Makes a guard's parts from its settings. Nothing here decides anything."""

from dataclasses import dataclass
from pathlib import Path
from typing import final

from torch import nn
from torch.optim import Optimizer

from steadystep.accumulation import Passes
from steadystep.actions import LearningRate, Update
from steadystep.buffers import Buffers
from steadystep.clip import PercentileClip, ZScoreClip
from steadystep.config import Config
from steadystep.detectors import Detector, NonFinite
from steadystep.errors import ConfigError
from steadystep.policy import Budget
from steadystep.precision import Fp32Islands, Precision
from steadystep.schedule import Schedule
from steadystep.signals import Gradients, Looker
from steadystep.state import Stateful
from steadystep.track import NoLog, RunLog, Tracker

_RULES = {"zscore": ZScoreClip, "percentile": PercentileClip}


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """One guard, taken apart."""

    precision: Precision
    passes: Passes
    looker: Looker
    detectors: tuple[Detector, ...]
    budget: Budget
    action: Update
    clip_rule: PercentileClip | ZScoreClip | None
    learning_rate: LearningRate
    log: Tracker
    islands: Fp32Islands

    @property
    def stateful(self) -> dict[str, Stateful]:
        """What is saved. Precision first: it is the only part that may refuse a state."""
        parts: dict[str, Stateful] = {"precision": self.precision, "accumulation": self.passes.group}
        parts |= {"learning_rate": self.learning_rate, "budget": self.budget}
        if self.clip_rule is not None:
            parts["clip rule"] = self.clip_rule
        return parts | {f"detector {detector.name}": detector for detector in self.detectors}


def build(
    config: Config, model: nn.Module, optimizer: Optimizer, *, schedule: Schedule | None, run_dir: str | Path | None
) -> Parts:
    """All parts, or an error that leaves model and optimizer as they were."""
    training, touches = config.training, config.mode != "observe"
    if schedule is not None and training.lr_scheduler is not None:
        raise ConfigError("schedule= and training.lr_scheduler both set the learning rate: give one of them")
    gradients = Gradients(model, optimizer)
    device = gradients.parameters[0].device
    precision = Precision(training.mixed_precision, device_type=device.type, autocast=training.autocast)
    precision.check(gradients.parameters)
    buffers = Buffers(model, restores=touches)
    size = training.gradient_accumulation_steps
    passes = Passes(
        optimizer, precision, buffers, lambda: gradients.parameters, size=size, device=device, retry=touches
    )
    folder = None if run_dir is None else Path(run_dir).expanduser()
    log: Tracker = NoLog() if folder is None else RunLog(folder, layers_every=config.monitoring.log_frequency)
    rule = None if training.clip_rule is None or training.gradient_clipping is False else _RULES[training.clip_rule]()
    islands = Fp32Islands(model, list(training.fp32_modules))
    try:
        learning_rate = LearningRate(
            optimizer, start=training.learning_rate, schedule=schedule, planned=training.schedule
        )
    except BaseException:
        islands.remove()
        raise
    return Parts(
        precision=precision,
        passes=passes,
        looker=Looker(gradients, optimizer, buffers),
        detectors=(NonFinite(),),
        budget=Budget(config.recovery.max_skips_in_a_row),
        action=Update(
            optimizer,
            precision,
            buffers,
            passes,
            clip_norm=training.clip_norm,
            clip_value=training.clip_value,
            clip_rule=rule,
        ),
        clip_rule=rule,
        learning_rate=learning_rate,
        log=log,
        islands=islands,
    )
