"""`Guard`: replaces backward, clip, step, schedule and zero_grad. What a step does is in `engine/pipeline.py`."""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Self, TypeVar, final

from torch import Tensor, nn
from torch.optim import Optimizer

from steadystep._utils.text import guard_card, guard_line
from steadystep.config import Config
from steadystep.detectors import Detector
from steadystep.engine import arguments
from steadystep.engine.closures import Closure
from steadystep.engine.learning_rate import check_rates
from steadystep.engine.ownership import assemble, refuse_step, release, settings_to_resume, steps_elsewhere
from steadystep.engine.pipeline import Pipeline
from steadystep.records import Diagnosis, Outcome, Plan, Quarantined
from steadystep.schedule import Schedule
from steadystep.signals import Metrics, checked_metrics
from steadystep.state import KeptObject
from steadystep.tracking import Sink

if TYPE_CHECKING:
    from steadystep.examination import Examination

Batch = TypeVar("Batch")


@final
class Guard:
    """Guards a training loop: replaces backward, clip, step, schedule and zero_grad.

    Args:
        model: the module to train, also wrapped in `DistributedDataParallel`, `fully_shard` or `torch.compile`.
        optimizer: one optimizer, or a list of optimizers that share every decision. None for a loop that updates the
            weights itself and calls `inspect` and `commit`.
        config: a `Config`, a mapping shaped like the YAML file, or the path of a YAML file. Default: `autopilot()`.
        schedule: function from updates to a multiplier of the learning rate; not with `training.lr_scheduler`.
        run_dir: folder for the run log, checkpoints and incident bundles. Without it nothing is written.
        detectors: additional detectors, see `steadystep.detectors.Detector`.
        sinks: additional sinks, see `steadystep.tracking.Sink`.
        force: use `run_dir` even if another process is using it.
        hparams: hyperparameters to log, such as `vars(args)`; those of the optimizer are logged by themselves.

    Raises:
        ConfigError: a setting is unknown, out of range or contradicts another one.
        MisuseError: an argument has the wrong type, or the optimizer already has a guard.
        UnsupportedError: updates happen where a guard cannot stop them (DeepSpeed, FSDP1, inside backward).

    >>> import torch
    >>> model = nn.Linear(2, 1)
    >>> guard = Guard(model, torch.optim.SGD(model.parameters(), lr=0.1))
    >>> for value in (1.0, float("nan"), 1.0):
    ...     x = torch.full((4, 2), value)
    ...     print(guard.step(lambda: model(x).square().mean()).stepped)
    True
    False
    True
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer] | None,
        *,
        config: Config | Mapping[str, Any] | str | Path | None = None,
        schedule: Schedule | None = None,
        run_dir: str | Path | None = None,
        detectors: Sequence[Detector] = (),
        sinks: Sequence[Sink] = (),
        force: bool = False,
        hparams: Mapping[str, Any] | None = None,
    ) -> None:
        self._closed, self._model = False, model
        more: dict[str, Any] = {"detectors": detectors, "sinks": sinks, "force": force, "hparams": hparams}
        self.config, self._optimizer, parts = assemble(self, model, optimizer, config, schedule, run_dir, **more)
        self._foreign = steps_elsewhere(self._optimizer)
        self.precision, self._parts, self._pipeline = parts.precision, parts, Pipeline(parts)
        self._runner, self._progress, self._run_state = parts.runner, parts.progress, parts.run_state
        self._recovery = parts.recovery

    @property
    def updates(self) -> int:
        """Number of updates contained in the weights: the position of the schedule."""
        return self._progress.updates

    @property
    def attempts(self) -> int:
        """Number of optimizer steps tried, refused ones included."""
        return self._progress.attempts

    def step(
        self,
        closure_or_loss: Closure | Tensor,
        *,
        batch: Any = None,
        weight: float | None = None,
        metrics: Metrics | None = None,
    ) -> Outcome:
        """Run one micro-batch and, with the last one of its accumulation group, judge and apply one update.

        Args:
            closure_or_loss: a function that computes the loss (preferred: it can be run again), or the loss itself.
            batch: passed to the closure as its argument, checked when the step is not finite, and kept for replay.
            weight: weight of this micro-batch in its group, for example its number of tokens; give it for all or none.
            metrics: scalars to log with this step. In a group, the last value of each name counts.

        Returns:
            What was decided and done. `outcome.stepped` is False if the update was refused.

        Raises:
            TrainingHalted: the recovery budget is spent; the weights are those of the last accepted update.
            MisuseError: the guard is closed, or the call cannot work here.
        """
        if self._foreign or self._closed:
            refuse_step(self._optimizer, closed=self._closed)
        if self._runner.busy or not (isinstance(closure_or_loss, Tensor) or callable(closure_or_loss)):
            arguments.refuse_inside("step", busy=self._runner.busy)
            arguments.check_work(closure_or_loss)
        check_rates(self._optimizer)
        number, numbers = self._runner.group.weight_of(weight), checked_metrics(metrics) if metrics else {}
        if not self._run_state.data.open and not isinstance(closure_or_loss, Tensor):
            self._pipeline.between()
        return self._pipeline.collect(closure_or_loss, batch, number, numbers)

    def flush(self) -> Outcome | None:
        """Update with an accumulation group that is not full, as at the end of an epoch; None if no group is open."""
        with self._runner:
            return self._pipeline.step() if self._runner.group.members else None

    def validate(self, val_loss: float, **metrics: float) -> None:
        """Report a validation to the log, a plateau schedule, early stopping and the best checkpoint.

        `metrics` are logged with `val_loss` (lower is better). Every rank calls it, if only with NaN; the mean counts.
        """
        metrics = {name: arguments.real_number(name, value) for name, value in metrics.items()}
        self._pipeline.validated(arguments.real_number("val_loss", val_loss), metrics)

    @property
    def should_stop(self) -> bool:
        """Whether `early_stopping` is on and validation has not improved for `patience` validations."""
        return self._run_state.early_stopping.should_stop

    @property
    def epoch(self) -> int:
        """Number of completed passes over `batches`, those before a resume included."""
        return self._run_state.data.epoch

    def batches(self, loader: Iterable[Batch], *, skip: Iterable[int] = ()) -> Iterator[Batch]:
        """Iterate over `loader` from where a resumed run stopped, without the batches whose number is in `skip`."""
        arguments.check_loader(loader)
        skip = arguments.batch_numbers(skip)
        return self._run_state.data.batches(loader, self._pipeline.between, at_end=self.flush, skip=skip)

    @property
    def quarantined(self) -> tuple[Quarantined, ...]:
        """Batches that are not in the weights because they were bad: refused, or undone by a rollback."""
        return self._parts.budget.quarantined

    def keep(
        self, name: str, thing: KeptObject, *, check: bool | None = None, update: Callable[[], object] | None = None
    ) -> None:
        """Save and roll back another stateful object (EMA weights, a scheduler) together with the weights.

        Args:
            name: a unique name for it in checkpoints.
            thing: an object with `state_dict` and `load_state_dict`.
            check: check its tensors every 20 steps, restore them when not finite. Default: True for modules.
            update: what your loop does to it after each step, such as `lambda: ema.update_parameters(model)`; replayed.
        """
        arguments.check_kept(name, thing, update)
        self._parts.keep(name, thing, check=isinstance(thing, nn.Module) if check is None else check, update=update)

    def wait_for(self, staging: Any) -> None:
        """Before the next update or rollback, wait for the future `staging`, such as that of `dcp.async_save`."""
        self._pipeline.staged.append(arguments.staging_future(staging))

    @contextmanager
    def editing(self) -> Iterator[None]:
        """Announce a deliberate change of the weights made inside the `with` block, so that it is not undone as damage.

        `model.load_state_dict` between two steps is recognized without it, except with several ranks.
        """
        arguments.refuse_inside("editing", busy=self._runner.busy)
        self._parts.expect_edits()
        yield

    def diagnose(self) -> tuple[Diagnosis, ...]:
        """Return the probable causes of instability so far, the most likely first; one "healthy" if there is none."""
        return self._parts.diagnose()

    def examine(
        self, batches: Iterable[Any] | None = None, *, loss: Callable[[Any], Tensor] | None = None, **options: Any
    ) -> "Examination":
        """Run short experiments, and name the likeliest cause of all that was seen with a repair that was tried.

        Args:
            batches: training batches. Default: those that are remembered for replay.
            loss: computes the loss of a batch. Default: the closure of the last `step(closure, batch=...)`.
            options: those of `steadystep.examine`, which restores everything afterwards, bit for bit.
        """
        arguments.refuse_inside("examine", busy=self._runner.busy)
        return self._parts.examine(self._model, self._optimizer, self.config, batches, loss, options)

    def inspect(self, loss: Tensor) -> Plan:
        """Judge the gradients that your own loop computed from `loss`, without stepping. Call `commit` afterwards.

        `plan.proceeds` tells whether the update may be applied. Weights and learning rates stay yours: no rollback.
        """
        arguments.check_loss("inspect", loss)
        check_rates(self._optimizer)
        return self._pipeline.inspect(loss.detach().reshape(()))

    def commit(self, *, stepped: bool) -> Outcome:
        """Close the step that `inspect` opened. `stepped=False` restores the buffers; gradients are yours to clear."""
        return self._pipeline.commit(stepped=stepped)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the guard, ready for JSON. Micro-batches of an open group count as not seen."""
        return self._parts.save()

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Continue from `saved`, which `state_dict` returned. Load model and optimizer first; an open group is dropped.

        Raises:
            CheckpointError: this guard could not have written it; nothing was changed.
        """
        arguments.refuse_inside("load_state_dict", busy=self._runner.busy)
        self._parts.load(arguments.saved_state(saved))

    @classmethod
    def resume(
        cls,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer],
        *,
        run_dir: str | Path,
        path: str | Path | None = None,
        config: Config | Mapping[str, Any] | str | Path | None = None,
        schedule: Schedule | None = None,
        detectors: Sequence[Detector] = (),
        sinks: Sequence[Sink] = (),
        force: bool = False,
        hparams: Mapping[str, Any] | None = None,
    ) -> Self:
        """Return a guard that continues from the newest intact checkpoint in `run_dir`, or a new one if there is none.

        Takes the arguments of `Guard`, and `path` for a certain checkpoint or another folder of checkpoints.
        Checkpoints are on unless `config` turns them off. `run_dir` is for one process at a time, unless `force`.
        """
        settings = settings_to_resume(model, config)
        more: dict[str, Any] = {"schedule": schedule, "detectors": detectors, "sinks": sinks, "force": force}
        guard = cls(model, optimizer, config=settings, run_dir=run_dir, hparams=hparams, **more)
        try:
            guard._run_state.resume(None if path is None else Path(path))
        except BaseException:
            guard._end(save=False)
            raise
        return guard

    def save(self, path: str | Path | None = None) -> Path:
        """Write a checkpoint to `run_dir/checkpoints`, or to the folder `path`; return its path once it is on disk."""
        arguments.refuse_inside("save", busy=self._runner.busy)
        return self._pipeline.save(None if path is None else arguments.folder("path", path))

    def restore_best(self) -> bool:
        """Restore the weights of the best validation; return False if there are none."""
        arguments.refuse_inside("restore_best", busy=self._runner.busy)
        return self._pipeline.restore_best()

    def _conclude(self) -> None:
        """Report the final diagnosis of the run once."""
        self._parts.log.concluded(self._parts.verdict())

    def close(self) -> None:
        """Save the last state, complete the run log and release the optimizer."""
        arguments.refuse_inside("close", busy=self._runner.busy)
        self._end(save=sys.exc_info()[0] is None)

    def _end(self, *, save: bool) -> None:
        if not self._closed:
            self._closed = True
            try:
                self._pipeline.close(save=save)
            finally:
                release(self._optimizer)

    __repr__, _repr_html_ = guard_line, guard_card

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        arguments.refuse_copy()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._end(save=kind is None)
