"""`watch`: a guard for a loop that keeps its own backward and step.

    loss.backward() ─► heard: loss, true norms │ optimizer.step() ─► before: MEASURE … DECIDE, prepare or drop gradients
                                               │                  ─► torch's own step ─► after: put back, RECORD

The decision falls in a pre-hook of the optimizer. A refused step is one without gradients: docs/adr/0004.
"""

import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self, final

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from steadystep._utils.rng import RngState
from steadystep.config import Config
from steadystep.detectors import Detector, LossScale
from steadystep.engine import arguments
from steadystep.engine.ownership import IN_BACKWARD, WATCHERS, check_watched, inside_backward, reevaluates
from steadystep.errors import MisuseError, UnsupportedError
from steadystep.guard import Guard
from steadystep.optimizers import CombinedOptimizer, each_of
from steadystep.records import Outcome
from steadystep.signals import checked_metrics
from steadystep.watching import listeners
from steadystep.watching.collected import Collected, LossScaling
from steadystep.watching.hooked_step import HookedStep
from steadystep.watching.listeners import closure_of, is_nested, may_nest, with_closure
from steadystep.watching.recorder import Again, Recorder, Reruns, say_what_is_lost, why_not, why_not_on
from steadystep.watching.rounds import Rounds, judges_for
from steadystep.watching.undo import Schedulers, Undo

__all__ = ["Watcher", "watch"]


def watch(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    *,
    config: Config | Mapping[str, Any] | str | Path | None = None,
    run_dir: str | Path | None = None,
    scaler: GradScaler | None = None,
    schedulers: Sequence[Any] = (),
    detectors: Sequence[Detector] = (),
    find_loss: bool = True,
    hparams: Mapping[str, Any] | None = None,
) -> "Watcher":
    """Guard a loop that calls `loss.backward()` and `optimizer.step()` itself, without changing it.

    >>> import torch
    >>> model = nn.Linear(2, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> watcher = watch(model, optimizer)
    >>> for value in (1.0, float("nan"), 1.0):
    ...     optimizer.zero_grad()
    ...     model(torch.full((4, 2), value)).square().mean().backward()
    ...     optimizer.step()
    ...     print(watcher.outcome.stepped)
    True
    False
    True
    >>> watcher.remove()

    Args:
        model: the module to protect.
        optimizer: the optimizer that the loop steps, or a list of optimizers that share every decision and rollback.
        config: see `Guard`. Leave out what the loop does itself (mixed precision, accumulation).
        run_dir: folder for the run log and incident bundles.
        scaler: the loop's `GradScaler`, if it has one.
        schedulers: schedulers that are not torch's own; torch's are found automatically.
        detectors: additional detectors.
        find_loss: observe the loop's `backward` calls. With False, and in a pipeline on the rank of the last stage,
            give each loss with `watcher.loss(loss)`; clipping by the loop is then not seen.
        hparams: hyperparameters to log, see `Guard`.
    """
    more: dict[str, Any] = {"scaler": scaler, "schedulers": schedulers, "detectors": detectors, "hparams": hparams}
    return Watcher(model, optimizer, config=config, run_dir=run_dir, find_loss=find_loss, **more)


