"""The guard: the face of one training loop. What a step does is in `engine/pipeline.py`."""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn, Self, TypeVar, final

from torch import Tensor, nn
from torch.optim import Optimizer

from steadystep import state
from steadystep.actions import manual_update
from steadystep.config import Config
from steadystep.detectors import Detector
from steadystep.engine import arguments
from steadystep.engine.build import build
from steadystep.engine.closures import Closure
from steadystep.engine.learning_rate import check_rates
from steadystep.engine.ownership import claim, refuse_foreign_steps, refuse_step, release, steps_elsewhere
from steadystep.engine.pipeline import Pipeline
from steadystep.errors import MisuseError
from steadystep.optimizers import as_one
from steadystep.parallel import Meeting
from steadystep.records import Diagnosis, Outcome, Plan
from steadystep.schedule import Schedule
from steadystep.signals import Metrics, checked
from steadystep.state import KeptObject
from steadystep.tracking import Sink

Batch = TypeVar("Batch")


@final
class Guard:
    """Replaces backward, clip, step, schedule and zero_grad in a loop of yours.

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
    ) -> None:
        meeting = Meeting()
        with meeting.telling(model):
            arguments.check_extras(detectors, sinks)
            refuse_foreign_steps(model, optimizer)
            self.config = Config.load(config)
            if optimizer is None:
                arguments.check_model(model)
                training = self.config.training
                optimizer = manual_update.by_hand(model, schedule, training.learning_rate, training.lr_scheduler)
        self._optimizer: Optimizer = as_one(optimizer)
        self._closed = False
        with meeting.telling(model):
            claim(self, model, self._optimizer)
        self._foreign = steps_elsewhere(self._optimizer)
        """Steps are the loop's own, or the optimizer's."""
        try:
            parts = build(
                self,
                self.config,
                model,
                self._optimizer,
                schedule,
                run_dir,
                extra_detectors=detectors,
                extra_sinks=sinks,
                force=force,
                meeting=meeting,
            )
        except BaseException:
            release(self._optimizer)
            raise
        self.precision, self._parts, self._pipeline = parts.precision, parts, Pipeline(parts)
        self._runner, self._progress = parts.runner, parts.progress
        self._recovery, self._run_state, self._ranks = parts.recovery, parts.run_state, parts.ranks

    @property
    def updates(self) -> int:
        """Updates contained in the weights: the position of the schedule."""
        return self._progress.updates

    @property
    def attempts(self) -> int:
        """Optimizer steps tried, refused ones included."""
        return self._progress.attempts

    def step(
        self,
        closure_or_loss: Closure | Tensor,
        *,
        batch: Any = None,
        weight: float | None = None,
        metrics: Metrics | None = None,
    ) -> Outcome:
        """One micro-batch, and with the last of its group one update, taken or refused.

        Args:
            closure_or_loss: a function that computes the loss (preferred: it can be run again), or the loss itself.
            batch: given to the closure as its argument, and looked at when something goes wrong.
            weight: what this micro-batch counts in its group, such as its number of tokens.
            metrics: scalars to log with this step; in a group the last value of each name counts.
        """
        if self._foreign or self._closed:
            refuse_step(self._optimizer, closed=self._closed)
        # Before anything is changed: what is wrong with a call costs nothing but that call.
        if self._runner.busy or not (isinstance(closure_or_loss, Tensor) or callable(closure_or_loss)):
            arguments.refuse_inside("step", busy=self._runner.busy)
            arguments.check_work(closure_or_loss)
        check_rates(self._optimizer)
        number = self._runner.group.weight_of(weight)
        numbers = checked(metrics) if metrics else {}
        if not self._run_state.data.open and not isinstance(closure_or_loss, Tensor):
            self._pipeline.between()
        return self._pipeline.collect(closure_or_loss, batch, number, numbers)

    def flush(self) -> Outcome | None:
        """Update with a group that is not full, as at the end of an epoch; None when none is open."""
        with self._runner:
            return self._pipeline.step() if self._runner.group.members else None

    def validate(self, val_loss: float, **metrics: float) -> None:
        """Tell how a validation went: for the log, a plateau schedule, early stopping and the best weights.

        In a distributed run every rank calls it, and the mean counts; one that did not validate gives NaN.
        """
        metrics = {name: arguments.number(name, value) for name, value in metrics.items()}
        loss = self._ranks.validation(arguments.number("val_loss", val_loss))
        self._pipeline.validated(loss, metrics)

    @property
    def should_stop(self) -> bool:
        """With `early_stopping`: validation has not improved for `patience` times."""
        return self._run_state.early_stopping.should_stop

    @property
    def epoch(self) -> int:
        """Passes of `batches` that have ended, those before a resume too."""
        return self._run_state.data.epoch

    def batches(self, loader: Iterable[Batch]) -> Iterator[Batch]:
        """The loader's batches, from where a resumed run was; a short last group is flushed when they end."""
        arguments.check_loader(loader)
        return self._run_state.data.batches(loader, self._pipeline.between, at_end=self.flush)

    def keep(
        self, name: str, thing: KeptObject, *, check: bool | None = None, update: Callable[[], object] | None = None
    ) -> None:
        """Let something else with a state (EMA weights, a scheduler) be saved and rolled back with the weights.

        `update` is what your loop does to it after each step (`lambda: ema.update_parameters(model)`): where updates
        are replayed after a rollback, so is this. With `check`, the default for modules, its tensors are looked at
        every 20 steps together with the weights, and put back by themselves when they are no longer finite.
        """
        arguments.check_kept(name, thing, update)
        self._run_state.check(name, thing)
        self._recovery.keep(name, thing, update)
        self._run_state.loop.keep(name, thing, check=isinstance(thing, nn.Module) if check is None else check)

    @contextmanager
    def editing(self) -> Iterator[None]:
        """Announce a change of weights that you make on purpose inside it: it is no damage, and is not undone.

        `model.load_state_dict` between two steps is taken for one by itself, in one process. With several ranks every
        rank announces it.
        """
        arguments.refuse_inside("editing", busy=self._runner.busy)
        self._parts.edits.expect()
        yield

    def diagnose(self) -> tuple[Diagnosis, ...]:
        """What is probably wrong with the run so far, the likeliest cause first; one "healthy" when nothing is."""
        return self._parts.run_history.diagnose()

    def inspect(self, loss: Tensor) -> Plan:
        """Judge the gradients that your own loop computed, without stepping: for loops that update by themselves.

        `plan.proceeds` says whether the update may be applied; tell the guard with `commit` what you did. Weights and
        learning rates stay yours: there is no rolling back here.
        """
        arguments.check_loss("inspect", loss)
        check_rates(self._optimizer)
        return self._pipeline.inspect(loss.detach().reshape(()))

    def commit(self, *, stepped: bool) -> Outcome:
        """Close what `inspect` opened. With `stepped=False` buffers are put back; gradients stay yours to clear."""
        return self._pipeline.commit(stepped=stepped)

    def state_dict(self) -> dict[str, Any]:
        """Everything the guard remembers, ready for JSON. Micro-batches of an open group count as not seen."""
        return state.save(self._parts.stateful) | {"attempts": self.attempts, "updates": self.updates}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Continue as if never interrupted. Load model and optimizer first; an open group is dropped.

        Raises:
            CheckpointError: this guard could not have written it; nothing was changed.
        """
        arguments.refuse_inside("load_state_dict", busy=self._runner.busy)
        loaded = state.load_checked(self._parts.stateful, arguments.saved_state(saved))
        self._progress.attempts, self._progress.updates = loaded["attempts"], loaded["updates"]
        self._runner.reset()
        self._recovery.forget()
        self._parts.edits.forget()

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
    ) -> Self:
        """Return a guard that goes on where the newest whole checkpoint of `run_dir` was taken; a new one without any.

        Takes what `Guard` takes, and `path` for a certain checkpoint or another folder of them. One process at a time
        uses a `run_dir`; with `force` this one does although another one does.
        """
        with Meeting().telling(model):
            settings = Config.load(config).with_checkpoints()
        guard = cls(
            model,
            optimizer,
            config=settings,
            schedule=schedule,
            run_dir=run_dir,
            detectors=detectors,
            sinks=sinks,
            force=force,
        )
        try:
            guard._run_state.resume(None if path is None else Path(path))
        except BaseException:
            guard._end(save=False)
            raise
        return guard

    def save(self, path: str | Path | None = None) -> Path:
        """Write a checkpoint now and wait for it; to `run_dir/checkpoints`, or into the folder `path`."""
        arguments.refuse_inside("save", busy=self._runner.busy)
        where = None if path is None else arguments.folder("path", path)
        if self._runner.group.members:
            raise MisuseError("save() inside a group of micro-batches: call flush() first, or save after the group")
        return self._run_state.save(where, self.attempts, self.updates)

    def restore_best(self) -> bool:
        """Put the weights of the best validation back; False when there are none."""
        arguments.refuse_inside("restore_best", busy=self._runner.busy)
        self._recovery.forget()
        return self._run_state.restore_best(self.attempts, self.updates)

    def _conclude(self) -> None:
        """Say what the run came to, if that has not been said; done by `close` and at the end of the program."""
        self._parts.log.concluded(self._parts.run_history.verdict())

    def close(self) -> None:
        """Save the last state, write the log's last lines and let go of the optimizer."""
        arguments.refuse_inside("close", busy=self._runner.busy)
        self._end(save=sys.exc_info()[0] is None)

    def _end(self, *, save: bool) -> None:
        if not self._closed:
            self._closed = True
            try:
                self._pipeline.close(save=save)
            finally:
                release(self._optimizer)

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        arguments.refuse_copy()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._end(save=kind is None)
