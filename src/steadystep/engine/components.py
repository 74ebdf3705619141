"""Parts of a guard that follow from its settings, one function each; what measures, as a whole."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from steadystep._utils.settings import seconds_in
from steadystep._utils.text import warn
from steadystep.actions import ByTensors, ByUnits, TensorClip
from steadystep.checkpoints.checkpointing import Checkpointing, Every
from steadystep.checkpoints.finite import FiniteParts
from steadystep.checkpoints.loop_state import LoopState
from steadystep.checkpoints.run_lock import RunLock
from steadystep.clip import PercentileClip, TensorEMAClip, ZScoreClip
from steadystep.clip.learned import NormRule
from steadystep.config import Config
from steadystep.diagnosis.facts import Setup
from steadystep.engine.microbatch_group import Draws, draws
from steadystep.engine.microbatches import MicroBatchRunner
from steadystep.errors import ConfigError, MisuseError
from steadystep.incidents import Incidents
from steadystep.memory import OutOfMemoryRetry
from steadystep.parallel import Ranks
from steadystep.policy import Budget, Limits
from steadystep.precision import Precision
from steadystep.schedule import Schedule
from steadystep.signals import (
    Activations,
    AttentionLogits,
    Evidence,
    Gradients,
    Inputs,
    Measurer,
    Outputs,
    RowNorms,
    StatePeaks,
    UpdateProbes,
    WeightNorms,
)
from steadystep.signals.checksums import Checksums
from steadystep.snapshots import Snapshots
from steadystep.snapshots.buffers import Buffers
from steadystep.snapshots.no_recovery import NoRecovery
from steadystep.snapshots.placement import disk_bytes, memory_bytes
from steadystep.snapshots.recovery import InMemory, Recovery
from steadystep.snapshots.replay_buffer import ReplayBuffer
from steadystep.snapshots.tensor_state import TensorState
from steadystep.state import Stateful
from steadystep.tracking import Broadcast, NoLog, RunLog, RunStart, Sink, Tracking
from steadystep.tracking.sinks import alert_sinks, default_sinks, named_sinks


def check_settings(config: Config, schedule: Schedule | None, run_dir: str | Path | None) -> None:
    """Raise where settings contradict each other; warn about those without effect."""
    for key in config.recovery.unused:
        warn(
            f"{key} no longer has an effect, because the snapshot interval follows from the size of a snapshot: "
            "remove it"
        )
    if config.monitoring.save_checkpoints and run_dir is None:
        raise ConfigError("monitoring.save_checkpoints needs a folder: Guard(..., run_dir=...)")
    if schedule is not None and config.training.lr_scheduler is not None:
        raise ConfigError("schedule= and training.lr_scheduler both set the learning rate: use one of them")


def lock(folder: Path | None, ranks: Ranks, *, force: bool) -> tuple[RunLock | None, str]:
    """Of the first rank, which writes; and why it is refused, where the other ranks have to know."""
    try:
        return (RunLock(folder, force=force) if folder is not None and ranks.rank == 0 else None), ""
    except MisuseError as error:
        if ranks.size == 1:
            raise
        return None, str(error)


def setup(config: Config, folder: Path | None) -> Setup:
    """What the settings say that advice need not recommend."""
    training = config.training
    clips = (
        training.clip_norm,
        training.clip_value,
        None if training.gradient_clipping is False else training.clip_rule,
    )
    return Setup(
        precision=training.mixed_precision,
        clips=any(limit is not None for limit in clips),
        warms_up=bool(training.warmup_steps),
        writes_bundles=_writes_bundles(config, folder),
    )


def budget(config: Config) -> Budget:
    """Limits on skips and rollbacks per window."""
    return Budget(
        max_skips_in_a_row=config.recovery.max_skips_in_a_row,
        max_skips=config.recovery.max_skips,
        max_rollbacks=config.training.max_recovery_attempts,
    )


def sinks(config: Config, folder: Path | None, extra: Sequence[Sink]) -> Sequence[Sink]:
    """Those of the settings, and the user's own."""
    asked, here = config.monitoring.sinks, folder is not None
    made = default_sinks(has_folder=here) if asked is None else named_sinks(asked, has_folder=here)
    return (*made, *alert_sinks(config.monitoring.alerts), *extra)


def tracking(
    config: Config, folder: Path | None, model: nn.Module, sinks: Sequence[Sink], hparams: Mapping[str, Any]
) -> Tracking:
    """The run log, and the sinks behind it."""
    sizes = {name: p.numel() for name, p in model.named_parameters() if p.requires_grad}
    about: dict[str, Any] = {"settings": config.model_dump(mode="json"), "hparams": hparams}
    name = "run" if folder is None else os.path.basename(os.path.realpath(folder))
    run = RunStart(name=name, run_dir=folder, parameters=sum(sizes.values()), **about)
    every, often = config.monitoring.log_frequency, config.monitoring.sink_frequency
    log = NoLog() if folder is None else RunLog(folder, layers_every=every, parameters=sizes, **about)
    shown = Broadcast(sinks, run, every=often, layers_every=every) if sinks else None
    return Tracking(log, shown, shown=any(getattr(sink, "shows_incidents", False) for sink in sinks))