@final
class Watcher:
    """Guards a loop that steps by itself; returned by `watch`. Takes the arguments of `watch`, and two more.

    Args:
        signs_scaling: let a `GradScaler` hand its check for overflow to the guard; False where a framework forbids it.
        tell: called with the `Outcome` of every step.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer],
        *,
        config: Config | Mapping[str, Any] | str | Path | None = None,
        run_dir: str | Path | None = None,
        scaler: GradScaler | None = None,
        schedulers: Sequence[Any] = (),
        detectors: Sequence[Detector] = (),
        find_loss: bool = True,
        signs_scaling: bool = True,
        tell: Callable[[Outcome], None] | None = None,
        hparams: Mapping[str, Any] | None = None,
    ) -> None:
        check_watched(model, optimizer)
        settings = arguments.checked_settings(Config.load(config))
        schedulers, extra = arguments.checked_schedulers(schedulers), _extra_detectors(detectors, scaler)
        self._tell, one = arguments.checked_listener(tell), arguments.torch_optimizer(optimizer)
        # why force: a watcher writes no checkpoints that another process could write over
        self.guard = Guard(model, one, config=settings, run_dir=run_dir, detectors=extra, force=True, hparams=hparams)
        """The guard, for `diagnose()`, `validate()`, `keep()` and `state_dict()`; the loop steps."""
        self.outcome: Outcome | None = None
        """Outcome of the last step."""
        self.guard._foreign = True
        WATCHERS[self.guard] = weakref.ref(self)
        self._optimizer, parts = one, self.guard._parts
        self._recorder = self._recorded(model, why_not(one, scaler, finds_loss=find_loss))
        self._seen = Collected(parts.measurer, self._recorder, parts.run_history.loop, each_of(one))
        signs_scaling &= settings.mode != "observe"
        self._scaling = [LossScaling(each, scaler, signs=signs_scaling) for each in each_of(one)]
        self._schedulers, self._kept = Schedulers(one, schedulers), 0
        self._keep(self._schedulers.known)
        self._begun = self._open = False
        self._late: Undo | None = None
        self._reruns = Reruns()
        self._rounds = Rounds(each_of(one), self._seen, scaler) if isinstance(one, CombinedOptimizer) else None
        self._step = HookedStep(self.guard, one, self._seen, self._scaling[0], self._reruns, several=reevaluates(one))
        self._hook(find_loss=find_loss)

    def _hook(self, *, find_loss: bool) -> None:
        each_of_them = each_of(self._optimizer)
        self._nests = any(map(may_nest, each_of_them))
        self._judges = judges_for(self.guard._parts, len(each_of_them))
        eager: Any = torch.compiler.disable  # why: a compiled optimizer.step would trace hooks and all that they call
        self._handles: list[Any] = [each.register_step_pre_hook(eager(self._before)) for each in each_of_them]
        self._handles += [each.register_step_post_hook(eager(self._after)) for each in each_of_them]
        self._seen.before = self._before_backward
        # why not in a pipeline: a schedule divides the gradients after its last backward
        if find_loss and self.guard._parts.ranks.stages is None:
            self._seen.probes = self.guard._parts.probes
            listeners.listen_to_backward(self._seen)
            listeners.listen_to_clipping(self._seen)

    def loss(self, loss: Tensor, *, batch: Any = None, again: Again | None = None) -> Tensor:
        """Give the `loss` before scaling, where it is not what `backward` is called on; return it unchanged.

        `batch` is kept in an incident bundle and passed to `again`, which computes this loss again: to find the source
        of a NaN and to test whether a rollback would help.
        """
        arguments.check_loss("watcher.loss", loss)
        if again is not None and not callable(again):
            raise MisuseError(f"again = {again!r}: must be a function that computes this loss again")
        self._seen.give(loss)
        if self._rounds is not None:  # why: a loop that is not listened to says no more of its backward pass than this
            self._rounds.before_backward()
        if batch is not None or again is not None:
            self._reruns.add(again, batch)
        return loss

    def could_rerun(self, again: Again, batch: Any, rng: RngState | None = None) -> None:
        """Give `again`, which computes the loss of the current step again from `batch`, and its random state `rng`."""
        self._reruns.add(again, batch, rng)

    def metrics(self, **numbers: float | Tensor) -> None:
        """Give scalars, `**numbers`, that belong to the next step: they are logged with it and monitored."""
        self.guard._pipeline.metrics.update(checked_metrics(numbers))

    @property
    def refuses(self) -> bool:
        """Whether the step under way is refused: for an engine that takes the step by itself."""
        return self._step.outcome is not None and not self._step.outcome.stepped

    def remove(self) -> None:
        """Remove all hooks and close the guard; the loop runs as before. Leaving a `with` block does the same."""
        hooked: list[Any] = [*self._handles, *self._scaling, *filter(None, [self._recorder])]
        for each in hooked:
            each.remove()
        self._handles = []
        listeners.stop_listening(self._seen)
        listeners.stop_hearing(self._seen)
        self._step.abandon()
        self.guard.close()

    def _before(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._step.busy or (self._nests and is_nested(optimizer)):
            return None
        if inside_backward():
            raise UnsupportedError(IN_BACKWARD)
        if not self._begun:
            self._begun = True
            self._seen.elsewhere.stop()
            self._keep(self._schedulers.find())  # a program may make its scheduler after the watcher
        if self._rounds is not None and not self._rounds.leads(optimizer):
            self._follow(optimizer)
            return None
        self._close_late()
        self._step.abandon()
        self._schedulers.before_step()
        closure = closure_of(args, kwargs)
        if self._rounds is not None:
            if closure is not None:
                raise UnsupportedError("optimizer.step(closure) among several optimizers: use one watcher for each")
            place = self._rounds.place(optimizer)
            self._step.scaling, self._step.judge = self._scaling[place], self._judges[place]
            if self._rounds.is_of_the_last_pass:
                self._seen.recall()
            self._step.decide_about(self._rounds.begin(optimizer))
        elif closure is not None:
            return with_closure(args, kwargs, self._step.judged(closure))
        else:
            self._step.decide()
        return None

    def _after(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._step.busy or (self._nests and is_nested(optimizer)):
            return
        late, self._late = self._late, None
        if late is not None:
            late.back()
        if self._rounds is not None and not self._rounds.follows(optimizer) and self._step.outcome is not None:
            self._note(self._step.outcome)  # now: the loop may step a scheduler between two of them
        if self._rounds is None or self._rounds.ends_with(optimizer):
            self._close()
        else:
            self._open = True

    def _follow(self, optimizer: Optimizer) -> None:
        """A step that belongs to a decision; one that was closed before it was known who follows is honoured too."""
        assert self._rounds is not None
        self._scaling[self._rounds.place(optimizer)].open()
        refused = self.outcome is not None and not self.outcome.stepped
        if refused and not self._open and self.guard.config.mode != "observe":
            self._late = Undo(optimizer, rng=True)

    def _before_backward(self) -> None:
        if self._rounds is not None:
            self._close_late()
            self._rounds.before_backward()

    def _close_late(self) -> None:
        """The loop goes on without a step that used to follow."""
        if self._open:
            self._close()

    def _close(self) -> None:
        """The last step of a decision was called."""
        self._open = False
        outcome = self._step.close()
        if self._rounds is None or self._rounds.all_stepped:  # or in a later step, which comes here too
            self._step.remember()
        if self._rounds is not None:
            self._rounds.close()
        if outcome is None:  # a closure that was never called
            return
        self.outcome = outcome
        if self._rounds is None:
            self._note(outcome)
        try:
            if self._tell is not None:
                self._tell(outcome)
        finally:  # the step has been taken, whatever the one who is told makes of it
            self.guard._pipeline.record(outcome)

    def _note(self, outcome: Outcome) -> None:
        """After a rollback the scheduler is where it was right after that update, and the loop's call completes it."""
        updates = self.guard.updates if outcome.restored is None else outcome.restored
        if outcome.replayed and updates < self.guard.updates:
            self._schedulers.advance(outcome.replayed)
        self._schedulers.after_step(refused=not outcome.stepped and updates == self.guard.updates)

    def _recorded(self, model: nn.Module, obstacle: str) -> Recorder | None:
        """Where updates can be replayed."""
        parts = self.guard._parts
        obstacle = obstacle or why_not_on(parts.ranks, model)
        if obstacle and parts.ranks.rank == 0:
            say_what_is_lost(self.guard.config, obstacle)
        if obstacle or not parts.recovery.remembers:
            return None
        return Recorder(model, parts.measurer, parts.measurer.parameters[0].device)

    def _keep(self, schedulers: Sequence[Any]) -> None:
        for scheduler in schedulers:
            if hasattr(scheduler, "state_dict") and hasattr(scheduler, "load_state_dict"):
                self.guard.keep(f"scheduler {self._kept}", scheduler)
                self._kept += 1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


def _extra_detectors(given: Sequence[Detector], scaler: GradScaler | None) -> tuple[Detector, ...]:
    detectors = tuple(arguments.sequence("detectors", given))
    arguments.checked_scaler(scaler)
    return (*detectors, LossScale()) if scaler is not None and scaler.is_enabled() else detectors
