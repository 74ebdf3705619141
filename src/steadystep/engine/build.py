"""Makes a guard's parts from its settings. Nothing here decides anything."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import final

import torch
from torch import nn
from torch.optim import Optimizer

from steadystep._utils.text import note, warn
from steadystep.actions import Around, LearningRate, Update
from steadystep.actions.closure_errors import Caught
from steadystep.checkpoints.checkpointing import Checkpointing, Every
from steadystep.checkpoints.data_position import DataPosition
from steadystep.checkpoints.loop_state import LoopState
from steadystep.checkpoints.run_lock import RunLock
from steadystep.clip import TensorEMAClip
from steadystep.config import Config, seconds_in
from steadystep.detectors import Detector, sees_every_step
from steadystep.detectors.build import MEASURED_BY_THE_PAST, beta2_of, build_detectors, decay_of, is_scale_free
from steadystep.diagnosis import RunHistory
from steadystep.engine.judge import Judge
from steadystep.engine.measuring import clip_rule, measuring_for, tensor_clip
from steadystep.engine.microbatches import MicroBatchRunner
from steadystep.engine.replay import FromDisk
from steadystep.engine.rollback import InMemory, NoRecovery, Recovery
from steadystep.engine.run_state import RunState
from steadystep.errors import ConfigError, MisuseError
from steadystep.incidents import Incidents, NaNTracer
from steadystep.optimizers import each_of
from steadystep.parallel import Meeting, NullTracker, Once, Ranks, ranks_of, sections, unwrapped
from steadystep.policy import Budget, EarlyStopping, Limits
from steadystep.precision import Fp32Islands, Precision
from steadystep.records import Outcome, Signals
from steadystep.schedule import Schedule
from steadystep.signals import GradientSamples, Measurer, UpdateProbes
from steadystep.signals.gradients import GradientView
from steadystep.signals.weight_edits import WeightEdits
from steadystep.snapshots.placement import disk_bytes, memory_bytes, without_replay
from steadystep.snapshots.replay_buffer import ReplayBuffer
from steadystep.snapshots.snapshots import KeptObject, Snapshots
from steadystep.snapshots.tensor_state import TensorState
from steadystep.state import DETECTOR, Stateful
from steadystep.tracking import (
    Broadcast,
    GradientSample,
    NoLog,
    RunLog,
    RunStart,
    Sink,
    Tracking,
    default_sinks,
    named_sinks,
)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """One guard, taken apart."""

    precision: Precision
    runner: MicroBatchRunner
    measurer: Measurer
    probes: UpdateProbes
    judge: Judge
    run_history: RunHistory
    budget: Budget
    recovery: Recovery
    action: Update
    around: Around
    learning_rate: LearningRate
    log: Tracking | NullTracker
    gradient_samples: GradientSamples
    islands: Fp32Islands
    run_state: RunState
    caught: Caught
    nan_tracer: NaNTracer
    ranks: Ranks
    lock: RunLock | None
    stateful: dict[str, Stateful]
    """What is saved. Precision first: it is the only part that may refuse a state."""

    def record(self, outcome: Outcome, *, updates: int) -> None:
        """One attempt is over: it goes into the casebook, among the remembered states and into the log."""
        if outcome.signals is not None:
            self.run_history.opposed = self.judge.turns.are_taken
            self.run_history.note(outcome.signals, outcome.diagnosis, stepped=outcome.stepped)
        episode = self.budget.episode
        # why not while weights are compared: a new state could take the place of the one that is being tried
        calm = episode.calm(outcome.step) and self.judge.evidence.finding is None
        self.recovery.after(
            outcome,
            updates=updates,
            calm=calm,
            suspected_since=episode.suspected_since(outcome.step),
        )
        self.nan_tracer.note(outcome)
        self.log.record(outcome)
        if (believed := self.run_history.volunteers(outcome.step)) is not None:
            self.log.volunteered(outcome.step, believed)

    def sample(self, view: GradientView) -> None:
        """Every so often, and only for a sink: elements of the gradients."""
        if self.gradient_samples.due(view.signals.step):
            values = self.gradient_samples.take(view.signals.names, view.grads)
            self.log.sampled(GradientSample(step=view.signals.step, values=values))

    def close(self) -> None:
        """Let go of files, hooks and memory."""
        self.islands.remove()
        self.judge.edits.remove()
        self.recovery.forget()
        self.log.concluded(self.run_history.verdict())
        self.log.close()
        if self.lock is not None:
            self.lock.release()


def build(
    guard: KeptObject,
    config: Config,
    model: nn.Module,
    optimizer: Optimizer,
    schedule: Schedule | None,
    run_dir: str | Path | None,
    *,
    extra_detectors: Sequence[Detector] = (),
    extra_sinks: Sequence[Sink] = (),
    force: bool = False,
    meeting: Meeting | None = None,
) -> Parts:
    """All parts, or an error that leaves model and optimizer as they were."""
    training = config.training
    for key in config.recovery.unused:
        warn(f"{key} no longer has an effect: how often a state is kept follows from its size; leave it out")
    if config.monitoring.save_checkpoints and run_dir is None:
        raise ConfigError("monitoring.save_checkpoints needs a folder: Guard(..., run_dir=...)")
    if schedule is not None and training.lr_scheduler is not None:
        raise ConfigError("schedule= and training.lr_scheduler both set the learning rate: give one of them")
    folder = None if run_dir is None else Path(run_dir).expanduser()
    ranks, model = ranks_of(model), unwrapped(model)
    sinks = _sinks(config, folder, extra_sinks) if ranks.rank == 0 else ()  # before the lock: it makes the folder
    lock, wrong = _lock(folder, ranks, force=force)
    (meeting or Meeting()).compare(ranks, sections(config, model, optimizer, extra_detectors), wrong=wrong)
    repeats = folder is not None or _replay_buffer_bytes(config, ranks) > 0
    measuring = measuring_for(config, model, optimizer, ranks, repeats=repeats)
    gradients, device, runner = measuring.gradients, measuring.device, measuring.runner
    rule = clip_rule(config)
    islands = Fp32Islands(model, list(training.fp32_modules))
    try:
        log: Tracking | NullTracker = _tracking(config, folder, model, sinks) if ranks.rank == 0 else NullTracker()
        learning_rate = LearningRate(
            optimizer,
            start=training.learning_rate,
            schedule=schedule,
            planned=training.schedule,
            times=training.lr_times,
        )
    except BaseException:
        islands.remove()
        raise
    measuring.measurer.planned = lambda: learning_rate.announced
    traits = {"scheduled": learning_rate.scheduled, "scale_free": is_scale_free(optimizer)}
    decay = decay_of(optimizer) if ranks.size == 1 else None  # why: each rank sees the peaks of its own part
    noticing = build_detectors(config, beta2=beta2_of(optimizer), decay=decay, extra=extra_detectors, **traits)
    run_history, limits, budget = RunHistory(), _limits(config, ranks), _budget(config)
    early = EarlyStopping(patience=training.patience if training.early_stopping else None)
    data = DataPosition(device)
    if ranks.size > 1 and training.gradient_accumulation_steps == 1:
        data.ends = Once(ranks, ranks.any_rank(lambda: data.at_last))
    loop = LoopState(model, optimizer, guard, data, device=device, ranks=ranks, finite=measuring.finite)
    checkpoints = _checkpointing(config, folder, loop, ranks)

    going_back: dict[str, Stateful] = {"precision": measuring.precision, "accumulation": runner.group}
    going_back |= {} if rule is None else {"clip rule": rule}
    going_back |= {f"{DETECTOR}{detector.name}": detector for detector in noticing}
    plateau = learning_rate.plateau
    returning = going_back | ({} if plateau is None else {"plateau": plateau})
    returning |= {} if limits.skips_batches else {"data": data}
    if ranks.size > 1 and ranks.rank == 0 and limits.rolls_back and config.mode == "autopilot":
        note(without_replay(config.recovery.trust_steps, f"there are {ranks.size} ranks"))
    replay_buffer = ReplayBuffer(max_bytes=_replay_buffer_bytes(config, ranks))
    kept_apart: dict[str, Stateful] = {} if measuring.memory is None else {"memory": measuring.memory}
    kept_apart |= {
        "replay buffer": replay_buffer,
        "learning_rate": learning_rate,
        "budget": budget,
        "run history": run_history,
    }
    kept_apart |= {"probes": measuring.probes, "inputs": measuring.inputs, "early stopping": early}

    tensor_state = TensorState(model, optimizer, lambda: gradients.parameters, infinite=measuring.finite.infinite)
    recovery = _recovery(config, limits, tensor_state, runner, returning, device, ranks, replay_buffer, folder)
    action = Update(
        optimizer,
        measuring.precision,
        measuring.buffers,
        runner,
        learning_rate,
        recovery,
        measuring.probes,
        clip_norm=training.clip_norm,
        clip_value=training.clip_value,
        clip_rule=None if isinstance(rule, TensorEMAClip) else rule,
        tensor_clip=tensor_clip(config, rule, gradients, sharded=ranks.sharded),
        rewarm_steps=limits.rewarm_steps,
        replay=not limits.skips_batches,
        sharded=(lambda: gradients.parameters) if ranks.sharded else None,
        learn=lambda signals: _learn(noticing, signals),
        device=device,
        weigh=measuring.measurer.weights,
        from_disk=FromDisk(checkpoints, loop, going_back, recovery),
        copy_from=ranks.copy_from,
    )
    judge = Judge(
        detectors=noticing,
        steady=tuple(filter(sees_every_step, noticing)),
        budget=budget,
        recovery=recovery,
        learning_rate=learning_rate,
        limits=limits,
        mode=config.mode,
        weigh=measuring.measurer.with_weights,
        edits=WeightEdits(model, lambda: gradients.parameters, each_of(optimizer), hooked=ranks.size == 1),
        beginnings={d.name: d.state_dict() for d in noticing if d.name in MEASURED_BY_THE_PAST},
    )
    kept_apart |= {"rollback trial": judge.evidence, "sudden zero": judge.sudden_zero}
    incidents = _incidents(config, folder)
    # why not with several ranks: the others wait inside their backward pass for the one that raised
    most = config.recovery.max_exceptions if ranks.size == 1 else 0
    return Parts(
        caught=Caught(budget, action, learning_rate, limits, config.mode, most),
        precision=measuring.precision,
        runner=runner,
        measurer=measuring.measurer,
        probes=measuring.probes,
        judge=judge,
        run_history=run_history,
        budget=budget,
        recovery=recovery,
        action=action,
        around=Around(optimizer=optimizer, update=action, learning_rate=learning_rate, probing=measuring.probes),
        learning_rate=learning_rate,
        log=log,
        gradient_samples=GradientSamples(config.monitoring.log_frequency if log.wants_samples else None),
        islands=islands,
        nan_tracer=NaNTracer(model, optimizer, measuring.precision, measuring.buffers, runner, incidents, ranks),
        ranks=ranks,
        lock=lock,
        run_state=RunState(data, loop, early, checkpoints=checkpoints, ranks=ranks),
        stateful=going_back | kept_apart,
    )


def _lock(folder: Path | None, ranks: Ranks, *, force: bool) -> tuple[RunLock | None, str]:
    """Of the first rank, which writes; and why it is refused, where the other ranks have to know."""
    try:
        return (RunLock(folder, force=force) if folder is not None and ranks.rank == 0 else None), ""
    except MisuseError as error:
        if ranks.size == 1:
            raise
        return None, str(error)


def _budget(config: Config) -> Budget:
    return Budget(
        max_skips_in_a_row=config.recovery.max_skips_in_a_row,
        max_skips=config.recovery.max_skips,
        max_rollbacks=config.training.max_recovery_attempts,
    )


def _sinks(config: Config, folder: Path | None, extra: Sequence[Sink]) -> Sequence[Sink]:
    asked, here = config.monitoring.sinks, folder is not None
    return (*(default_sinks(has_folder=here) if asked is None else named_sinks(asked, has_folder=here)), *extra)


def _tracking(config: Config, folder: Path | None, model: nn.Module, sinks: Sequence[Sink]) -> Tracking:
    watch, settings = config.monitoring, config.model_dump(mode="json")
    sizes = {name: p.numel() for name, p in model.named_parameters() if p.requires_grad}
    run = RunStart(
        name="run" if folder is None else os.path.basename(os.path.realpath(folder)),
        run_dir=folder,
        settings=settings,
        parameters=sum(sizes.values()),
    )
    every = watch.log_frequency
    log = NoLog() if folder is None else RunLog(folder, layers_every=every, settings=settings, parameters=sizes)
    shown = Broadcast(sinks, run, every=watch.sink_frequency, layers_every=every) if sinks else None
    return Tracking(log, shown)


def _recovery(
    config: Config,
    limits: Limits,
    tensor_state: TensorState,
    runner: MicroBatchRunner,
    parts: dict[str, Stateful],
    device: torch.device,
    ranks: Ranks,
    replay_buffer: ReplayBuffer,
    folder: Path | None,
) -> Recovery:
    if config.mode != "autopilot" or not limits.rolls_back:
        return NoRecovery()
    snapshots = Snapshots(
        tensor_state,
        count=config.recovery.snapshots,
        device=device,
        min_interval=limits.trust_steps,
        memory_bytes=memory_bytes(config.recovery.snapshot_memory_gb),
        disk_bytes=disk_bytes(config.recovery.snapshot_disk_gb, folder),
        folder=None if folder is None else folder / "snapshots",
        checkpoints=folder is not None and bool(config.monitoring.save_checkpoints),
        ranks=ranks,
    )
    return InMemory(snapshots, runner, parts, replay_buffer=replay_buffer, trust_steps=limits.trust_steps, ranks=ranks)


def _learn(noticing: Sequence[Detector], signals: Signals) -> None:
    """A step that was judged before: only for what detectors remember."""
    for detector in noticing:
        if signals.probe is not None or sees_every_step(detector):
            detector.update(signals)


def _incidents(config: Config, folder: Path | None) -> Incidents | None:
    if folder is None or config.mode == "observe" or not config.recovery.incident_bundles:
        return None
    batch_bytes = config.recovery.incident_batch_mb * 1e6
    return Incidents(folder / "incidents", config=config.model_dump(mode="json"), max_batch_bytes=batch_bytes)


def _checkpointing(config: Config, folder: Path | None, loop: LoopState, ranks: Ranks) -> Checkpointing | None:
    watch = config.monitoring
    if folder is None or not watch.save_checkpoints:
        return None
    seconds = seconds_in(watch.checkpoint_frequency)
    steps = watch.checkpoint_frequency if isinstance(watch.checkpoint_frequency, int) else None
    every = Every(steps, seconds)
    return Checkpointing(folder / "checkpoints", loop, every, keep_last=watch.keep_checkpoints, ranks=ranks)


def _limits(config: Config, ranks: Ranks) -> Limits:
    recovery = config.recovery
    return Limits(
        rolls_back=config.training.auto_recovery and recovery.snapshots > 0,
        trust_steps=recovery.trust_steps,
        lr_mult=recovery.lr_mult,
        lr_mult_again=min(recovery.lr_mult, 0.5) if recovery.lr_mult < 1.0 else 1.0,
        rewarm_steps=recovery.rewarm_steps,
        skips_batches=recovery.skip_batches,
        replays=_replay_buffer_bytes(config, ranks) > 0,
    )


def _replay_buffer_bytes(config: Config, ranks: Ranks) -> float:
    # why not several ranks: one whose closure fails when it is run again would leave the others waiting
    remembers = config.mode == "autopilot" and config.training.auto_recovery and config.recovery.snapshots > 0
    wanted = remembers and config.recovery.skip_batches and ranks.size == 1
    return config.recovery.replay_memory_mb * 1e6 if wanted else 0.0
