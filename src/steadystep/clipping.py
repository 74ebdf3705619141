"""Which learned clipping the settings ask for."""

from steadystep.actions import ByTensors, ByUnits, TensorClip
from steadystep.clip import PercentileClip, TensorEMAClip, ZScoreClip
from steadystep.clip.rule import NormRule
from steadystep.config import Config
from steadystep.errors import ConfigError
from steadystep.signals import Gradients

_RULES = {"zscore": ZScoreClip, "percentile": PercentileClip, "tensor-ema": TensorEMAClip, "agc": None}


def clip_rule(config: Config) -> NormRule | TensorEMAClip | None:
    """The rule that learns its limits, if one is asked for."""
    training = config.training
    make = None if training.gradient_clipping is False or training.clip_rule is None else _RULES[training.clip_rule]
    return None if make is None else make()


def tensor_clip(
    config: Config, rule: NormRule | TensorEMAClip | None, gradients: Gradients, *, sharded: bool
) -> TensorClip | None:
    """What clips tensors or units one by one, if that is asked for."""
    if sharded and config.training.clip_rule == "agc" and config.training.gradient_clipping is not False:
        raise ConfigError("training.clip_rule: agc needs whole rows, and FSDP2 spreads them: use zscore or percentile")
    if isinstance(rule, TensorEMAClip):
        return ByTensors(rule)
    by_units = config.training.clip_rule == "agc" and config.training.gradient_clipping is not False
    return ByUnits(lambda: gradients.parameters) if by_units else None
