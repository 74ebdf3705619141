"""One guard, taken apart: what `build` makes and the pipeline works with."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, final

from torch import Tensor, nn
from torch.optim import Optimizer

from steadystep.actions import Around, Updater
from steadystep.checkpoints.run_lock import RunLock
from steadystep.config import Config
from steadystep.diagnosis import RunHistory
from steadystep.engine.closures import ClosureErrors
from steadystep.engine.judge import Judge
from steadystep.engine.learning_rate import LearningRate
from steadystep.engine.microbatches import MicroBatchRunner
from steadystep.engine.reruns import Counterfactuals
from steadystep.engine.rollback import Rollback, RunProgress
from steadystep.engine.run_state import RunState
from steadystep.errors import MisuseError, UnsupportedError
from steadystep.incidents import NaNTracer
from steadystep.optimizers import CombinedOptimizer
from steadystep.parallel import Ranks
from steadystep.policy import Budget
from steadystep.precision import Fp32Islands, Precision
from steadystep.signals import GradientSamples, Measurer, UpdateProbes
from steadystep.signals.weights import WeightEdits
from steadystep.snapshots.recovery import Recovery
from steadystep.state import KeptObject, Stateful, load_checked, save
from steadystep.tracking import Tracking
from steadystep.tracking.tracker import NullTracker

if TYPE_CHECKING:
    from steadystep.examination import Examination

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

    def save(self) -> dict[str, Any]:
        """What `load` takes, ready for JSON."""
        return save(self.stateful) | {"attempts": self.progress.attempts, "updates": self.progress.updates}

    def keep(self, name: str, thing: KeptObject, *, check: bool, update: Callable[[], object] | None) -> None:
        """See `Guard.keep`."""
        self.run_state.check(name, thing)
        self.recovery.keep(name, thing, update)
        self.run_state.loop.keep(name, thing, check=check)

    def examine(
        self,
        model: nn.Module,
        optimizer: Optimizer | None,
        config: Config,
        batches: Iterable[Any] | None,
        loss: Callable[[Any], Tensor] | None,
        options: Mapping[str, Any],
    ) -> "Examination":
        """Experiments with the run's own loss and batches, and one story with what it has shown so far."""
        from steadystep.examination import examine  # why here: experiments are rare
        from steadystep.examination.story import one_story

        if self.ranks.size > 1:
            raise UnsupportedError("examine works in a single process: run it on one rank without the others")
        if optimizer is None or isinstance(optimizer, CombinedOptimizer):
            raise UnsupportedError("examine needs a guard with one optimizer: call steadystep.examine for each of them")
        remembered = self.recovery.remembered(_MOST)
        if loss is None:
            if not remembered:
                raise MisuseError(
                    "examine has no loss: pass loss=, a function of a batch, or train with step(f, batch=...)"
                )
            loss = remembered[-1].closure
        if batches is None:
            batches = [recipe.batch for recipe in remembered]
            if not batches:
                raise MisuseError(
                    "examine has no batches: pass your loader, or train with guard.step(closure, batch=...)"
                )
        compute = loss

        def under_precision(batch: Any) -> Tensor:
            with self.precision.autocast():
                return compute(batch)

        settings = {"max_grad_norm": config.training.max_grad_norm, **options}
        done = examine(model, optimizer, under_precision, batches, **settings)
        return replace(done, causes=one_story(self.run_history.diagnose(), done.causes))

    def close(self) -> None:
        """Let go of files, hooks and memory."""
        self.islands.remove()
        self.edits.remove()
        self.recovery.forget()
        self.log.concluded(self.run_history.verdict())
        self.log.close()
        if self.lock is not None:
            self.lock.release()