def incidents(config: Config, folder: Path | None) -> Incidents | None:
    """Where refused steps are written down; None where they are not."""
    if folder is None or not _writes_bundles(config, folder):
        return None
    batch_bytes = config.recovery.incident_batch_mb * 1e6
    return Incidents(folder / "incidents", config=config.model_dump(mode="json"), max_batch_bytes=batch_bytes)


def _writes_bundles(config: Config, folder: Path | None) -> bool:
    return folder is not None and config.mode != "observe" and config.recovery.incident_bundles


def checkpointing(config: Config, folder: Path | None, loop: LoopState, ranks: Ranks) -> Checkpointing | None:
    """Checkpoints at a cadence; None without a folder for them."""
    watch = config.monitoring
    if folder is None or not watch.save_checkpoints:
        return None
    seconds = seconds_in(watch.checkpoint_frequency)
    steps = watch.checkpoint_frequency if isinstance(watch.checkpoint_frequency, int) else None
    every = Every(steps, seconds)
    return Checkpointing(folder / "checkpoints", loop, every, keep_last=watch.keep_checkpoints, ranks=ranks)


def limits(config: Config) -> Limits:
    """How deep an intervention cuts and how long it waits."""
    recovery = config.recovery
    return Limits(
        rolls_back=config.training.auto_recovery and recovery.snapshots > 0,
        trust_steps=recovery.trust_steps,
        lr_mult=recovery.lr_mult,
        lr_mult_again=min(recovery.lr_mult, 0.5) if recovery.lr_mult < 1.0 else 1.0,
        rewarm_steps=recovery.rewarm_steps,
        skips_batches=recovery.skip_batches,
        replays=replay_buffer_bytes(config) > 0,
    )


def replay_buffer_bytes(config: Config) -> float:
    """What remembered batches may take; 0 where updates cannot be replayed."""
    remembers = config.mode == "autopilot" and config.training.auto_recovery and config.recovery.snapshots > 0
    wanted = remembers and config.recovery.skip_batches
    return config.recovery.replay_memory_mb * 1e6 if wanted else 0.0


def recovery(
    config: Config,
    tensor_state: TensorState,
    parts: dict[str, Stateful],
    device: torch.device,
    ranks: Ranks,
    replay_buffer: ReplayBuffer,
    folder: Path | None,
) -> Recovery:
    """States in memory, where the settings ask for rollbacks."""
    bounds = limits(config)
    if config.mode != "autopilot" or not bounds.rolls_back:
        return NoRecovery()
    snapshots = Snapshots(
        tensor_state,
        count=config.recovery.snapshots,
        device=device,
        min_interval=bounds.trust_steps,
        memory_bytes=memory_bytes(config.recovery.snapshot_memory_gb),
        disk_bytes=disk_bytes(config.recovery.snapshot_disk_gb, folder),
        folder=None if folder is None else folder / "snapshots",
        checkpoints=folder is not None and bool(config.monitoring.save_checkpoints),
        ranks=ranks,
    )
    return InMemory(snapshots, parts, replay_buffer=replay_buffer, trust_steps=bounds.trust_steps, ranks=ranks)


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
    gradients, buffers = Gradients(model, optimizer), Buffers(model, restores=touches)
    device = gradients.parameters[0].device
    precision = Precision(training.mixed_precision, device_type=device.type, autocast=training.autocast)
    precision.check(gradients.parameters)
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
        memory=memory,
        draws=Draws(device, by_modules=draws(model)) if repeats else None,
        ranks=ranks,
    )
    inputs, outputs = Inputs(), Outputs(model, gradients)
    probes = _probes(model, optimizer, gradients, outputs, alone=ranks.size == 1)
    weights = WeightNorms(gradients, infinite=finite.without_norm)
    peaks = StatePeaks(gradients, optimizer, finite.kept.tensors)
    measurer = Measurer(gradients, optimizer, buffers, probes, inputs, weights, peaks, Evidence(outputs, inputs))
    measurer.over_ranks = ranks.norms if ranks.size > 1 else None
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
        measurer=measurer,
    )


def _probes(
    model: nn.Module, optimizer: Optimizer, gradients: Gradients, outputs: Outputs, *, alone: bool
) -> UpdateProbes:
    heard, attention, tables = Activations(model), AttentionLogits(model), RowNorms(model)
    probes = UpdateProbes(gradients, optimizer, activations=heard, attention=attention, tables=tables, outputs=outputs)
    probes.listens = alone
    return probes


def checksums(config: Config, model: nn.Module, optimizer: Optimizer, ranks: Ranks) -> Checksums:
    """Of every bit between two updates; where parameters are whole on each rank."""
    checks = "off" if ranks.sharded else config.monitoring.corruption_checks
    return Checksums(model, optimizer, checks=checks, repairs=config.mode == "autopilot")


def _memory(config: Config, model: nn.Module) -> OutOfMemoryRetry | None:
    least = 2 if any(isinstance(module, _BatchNorm) for module in model.modules()) else 1  # it has no variance of one
    wanted = config.mode != "observe" and config.training.split_when_out_of_memory
    return OutOfMemoryRetry(least=least) if wanted else None


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
        raise ConfigError("training.clip_rule: agc needs whole rows, and FSDP2 shards them: use zscore or percentile")
    if isinstance(rule, TensorEMAClip):
        return ByTensors(rule)
    by_units = config.training.clip_rule == "agc" and config.training.gradient_clipping is not False
    return ByUnits(gradients) if by_units else None
