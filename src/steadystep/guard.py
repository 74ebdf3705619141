"""The guard: one optimizer step, kept honest.

    closure/loss ─► precision ─► backward ─► MEASURE ─► NOTICE ─► EXPLAIN ─► DECIDE ─► ACT ─► RECORD

`Guard._update` reads like that line. Nothing is changed before DECIDE except gradients and the buffers that the forward
pass writes by itself, and those are put back when the step is refused. Why in this order: docs/adr/0001.
"""

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self, TypeVar, final

from torch import Tensor, nn
from torch.optim import Optimizer

from steadystep import state
from steadystep.accumulation import Closure
from steadystep.claims import claim, needs_closure, release
from steadystep.config import Config
from steadystep.detectors import Detector
from steadystep.diagnosis import not_repeatable
from steadystep.errors import MisuseError, UnsupportedError
from steadystep.look import Look
from steadystep.notices import warn
from steadystep.records import Diagnosis, Outcome, Plan
from steadystep.recovery.snapshots import Kept
from steadystep.schedule import Schedule
from steadystep.signals import Metrics, checked
from steadystep.track import Sink
from steadystep.wiring import build

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
        optimizer: Optimizer,
        *,
        config: Config | Mapping[str, Any] | str | Path | None = None,
        schedule: Schedule | None = None,
        run_dir: str | Path | None = None,
        detectors: Sequence[Detector] = (),
        sinks: Sequence[Sink] = (),
    ) -> None:
        self.config = Config.load(config)
        self.updates = 0
        """Updates contained in the weights: the position of the schedule."""
        self.attempts = 0
        """Optimizer steps tried, refused ones included."""
        self._optimizer = optimizer
        self._metrics: dict[str, float | Tensor] = {}
        self._closed = False
        self._inspected: Look | None = None
        claim(self, model, optimizer)
        self._chooses = needs_closure(optimizer)
        try:
            parts = build(
                self,
                self.config,
                model,
                optimizer,
                schedule,
                run_dir,
                extra_detectors=detectors,
                extra_sinks=sinks,
            )
        except BaseException:
            release(optimizer)
            raise
        self.precision, self._parts = parts.precision, parts
        self._passes, self._probes, self._looker = parts.passes, parts.probes, parts.looker
        self._judge, self._action, self._lr = parts.judge, parts.action, parts.learning_rate
        self._budget, self._recovery = parts.budget, parts.recovery
        self._keeping, self._data, self._examiner = parts.keeping, parts.keeping.data, parts.examiner
        self._ranks = parts.ranks

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
        if self._closed:
            raise MisuseError("this guard was closed: make another")
        if self._chooses:
            raise UnsupportedError(
                f"{type(self._optimizer).__name__} calls the closure itself, several times per step: "
                "use steadystep.watch(model, optimizer) and leave the loop as it is"
            )
        if not self._data.open and not isinstance(closure_or_loss, Tensor):
            self._between()
        with self._passes:
            self._metrics.update(checked(metrics) if metrics else {})
            if not isinstance(closure_or_loss, Tensor) and not self._passes.group.members:
                self._recovery.begin(step=self.attempts, updates=self.updates)
            with self._probes.watching(self.attempts):
                member = self._passes.add(closure_or_loss, batch=batch, weight=weight)
            if not self._passes.group.full:
                return Outcome(step=self.attempts, reading=member.loss, stepped=False, pending=True)
            return self._update()

    def flush(self) -> Outcome | None:
        """Update with a group that is not full, as at the end of an epoch; None when none is open."""
        with self._passes:
            return self._update() if self._passes.group.members else None

    def validate(self, val_loss: float, **metrics: float) -> None:
        """How a validation went: for the log, a plateau schedule, early stopping and the best weights.

        In a distributed run every rank calls it, and the mean counts; one that did not validate gives NaN.
        """
        loss = self._ranks.validation(float(val_loss))
        self._lr.validated(loss)
        self._keeping.validated(loss)
        self._parts.log.validated(self.attempts, {"val_loss": loss, **metrics})

    @property
    def should_stop(self) -> bool:
        """With `early_stopping`: validation has not improved for `patience` times."""
        return self._keeping.early_stopping.should_stop

    @property
    def epoch(self) -> int:
        """Passes of `batches` that have ended, those before a resume too."""
        return self._data.epoch

    def batches(self, loader: Iterable[Batch]) -> Iterator[Batch]:
        """The loader's batches, from where a resumed run was; a short last group is flushed when they end."""
        yield from self._data.batches(loader, self._between)
        self.flush()

    def keep(self, name: str, thing: Kept) -> None:
        """Let something else with a state (EMA weights, a scheduler) be saved and go back together with the weights."""
        self._recovery.keep(name, thing)
        self._keeping.loop.keep(name, thing)

    def diagnose(self) -> tuple[Diagnosis, ...]:
        """What is probably wrong with the run so far, the likeliest cause first; one "healthy" when nothing is."""
        return self._parts.casebook.diagnose()

    def _update(self) -> Outcome:
        self._lr.place(self.updates)
        if not self._passes.refresh():
            return self._settled(self._action.drop(self.attempts, not_repeatable()))
        look = self._look(range(len(self._passes.group.members)))
        self._parts.sample(look)
        diagnosis, plan = self._judge.judge(look, updates=self.updates)
        case = self._examiner.open(plan, look, updates=self.updates)
        works = self._passes.works() if self._recovery.remembers else ()
        try:
            outcome = self._action.carry_out(plan, look, diagnosis, look_again=self._look)
        except BaseException:
            left_at, self._action.left_at = self._action.left_at, None
            self.updates = self.updates if left_at is None else left_at
            raise
        if works and outcome.stepped and not outcome.left_out:
            self._recovery.remember(works, outcome, updates=self.updates + 1, options=self._lr.options())
        return self._settled(self._examiner.close(outcome, case))

    def inspect(self, loss: Tensor) -> Plan:
        """Judge the gradients that your own loop computed, without stepping: for loops that update by themselves.

        `plan.proceeds` says whether the update may be applied; tell the guard with `commit` what you did. Weights and
        learning rates stay yours: there is no rolling back here.
        """
        with self._passes:
            self._lr.place(self.updates)
            seen = self._looker.look(step=self.attempts, losses=[loss.detach().reshape(())], weights=[1.0])
            self._inspected = self._ranks.agree(seen)
            self._verdict = self._judge.judge(self._inspected, updates=self.updates, careful=True)
            return self._verdict[1]

    def commit(self, *, stepped: bool) -> Outcome:
        """Close what `inspect` opened. With `stepped=False` buffers are put back; gradients stay yours to clear."""
        if self._inspected is None:
            raise MisuseError("commit() closes an inspect(): call guard.inspect(loss) first")
        look, (diagnosis, plan), self._inspected = self._inspected, self._verdict, None
        return self._settled(self._action.report(plan, look, diagnosis, stepped=stepped))

    def _look(self, kept: Sequence[int]) -> Look:
        self._passes.finish(kept)
        members = [self._passes.group.members[i] for i in kept]
        look = self._looker.look(
            step=self.attempts,
            losses=[member.loss for member in members],
            weights=[member.weight for member in members],
            scale=self.precision.scale(members[0].loss.device),
            metrics=self._metrics,
            batches=[member.batch for member in members if member.batch is not None],
            repeatable=self._passes.group.repeatable,
            refused_in_a_row=self._budget.refused_in_a_row,
        )
        return self._ranks.agree(look)

    def _settled(self, outcome: Outcome) -> Outcome:
        self.attempts += 1
        self.updates = self.updates + outcome.stepped if outcome.restored is None else outcome.restored
        self._metrics = {}
        self._budget.count(outcome)
        self._parts.record(outcome, updates=self.updates)
        if "stop" in outcome.plan.steps and not outcome.stepped:
            raise self._budget.halt(outcome)
        if self._passes.given_losses and not self._data.open:  # the next forward pass is over before we are called
            self._between()
        return outcome

    def state_dict(self) -> dict[str, Any]:
        """Everything the guard remembers, ready for JSON. Micro-batches of an open group count as not seen."""
        return state.save(self._parts.stateful) | {"attempts": self.attempts, "updates": self.updates}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Continue as if never interrupted. Load model and optimizer first; an open group is dropped."""
        state.load(self._parts.stateful, saved)
        self.attempts, self.updates = int(saved["attempts"]), int(saved["updates"])
        self._passes.reset()
        self._recovery.forget()

    @classmethod
    def resume(cls, model: nn.Module, optimizer: Optimizer, *, run_dir: str | Path, **settings: Any) -> Self:
        """A guard that goes on where the newest whole checkpoint of `run_dir` was taken; a new one where there is none.

        Takes what `Guard` takes, and `path=` for a certain checkpoint or another folder of them.
        """
        path = settings.pop("path", None)
        config = Config.load(settings.pop("config", None)).with_checkpoints()
        guard = cls(model, optimizer, run_dir=run_dir, config=config, **settings)
        try:
            guard._keeping.resume(None if path is None else Path(path))
        except BaseException:
            guard._end(save=False)
            raise
        return guard

    def save(self, path: str | Path | None = None) -> Path:
        """Write a checkpoint now and wait for it; to `run_dir/checkpoints`, or into the folder `path`."""
        if self._passes.group.members:
            raise MisuseError("save() in the middle of a group of micro-batches: call flush() first, or a step later")
        return self._keeping.save(None if path is None else Path(path), self.attempts, self.updates)

    def restore_best(self) -> bool:
        """Put the weights of the best validation back; False when there are none."""
        self._recovery.forget()
        return self._keeping.restore_best(self.attempts, self.updates)

    def _between(self) -> None:
        if not self._passes.group.members:
            self._keeping.between(self.attempts, self.updates)

    def close(self) -> None:
        """Save the last state, write the log's last lines and let go of the optimizer."""
        self._end(save=sys.exc_info()[0] is None)

    def _end(self, *, save: bool) -> None:
        if not self._closed:
            self._closed = True
            dropped = self._passes.reset()
            if dropped:
                warn(f"the guard was closed with {dropped} micro-batches of an open group: call flush() to use them")
            try:
                self._keeping.close(self.attempts, self.updates, save=save and not dropped)
            finally:  # it passes a signal on that came during the last step
                self._parts.close()
                release(self._optimizer)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._end(save=kind is None)
