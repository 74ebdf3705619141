"""The loop of `steadystep train`: the guard's own face, and nothing a user could not write."""

import math
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, final

from steadystep import faults
from steadystep.errors import ConfigError
from steadystep.guard import Guard
from steadystep.records import Outcome
from steadystep.track import Sink
from steadystep.train.crew import Crew
from steadystep.train.job import Job, make
from steadystep.train.plan import RunPlan

Watch = Callable[[Outcome, Guard], None]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """How a run ended."""

    run_dir: str
    steps: int
    updates: int
    trained: int
    """Steps of this program; the others were there before it was resumed."""
    final_loss: float
    validation: float | None
    best_validation: float | None
    incidents: int
    stopped_early: bool
    seconds: float
    diagnosis: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """For JSON: what is not finite as text."""
        return {k: v if not isinstance(v, float) or math.isfinite(v) else str(v) for k, v in asdict(self).items()}


def prepare_folder(run_dir: Path, plan: Path, *, resume: bool) -> None:
    """A folder belongs to one run: a second one needs another, or `--resume`."""
    used = (run_dir / "run.jsonl").exists() or (run_dir / "checkpoints").exists()
    if used and not resume:
        raise ConfigError(f"{run_dir} holds a run already: continue it with --resume, or give another --run-dir")
    if resume and not used:
        raise ConfigError(f"{run_dir} holds no run to continue: leave --resume out to start one")
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        if not resume:
            shutil.copyfile(plan, run_dir / "config.yaml")
    except OSError as error:
        raise ConfigError(f"{run_dir}: cannot be written ({error.strerror})") from None


def train(
    plan: RunPlan,
    run_dir: Path,
    *,
    watch: Watch = lambda outcome, guard: None,
    sinks: Sequence[Sink] = (),
    crew: Crew | None = None,
    force: bool = False,
) -> Summary:
    """Until `training.total_steps` have been tried, or validation stops improving; resumes by itself."""
    crew = crew or Crew()
    started, settings = time.perf_counter(), plan.run
    job = make(settings.task, settings.seed)
    job.prepare(settings)
    for declared in crew.faults(settings.faults):  # those of all ranks first: a mistake must be found on every rank
        fault = faults.parse(declared, model=job.model, optimizer=job.optimizer, seed=settings.seed)
    crew.spread(job, settings)
    guard = Guard.resume(job.model, job.optimizer, run_dir=run_dir, config=plan.guard, sinks=sinks, force=force)
    for name, thing in job.keep.items():
        guard.keep(name, thing)
    total = plan.guard.training.total_steps
    began = guard.attempts
    told, count, last = Told(job, guard, settings.validation_frequency), 0, math.nan
    with guard:
        while guard.attempts < total and not guard.should_stop:
            before = guard.attempts
            job.begin(guard.epoch)
            for batch in guard.batches(job.batches):
                step = guard.attempts
                with fault.at(step):
                    outcome = guard.step(
                        lambda batch, step=step: fault.loss(step, job.loss(batch)), batch=fault.batch(step, batch)
                    )
                if outcome.pending:
                    continue
                if job.after_step is not None:
                    job.after_step()
                last, count = outcome.loss, count + (not outcome.plan.proceeds)
                watch(outcome, guard)
                told.now_and_then()
                if guard.attempts >= total or guard.should_stop:
                    break
            if guard.attempts == before:
                raise ConfigError(f"task {settings.task!r}: its loader gives no batches")
        told.at_the_end()
    return Summary(
        run_dir=str(run_dir),
        steps=guard.attempts,
        updates=guard.updates,
        trained=guard.attempts - began,
        final_loss=last,
        validation=told.last,
        best_validation=told.best,
        incidents=count,
        stopped_early=guard.should_stop,
        seconds=time.perf_counter() - started,
        diagnosis=tuple(f"{d.cause}: {d.advice}" if d.advice else d.cause for d in guard.diagnose()[:3]),
    )


@final
class Told:
    """Validations, when they are due."""

    def __init__(self, job: Job, guard: Guard, every: int) -> None:
        self._job, self._guard, self._every = job, guard, every
        self._at = guard.attempts
        self.last: float | None = None
        self.best: float | None = None

    def now_and_then(self) -> None:
        """After a step."""
        if self._guard.attempts % self._every == 0:
            self._validate()

    def at_the_end(self) -> None:
        """Unless that was just done."""
        if self._at != self._guard.attempts or self.last is None:
            self._validate()

    def _validate(self) -> None:
        if self._job.validate is None:
            return
        self._at, self.last = self._guard.attempts, float(self._job.validate())
        self.best = self.last if self.best is None or self.last < self.best else self.best
        self._guard.validate(self.last)
