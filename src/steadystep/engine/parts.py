"""One guard, taken apart: what `build` makes and the pipeline works with."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

from steadystep.actions.apply import Updater
from steadystep.actions.manual_update import Around
from steadystep.checkpoints.run_lock import RunLock
from steadystep.diagnosis import RunHistory
from steadystep.engine.closures import ClosureErrors
from steadystep.engine.counterfactuals import Counterfactuals
from steadystep.engine.judge import Judge
from steadystep.engine.learning_rate import LearningRate
from steadystep.engine.microbatches import MicroBatchRunner
from steadystep.engine.rollback import Rollback, RunProgress
from steadystep.engine.run_state import RunState
from steadystep.incidents import NaNTracer
from steadystep.parallel import Ranks
from steadystep.policy import Budget
from steadystep.precision import Fp32Islands, Precision
from steadystep.records import Diagnosis
from steadystep.signals import GradientSamples, Measurer, UpdateProbes
from steadystep.signals.weight_edits import WeightEdits
from steadystep.snapshots.recovery import Recovery
from steadystep.state import Stateful, load_checked
from steadystep.tracking import Tracking
from steadystep.tracking.tracker import NullTracker


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

    def load(self, saved: Mapping[str, Any]) -> None:
        """Continue from what `Guard.state_dict` returned; an open group and all snapshots are dropped."""
        loaded = load_checked(self.stateful, saved)
        self.progress.attempts, self.progress.updates = loaded["attempts"], loaded["updates"]
        self.runner.reset()
        self.recovery.forget()
        self.edits.forget()

    def diagnose(self) -> tuple[Diagnosis, ...]:
        """Return the causes for the run so far; with those of an examination, if no step was taken since."""
        seen, (at, tried) = self.run_history.diagnose(), self.progress.examined
        if not tried or at != self.progress.attempts:
            return seen
        from steadystep.examination.story import one_story  # why here: experiments are rare

        return one_story(seen, tried)

    def verdict(self) -> Diagnosis | None:
        """Return the final diagnosis of the run; None for a run that is too short."""
        return None if self.run_history.verdict() is None else self.diagnose()[0]

    def close(self) -> None:
        """Let go of files, hooks and memory."""
        self.islands.remove()
        self.edits.remove()
        self.recovery.forget()
        self.log.concluded(self.verdict())
        self.log.close()
        if self.lock is not None:
            self.lock.release()
