"""`watch`: a guard for a loop that keeps its own backward and step.

    loss.backward() ─► heard: loss, true norms │ optimizer.step() ─► before: MEASURE … DECIDE, prepare or drop gradients
                                               │                  ─► torch's own step ─► after: put back, RECORD

The decision falls in a pre-hook of the optimizer. A refused step is one without gradients: docs/adr/0004.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self, final

from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from steadystep.claims import needs_closure
from steadystep.config import Config
from steadystep.detectors import Detector, LossScale
from steadystep.errors import ConfigError, MisuseError
from steadystep.guard import Guard
from steadystep.records import Outcome
from steadystep.rng import RngState
from steadystep.signals import checked
from steadystep.watching import backward
from steadystep.watching.closures import closure_of, with_closure
from steadystep.watching.collected import Collected
from steadystep.watching.hooked_step import HookedStep
from steadystep.watching.loss_scaling import LossScaling
from steadystep.watching.reruns import Again, Reruns
from steadystep.watching.schedulers import Schedulers


def watch(
    model: nn.Module,
    optimizer: Optimizer,
    *,
    config: Config | Mapping[str, Any] | str | Path | None = None,
    run_dir: str | Path | None = None,
    scaler: GradScaler | None = None,
    schedulers: Sequence[Any] = (),
    detectors: Sequence[Detector] = (),
    find_loss: bool = True,
) -> "Watcher":
    """Guard a loop that calls `loss.backward()` and `optimizer.step()` itself. Nothing else in it has to change.

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
        model: whose weights and buffers are to stay healthy.
        optimizer: the one the loop steps; one watcher each.
        config: as for `Guard`. What the loop does itself (mixed precision, accumulation) does not belong here.
        run_dir: where the run log and incident bundles go.
        scaler: the loop's `GradScaler`, if it has one.
        schedulers: torch's schedulers are found by themselves; name those that are not torch's own.
        detectors: your own, beside the built-in ones.
        find_loss: hear of the loop's `backward` calls. With False, say each loss with `watcher.loss(loss)`; a loop that
            clips by itself then goes unnoticed.
    """
    return Watcher(
        model,
        optimizer,
        config=config,
        run_dir=run_dir,
        scaler=scaler,
        schedulers=schedulers,
        detectors=detectors,
        find_loss=find_loss,
    )


@final
class Watcher:
    """What `watch` gives back. `remove()`, or leaving a `with`, takes it out again."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        config: Config | Mapping[str, Any] | str | Path | None = None,
        run_dir: str | Path | None = None,
        scaler: GradScaler | None = None,
        schedulers: Sequence[Any] = (),
        detectors: Sequence[Detector] = (),
        find_loss: bool = True,
        signs_scaling: bool = True,
        tell: Callable[[Outcome], None] | None = None,
    ) -> None:
        settings = _checked_for_watching(Config.load(config))
        optimizer = unwrapped(optimizer)
        extra = (*detectors, LossScale()) if scaler is not None and scaler.is_enabled() else tuple(detectors)
        self.guard = Guard(model, optimizer, config=settings, run_dir=run_dir, detectors=extra)
        """For `diagnose()`, `validate()`, `keep()`, `state_dict()`; the steps are the loop's."""
        self.outcome: Outcome | None = None
        """What became of the last step."""
        self._optimizer = optimizer
        self._tell = tell
        parts = self.guard._parts
        self._seen = Collected(lambda: parts.looker.parameters, parts.looker.norms)
        self._scaling = LossScaling(optimizer, scaler, signs=signs_scaling and settings.mode != "observe")
        self._schedulers = Schedulers(optimizer, schedulers)
        self._kept = 0
        self._keep(self._schedulers.known)
        self._begun = False
        self._reruns = Reruns()
        self._step = HookedStep(
            self.guard, optimizer, self._seen, self._scaling, self._reruns, several=needs_closure(optimizer)
        )
        self._handles = [
            optimizer.register_step_pre_hook(self._before),
            optimizer.register_step_post_hook(self._after),
        ]
        if find_loss:
            backward.listen(self._seen)

    def loss(self, loss: Tensor, *, batch: Any = None, again: Again | None = None) -> Tensor:
        """Say what the loss is, where it is not what `backward` is called on; returns it as it came.

        Args:
            loss: one real number, before it is scaled or divided.
            batch: kept in an incident, and given to `again` as its argument.
            again: computes this loss again, to find out where a NaN came from and whether going back would help.
        """
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.is_floating_point():
            raise MisuseError("watcher.loss() takes the loss as a tensor of one real number: take its mean")
        self._seen.give(loss)
        if batch is not None or again is not None:
            self._reruns.add(again, batch)
        return loss

    def could_rerun(self, again: Again, batch: Any, rng: RngState | None = None) -> None:
        """A forward pass of the present step: how its loss could be computed again."""
        self._reruns.add(again, batch, rng)

    def metrics(self, **numbers: float | Tensor) -> None:
        """Scalars that belong to the next step: logged with it, and watched."""
        self.guard._metrics.update(checked(numbers))

    def remove(self) -> None:
        """Leave the loop to itself: hooks, listeners and the scaler's seam are gone."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        backward.stop(self._seen)
        self._scaling.remove()
        self._step.abandon()
        self.guard.close()

    def _before(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self._begun:
            self._begun = True
            self._keep(self._schedulers.find())  # a program may make its scheduler after the watcher
        self._schedulers.before_step()
        closure = closure_of(args, kwargs)
        if closure is not None:
            return with_closure(args, kwargs, self._step.judged(closure))
        self._step.decide()
        return None

    def _after(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        outcome = self._step.close()
        if outcome is None:  # a closure that was never called
            return
        self.outcome = outcome
        # After a rollback the scheduler is where it was right after that update, and the loop's call completes it.
        self._schedulers.after_step(refused=not outcome.stepped and outcome.restored is None)
        if self._tell is not None:
            self._tell(outcome)
        self.guard._settled(outcome)

    def _keep(self, schedulers: Sequence[Any]) -> None:
        for scheduler in schedulers:
            if hasattr(scheduler, "state_dict") and hasattr(scheduler, "load_state_dict"):
                self.guard.keep(f"scheduler {self._kept}", scheduler)
                self._kept += 1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


def unwrapped(optimizer: Any) -> Any:
    """Torch's optimizer inside what a framework has wrapped around it."""
    inner = getattr(optimizer, "optimizer", None)
    while isinstance(inner, Optimizer):
        optimizer, inner = inner, getattr(inner, "optimizer", None)
    return optimizer


def _checked_for_watching(config: Config) -> Config:
    theirs = {
        "training.mixed_precision": config.training.mixed_precision != "fp32",
        "training.gradient_accumulation_steps": config.training.gradient_accumulation_steps != 1,
        "training.fp32_modules": bool(config.training.fp32_modules),
        "monitoring.save_checkpoints": bool(config.monitoring.save_checkpoints),
    }
    named = [key for key, is_set in theirs.items() if is_set]
    if named:
        raise ConfigError(
            f"watch: {', '.join(named)} cannot be honoured here, because the loop does this itself. Leave it out; "
            "with your own checkpoints save watcher.guard.state_dict()"
        )
    return config
