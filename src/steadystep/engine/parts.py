"""One guard, taken apart: what `build` makes and the pipeline works with.

Also what is kept of its run: its checkpoints, its place in the data, its best weights.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from torch import Tensor

from steadystep._utils.text import logger, warn
from steadystep.actions import Around, Updater
from steadystep.checkpoints.checkpoint import write_checkpoint
from steadystep.checkpoints.checkpointing import Checkpointing, read_any, store_at
from steadystep.checkpoints.data_position import DataPosition
from steadystep.checkpoints.finite import not_finite, said
from steadystep.checkpoints.loop_state import LoopState
from steadystep.checkpoints.packing import pack
from steadystep.checkpoints.run_lock import RunLock
from steadystep.diagnosis import RunHistory
from steadystep.engine.closures import ClosureErrors
from steadystep.engine.judge import Judge
from steadystep.engine.learning_rate import LearningRate
from steadystep.engine.microbatches import MicroBatchRunner
from steadystep.engine.miscomputation import Recomputation
from steadystep.engine.reruns import Counterfactuals
from steadystep.engine.rollback import Rollback, RunProgress
from steadystep.errors import CheckpointError, MisuseError
from steadystep.incidents import NaNTracer
from steadystep.parallel import Ranks, SingleProcess
from steadystep.policy import Budget, EarlyStopping
from steadystep.precision import Fp32Islands, Precision
from steadystep.records import Diagnosis
from steadystep.rl import Controls
from steadystep.signals import GradientSamples, Measurer, UpdateProbes
from steadystep.signals.checksums import Checksums
from steadystep.signals.weights import WeightEdits
from steadystep.snapshots.recovery import Recovery
from steadystep.state import KeptObject, Stateful, load_checked, save
from steadystep.tracking import Tracking
from steadystep.tracking.tracker import NullTracker

if TYPE_CHECKING:
    from steadystep.examination import Examination


@final
class BestWeights:
    """One copy of parameters and buffers, in host memory."""

    def __init__(self, loop: LoopState) -> None:
        self._loop = loop
        self._state: dict[str, Any] | None = None

    def note(self) -> None:
        """These are the best so far."""
        self._state = {part: _copied(tensors) for part, tensors in self._loop.weights().items()}

    def put_back(self) -> bool:
        """False when there are none."""
        if self._state is None:
            return False
        self._loop.put_weights_back(self._state)
        return True


def _copied(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.to("cpu", copy=True) for name, tensor in tensors.items()}


@final
class RunState:
    """Saving, resuming, early stopping. Without checkpoints the best weights are kept in memory, if they are wanted."""

    def __init__(
        self,
        data: DataPosition,
        loop: LoopState,
        early: EarlyStopping,
        *,
        checkpoints: Checkpointing | None,
        ranks: Ranks | None = None,
    ) -> None:
        self._ranks = ranks or SingleProcess()
        self.data = data
        self.loop = loop
        self.early_stopping = early
        self.checkpoints = checkpoints
        self._best = BestWeights(loop) if checkpoints is None and early.wanted else None

    def check(self, name: str, thing: KeptObject) -> None:
        """Whether its state can be read and, where there are checkpoints, written.

        Raises:
            MisuseError: it cannot; said now and not when the first checkpoint is due.
        """
        if isinstance(thing, Iterable):  # a loader's state_dict() starts its workers
            return
        try:
            state = thing.state_dict()
        except Exception as error:
            raise MisuseError(
                f"keep({name!r}, ...): state_dict() raised {type(error).__name__} ({error}): call keep() once it "
                "has a state"
            ) from error
        if self.checkpoints is not None:
            try:
                pack(state)
            except CheckpointError as error:
                raise MisuseError(f"keep({name!r}, ...): its state cannot be saved: {error}") from None

    def between(self, step: int, updates: int) -> None:
        """Between two steps; `step` is the one that comes next."""
        if self.checkpoints is not None:
            self.checkpoints.between(step, updates)

    def validated(self, loss: float) -> None:
        """A validation is over; the best weights are worth keeping."""
        if not self.early_stopping.update(loss):
            return
        if self.checkpoints is not None:
            self.checkpoints.validated(loss)
        elif self._best is not None:
            self._best.note()

    def resume(self, path: Path | None) -> None:
        """Continue from the newest checkpoint, if there is one, or from `path`."""
        if path is not None:
            found = read_any(path, self._ranks)
        else:
            newest = None if self.checkpoints is None else self.checkpoints.newest()
            if newest is None:
                return
            found = newest
        self.loop.put_back(found.state)
        if self._ranks.rank == 0:
            logger.info("resumed at step %d from %s", found.step, found.path)

    def save(self, folder: Path | None, step: int, updates: int) -> Path:
        """Write a checkpoint and wait for it."""
        if folder is not None:
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise CheckpointError(f"{folder} cannot be created ({error.strerror})") from None
            packed = pack(self.loop.gather())
            bad = not_finite(packed.tensors | packed.shards, packed.tree)
            if not self._ranks.all(not bad):
                where = f" ({said(bad)})" if bad else " on another rank"
                raise CheckpointError(f"the state of step {step} has non-finite values{where}: nothing was written")
            if self._ranks.size == 1:
                return write_checkpoint(folder, packed, step=step, updates=updates)
            store, written = store_at(folder, self._ranks), None
            try:
                written = store.put(packed, step=step, updates=updates)
            finally:  # the first rank has completed it, or the others need not wait
                whole = self._ranks.all(written is not None)
            if not whole:
                raise CheckpointError(f"the checkpoint in {folder} could not be written by another rank")
            return written
        if self.checkpoints is None:
            raise MisuseError("save() without a path needs run_dir= and monitoring.save_checkpoints: true")
        self.checkpoints.save(step, updates, wait=True)
        path = self.checkpoints.flush()
        if not path.exists():
            raise CheckpointError(f"{path} could not be written: see the warning above for the reason")
        return path

    def restore_best(self, step: int, updates: int) -> bool:
        """Put the weights of the best validation back, from disk or from memory; False when there are none."""
        if self.checkpoints is None:
            return self._best is not None and self._best.put_back()
        self.checkpoints.save(step, updates, wait=True)  # the best may be the present ones
        found = self.checkpoints.best()
        if found is not None:
            self.loop.put_weights_back(found.state)
        return found is not None

    def close(self, step: int, updates: int, *, save: bool) -> None:
        """Save the last state, if it is whole."""
        if self.checkpoints is not None:
            self.checkpoints.close(step, updates, save=save)


_MOST = 64  # remembered batches that experiments use


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """Grouped by the way of the data."""

    progress: RunProgress
    ranks: Ranks
    # MEASURE
    precision: Precision
    islands: Fp32Islands
    runner: MicroBatchRunner
    measurer: Measurer
    probes: UpdateProbes
    edits: WeightEdits
    checksums: Checksums
    recomputation: Recomputation
    gradient_samples: GradientSamples
    # NOTICE, EXPLAIN, DECIDE
    judge: Judge
    counterfactuals: Counterfactuals
    run_history: RunHistory
    budget: Budget
    # ACT
    learning_rate: LearningRate
    updater: Updater
    around: Around
    recovery: Recovery
    rollback: Rollback
    closure_errors: ClosureErrors
    # RECORD
    nan_tracer: NaNTracer
    log: Tracking | NullTracker
    run_state: RunState
    lock: RunLock | None
    stateful: dict[str, Stateful]
    """What is saved. Precision first: it is the only part that may refuse a state."""

    def __post_init__(self) -> None:
        self.run_state.loop.verify = self._verify

    def _verify(self) -> None:
        """A flipped bit does not reach a checkpoint, as far as it was checked since the last update."""
        for flip in self.checksums.verify(everything=True) if self.checksums.armed else ():
            done = "was put back" if flip.repaired else "could not be put back"
            warn(f"before a checkpoint: bit {flip.bit} of element {flip.index} of {flip.tensor} flipped, and {done}")

    def load(self, saved: Mapping[str, Any]) -> None:
        """Continue from what `Guard.state_dict` returned; an open group and all snapshots are dropped."""
        loaded = load_checked(self.stateful, saved)
        self.progress.attempts, self.progress.updates = loaded["attempts"], loaded["updates"]
        self.runner.reset()
        self.recovery.forget()
        self.edits.forget()
        self.checksums.forget()

    def expect_edits(self) -> None:
        """The loop is about to change weights."""
        self.edits.expect()
        self.checksums.drop()

    def save(self) -> dict[str, Any]:
        """What `load` takes, ready for JSON."""
        return save(self.stateful) | {"attempts": self.progress.attempts, "updates": self.progress.updates}

    def keep(self, name: str, thing: KeptObject, *, check: bool, update: Callable[[], object] | None) -> None:
        """See `Guard.keep`."""
        self.run_state.check(name, thing)
        self.recovery.keep(name, thing, update)
        self.run_state.loop.keep(name, thing, check=check)
        if isinstance(thing, Controls):
            self.counterfactuals.rollouts.controls = self.updater.controls = thing
            self.judge.policy_trial.controls = thing

    def begin_step(self) -> None:
        """A loop's own step begins: what an earlier one left open, or a pass without a backward, is over."""
        self.around.abandon()
        self.probes.drop_pass()

    def examine(self, *given: Any) -> "Examination":
        """See `examine_guarded`."""
        from steadystep.engine.experiments import examine_guarded  # why here: experiments are rare

        return examine_guarded(self, *given)

    def diagnose(self) -> tuple[Diagnosis, ...]:
        """Return the causes for the run so far; with those of an examination, if no step was taken since."""
        at, story = self.progress.examined
        return story if story and at == self.progress.attempts else self.run_history.diagnose()

    def verdict(self) -> Diagnosis | None:
        """Return the final diagnosis of the run; None for a run that is too short."""
        return None if self.run_history.verdict() is None else self.diagnose()[0]

    def close(self) -> None:
        """Let go of files, hooks and memory."""
        self.islands.remove()
        self.probes.drop_pass()
        self.edits.remove()
        self.checksums.forget()
        self.recovery.forget()
        self.log.concluded(self.verdict())
        self.log.close()
        if self.lock is not None:
            self.lock.release()
