"""The parts that compute gradients and look at them, from the settings."""

from dataclasses import dataclass
from typing import final

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from steadystep.actions import ByTensors, ByUnits, TensorClip
from steadystep.checkpoints.finite import FiniteParts
from steadystep.clip import PercentileClip, TensorEMAClip, ZScoreClip
from steadystep.clip.learned import NormRule
from steadystep.config import Config
from steadystep.engine.closures import Draws
from steadystep.engine.microbatches import MicroBatchRunner
from steadystep.errors import ConfigError
from steadystep.memory import OutOfMemoryRetry
from steadystep.parallel import Ranks
from steadystep.precision import Precision
from steadystep.signals import (
    Activations,
    AttentionLogits,
    Gradients,
    Inputs,
    Measurer,
    RowNorms,
    StatePeaks,
    UpdateProbes,
    WeightNorms,
)
from steadystep.snapshots.buffers import Buffers


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Measuring:
    """What it takes to compute gradients and to look at them."""

    gradients: Gradients
    device: torch.device
    precision: Precision
    buffers: Buffers
    finite: FiniteParts
    memory: OutOfMemoryRetry | None
    runner: MicroBatchRunner
    inputs: Inputs
    probes: UpdateProbes
    measurer: Measurer


def measuring_for(config: Config, model: nn.Module, optimizer: Optimizer, ranks: Ranks, *, repeats: bool) -> Measuring:
    """Made from the settings; `repeats` says that passes may be run again, with the random numbers they began with."""
    training, touches = config.training, config.mode != "observe"
    gradients = Gradients(model, optimizer)
    device = gradients.parameters[0].device
    precision = Precision(training.mixed_precision, device_type=device.type, autocast=training.autocast)
    precision.check(gradients.parameters)
    buffers = Buffers(model, restores=touches)
    finite = FiniteParts(model, buffers.judged)
    size, memory = training.gradient_accumulation_steps, _memory(config, model)
    ranks.watch(gradients.named, buffers.names, micro_batches=size)
    runner = MicroBatchRunner(
        optimizer,
        precision,
        buffers,
        gradients,
        size=size,
        device=device,
        retry=touches,
        # why: when one rank runs out of memory the others wait inside their backward pass, and torchrun restarts them
        memory=memory if ranks.size == 1 else None,
        draws=Draws(device, by_modules=draws(model)) if repeats else None,
        ranks=ranks,
    )
    inputs = Inputs()
    probes = UpdateProbes(
        gradients, optimizer, activations=Activations(model), attention=AttentionLogits(model), tables=RowNorms(model)
    )
    weights = WeightNorms(gradients, wanted=ranks.size == 1, infinite=finite.without_norm)
    peaks = StatePeaks(gradients, optimizer, finite.kept.tensors)
    return Measuring(
        gradients=gradients,
        device=device,
        precision=precision,
        buffers=buffers,
        finite=finite,
        memory=memory,
        runner=runner,
        inputs=inputs,
        probes=probes,
        measurer=Measurer(gradients, optimizer, buffers, probes, inputs, weights, peaks),
    )


def _memory(config: Config, model: nn.Module) -> OutOfMemoryRetry | None:
    least = 2 if any(isinstance(module, _BatchNorm) for module in model.modules()) else 1  # it has no variance of one
    wanted = config.mode != "observe" and config.training.split_when_out_of_memory
    return OutOfMemoryRetry(least=least) if wanted else None


def draws(model: nn.Module) -> bool:
    """Whether a forward pass draws random numbers, as far as its modules tell: dropout, also inside other layers."""
    return any("Dropout" in type(m).__name__ or getattr(m, "dropout", 0) for m in model.modules())


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
    return ByUnits(gradients) if by_units else None
