"""Makes a guard's parts from its settings. Nothing here decides anything."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, final

from torch import nn
from torch.optim import Optimizer

from steadystep._utils.rng import host_random_kept
from steadystep.actions import Around, Updater
from steadystep.checkpoints.data_position import DataPosition
from steadystep.checkpoints.loop_state import LoopState
from steadystep.checkpoints.run_lock import RunLock
from steadystep.clip import NormRule, TensorEMAClip
from steadystep.config import Config
from steadystep.detectors import Detector, sees_every_step
from steadystep.detectors.build import MEASURED_BY_THE_PAST, beta2_of, build_detectors, decay_of, is_scale_free
from steadystep.diagnosis import RunHistory
from steadystep.engine import arguments, components
from steadystep.engine.closures import ClosureErrors
from steadystep.engine.components import Measuring, clip_rule, measuring_for, tensor_clip
from steadystep.engine.judge import Judge
from steadystep.engine.learning_rate import LearningRate, check_rates
from steadystep.engine.microbatch_group import check_pipelined
from steadystep.engine.miscomputation import Recomputation
from steadystep.engine.parts import Parts, RunState
from steadystep.engine.replay import Replayer, Rollouts
from steadystep.engine.reruns import BatchReruns, Counterfactuals
from steadystep.engine.rollback import Checkpoints, Rollback, RunProgress
from steadystep.incidents import NaNTracer
from steadystep.optimizers import each_of
from steadystep.parallel import Meeting, Ranks, ends_of, ranks_and_model, sections
from steadystep.policy import Budget, EarlyStopping, Limits
from steadystep.precision import Fp32Islands
from steadystep.schedule import Schedule
from steadystep.signals import GradientSamples, structure_of
from steadystep.signals.weights import WeightEdits
from steadystep.snapshots.recovery import Recovery
from steadystep.snapshots.replay_buffer import ReplayBuffer
from steadystep.snapshots.tensor_state import TensorState
from steadystep.state import DETECTOR, KeptObject, Stateful
from steadystep.tracking import Sink, Tracking
from steadystep.tracking.tracker import NullTracker


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
    hparams: Mapping[str, Any] | None = None,
) -> Parts:
    """All parts, or an error that leaves model and optimizer as they were; one that all ranks raise."""
    meeting = Meeting() if meeting is None else meeting
    with meeting.telling(model):
        arguments.check_storage(model)
        check_rates(optimizer)
    with host_random_kept(), meeting.telling(model):
        folder = None if run_dir is None else arguments.folder("run_dir", run_dir)
        detectors, sinks = arguments.sequence("detectors", extra_detectors), arguments.sequence("sinks", extra_sinks)
        more: dict[str, Any] = {"force": force, "meeting": meeting, "hparams": arguments.hparams(hparams)}
        return _build(guard, config, model, optimizer, schedule, folder, detectors, sinks, **more)


def _build(
    guard: KeptObject,
    config: Config,
    model: nn.Module,
    optimizer: Optimizer,
    schedule: Schedule | None,
    folder: Path | None,
    extra_detectors: Sequence[Detector],
    extra_sinks: Sequence[Sink],
    *,
    force: bool,
    meeting: Meeting,
    hparams: dict[str, Any],
) -> Parts:
    components.check_settings(config, schedule, folder)
    ranks, model = ranks_and_model(model)
    # before the lock: it makes the folder
    sinks = components.sinks(config, folder, extra_sinks) if ranks.rank == 0 else ()
    lock, wrong = components.lock(folder, ranks, force=force)
    meeting.compare(ranks, sections(config, model, optimizer, extra_detectors), wrong=wrong)
    check_pipelined(config, ranks.stages)
    repeats = folder is not None or components.replay_buffer_bytes(config) > 0
    measuring = measuring_for(config, model, optimizer, ranks, repeats=repeats)
    islands = Fp32Islands(model, list(config.training.fp32_modules))
    try:
        log: Tracking | NullTracker = NullTracker()
        if ranks.rank == 0:
            log = components.tracking(config, folder, model, sinks, arguments.hparams_of(optimizer) | hparams)
        start, planned, times = config.training.learning_rate, config.training.schedule, config.training.lr_times
        learning_rate = LearningRate(optimizer, start=start, schedule=schedule, planned=planned, times=times)
    except BaseException:
        islands.remove()
        raise
    measuring.measurer.learning_rate = learning_rate
    detectors = _detectors(config, optimizer, ranks, learning_rate, extra_detectors)
    ground = _Ground(guard, config, model, optimizer, folder, ranks, measuring, learning_rate, detectors)
    every = config.monitoring.log_frequency if log.wants_samples else None
    return ground.parts(log=log, islands=islands, lock=lock, gradient_samples=GradientSamples(every))


def _detectors(
    config: Config,
    optimizer: Optimizer,
    ranks: Ranks,
    learning_rate: LearningRate,
    extra: Sequence[Detector],
) -> tuple[Detector, ...]:
    return build_detectors(
        config,
        beta2=beta2_of(optimizer),
        decay=decay_of(optimizer) if ranks.size == 1 else None,  # why: each rank sees the peaks of its own part
        extra=extra,
        scheduled=learning_rate.scheduled,
        scale_free=is_scale_free(optimizer),
    )


@final
@dataclass(frozen=True, slots=True)
class _Ground:
    """What all other parts stand on."""

    guard: KeptObject
    config: Config
    model: nn.Module
    optimizer: Optimizer
    folder: Path | None
    ranks: Ranks
    measuring: Measuring
    learning_rate: LearningRate
    detectors: tuple[Detector, ...]

    def parts(
        self,
        *,
        log: Tracking | NullTracker,
        islands: Fp32Islands,
        lock: RunLock | None,
        gradient_samples: GradientSamples,
    ) -> Parts:
        """Everything else."""
        limits, budget = components.limits(self.config), components.budget(self.config)
        structure = partial(structure_of, self.model, self.optimizer)
        history = RunHistory(components.setup(self.config, self.folder), structure)
        replay_buffer = ReplayBuffer(max_bytes=components.replay_buffer_bytes(self.config))
        run_state, rule = self._run_state(), clip_rule(self.config)
        rolled_back = self._rolled_back(rule)
        recovery = self._recovery(rolled_back, run_state.data, replay_buffer, limits)
        updater = self._updater(recovery, rule)
        progress, judge = RunProgress(), self._judge(budget, limits)
        checkpoints = Checkpoints(run_state.checkpoints, run_state.loop, rolled_back, recovery)
        saved: dict[str, Stateful] = {"replay buffer": replay_buffer, "budget": budget, "run history": history}
        saved |= {"early stopping": run_state.early_stopping, **self._saved(judge)}
        return Parts(
            progress=progress,
            islands=islands,
            gradient_samples=gradient_samples,
            judge=judge,
            counterfactuals=self._counterfactuals(recovery),
            run_history=history,
            budget=budget,
            updater=updater,
            around=Around(self.optimizer, updater, self.learning_rate, self.measuring.probes),
            recovery=recovery,
            rollback=self._rollback(progress, updater, recovery, checkpoints, limits),
            closure_errors=self._closure_errors(budget, updater, limits),
            nan_tracer=self._nan_tracer(),
            log=log,
            run_state=run_state,
            lock=lock,
            stateful=rolled_back | saved,
            **self._measuring_parts(),
        )

    def _measuring_parts(self) -> dict[str, Any]:
        ranks, measuring, model, optimizer = self.ranks, self.measuring, self.model, self.optimizer
        return {
            **{name: getattr(measuring, name) for name in ("precision", "runner", "measurer", "probes")},
            "ranks": ranks,
            "learning_rate": self.learning_rate,
            "edits": WeightEdits(model, measuring.gradients, each_of(optimizer), hooked=ranks.size == 1),
            "checksums": components.checksums(self.config, model, optimizer, ranks),
            "recomputation": Recomputation(self.config, model, measuring, ranks),
        }

    def _saved(self, judge: Judge) -> dict[str, Stateful]:
        measuring, memory = self.measuring, self.measuring.memory
        saved: dict[str, Stateful] = {} if memory is None else {"memory": memory}
        saved |= {"learning_rate": self.learning_rate, "probes": measuring.probes, "inputs": measuring.inputs}
        return saved | {"rollback trial": judge.trial, "sudden zero": judge.sudden_zero}

    def _run_state(self) -> RunState:
        training, ranks, at = self.config.training, self.ranks, self.measuring
        early = EarlyStopping(patience=training.patience if training.early_stopping else None)
        data = DataPosition(at.device)
        if ranks.size > 1:
            data.ends = ends_of(ranks, data, training.gradient_accumulation_steps)
        loop = LoopState(self.model, self.optimizer, self.guard, data, device=at.device, ranks=ranks, finite=at.finite)
        checkpoints = components.checkpointing(self.config, self.folder, loop, ranks)
        return RunState(data, loop, early, checkpoints=checkpoints, ranks=ranks)

    def _rolled_back(self, rule: NormRule | TensorEMAClip | None) -> dict[str, Stateful]:
        """What is rolled back with the weights, also to a checkpoint."""
        parts: dict[str, Stateful] = {
            "precision": self.measuring.precision,
            "accumulation": self.measuring.runner.group,
        }
        parts |= {} if rule is None else {"clip rule": rule}
        return parts | {f"{DETECTOR}{detector.name}": detector for detector in self.detectors}

    def _recovery(
        self, rolled_back: dict[str, Stateful], data: DataPosition, replay_buffer: ReplayBuffer, limits: Limits
    ) -> Recovery:
        plateau, measuring, at = self.learning_rate.plateau, self.measuring, self.measuring.device
        returning = rolled_back | ({} if plateau is None else {"plateau": plateau})
        returning |= {} if limits.skips_batches else {"data": data}
        tensors = TensorState(self.model, self.optimizer, measuring.gradients, infinite=measuring.finite.infinite)
        return components.recovery(self.config, tensors, returning, at, self.ranks, replay_buffer, self.folder)

    def _updater(self, recovery: Recovery, rule: NormRule | TensorEMAClip | None) -> Updater:
        measuring, training, sharded = self.measuring, self.config.training, self.ranks.sharded
        return Updater(
            self.optimizer,
            measuring.precision,
            measuring.buffers,
            measuring.runner,
            self.learning_rate,
            recovery,
            measuring.probes,
            clip_norm=training.clip_norm,
            clip_value=training.clip_value,
            clip_rule=None if isinstance(rule, TensorEMAClip) else rule,
            tensor_clip=tensor_clip(self.config, rule, measuring.gradients, sharded=sharded),
            sharded=(self.ranks.stages or measuring.gradients) if sharded else None,
            copy_from=self.ranks.copy_from,
        )

    def _judge(self, budget: Budget, limits: Limits) -> Judge:
        return Judge(
            detectors=self.detectors,
            steady=tuple(filter(sees_every_step, self.detectors)),
            budget=budget,
            limits=limits,
            mode=self.config.mode,
            setup=components.setup(self.config, self.folder),
            beginnings={d.name: d.state_dict() for d in self.detectors if d.name in MEASURED_BY_THE_PAST},
        )

    def _counterfactuals(self, recovery: Recovery) -> Counterfactuals:
        at = self.measuring
        reruns = BatchReruns(at.precision, at.buffers, at.gradients, at.device, self.ranks)
        rollouts = Rollouts(recovery, at.buffers, at.device, alone=self.ranks.size == 1)
        return Counterfactuals(recovery, at.runner, at.measurer, reruns, rollouts)

    def _rollback(
        self, progress: RunProgress, updater: Updater, recovery: Recovery, checkpoints: Checkpoints, limits: Limits
    ) -> Rollback:
        measuring, runner, device = self.measuring, self.measuring.runner, self.measuring.device
        seen, ranks = self.detectors, self.ranks
        return Rollback(
            progress=progress,
            updater=updater,
            learning_rate=self.learning_rate,
            recovery=recovery,
            replayer=Replayer(
                runner=runner, updater=updater, recovery=recovery, detectors=seen, device=device, ranks=ranks
            ),
            measurer=measuring.measurer,
            buffers=measuring.buffers,
            probing=measuring.probes,
            checkpoints=checkpoints,
            rewarm_steps=limits.rewarm_steps,
            setup=components.setup(self.config, self.folder),
            replay=not limits.skips_batches,
        )

    def _closure_errors(self, budget: Budget, updater: Updater, limits: Limits) -> ClosureErrors:
        # why not with several ranks: the others wait inside their backward pass for the one that raised
        most = self.config.recovery.max_exceptions if self.ranks.size == 1 else 0
        return ClosureErrors(budget, updater, self.learning_rate, limits, self.config.mode, most)

    def _nan_tracer(self) -> NaNTracer:
        at, incidents = self.measuring, components.incidents(self.config, self.folder)
        return NaNTracer(self.model, self.optimizer, at.precision, at.buffers, at.runner, incidents, self.ranks)
