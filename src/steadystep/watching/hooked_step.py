"""One step of somebody else's: decided in its pre-hook, closed in its post-hook."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, final

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from steadystep.actions import REFUSALS
from steadystep.diagnosis import Cause
from steadystep.diagnosis.advice import advise
from steadystep.engine.ownership import no_loss_seen
from steadystep.errors import MisuseError, UnsupportedError
from steadystep.guard import Guard
from steadystep.incidents import RefusedStep
from steadystep.optimizers import each_of
from steadystep.records import Action, Diagnosis, Outcome, Plan
from steadystep.signals.gradients import GradientView
from steadystep.snapshots.replay_buffer import RecordedMicroBatch
from steadystep.watching.collected import Collected, LossScaling
from steadystep.watching.recorder import Reruns
from steadystep.watching.undo import Undo, is_quiet, loss_is_finite

_LEARNING = 3  # steps with a closure, after which it is known what an optimizer does before it calls it


@final
class HookedStep:
    """idle → decided (by `decide`, or inside a closure) → idle again by `close`."""

    def __init__(
        self,
        guard: Guard,
        optimizer: Optimizer,
        seen: Collected,
        scaling: LossScaling,
        reruns: Reruns,
        *,
        several: bool,
    ) -> None:
        self._pipeline, self._parts, self._progress = guard._pipeline, guard._parts, guard._parts.progress
        self._optimizer, self._seen, self._reruns = optimizer, seen, reruns
        self.scaling, self._several = scaling, several
        """The optimizer evaluates its closure as often as it likes, and moves the weights in between."""
        self._outcome: Outcome | None = None
        self._case: RefusedStep | None = None
        self._touches = guard.config.mode != "observe"
        self._quiet = all(map(is_quiet, each_of(optimizer)))
        self.judge = self._parts.judge
        self._from_start = several
        """The optimizer changes something before it calls its closure, or between two calls."""
        self._learning = 0 if self._quiet or several else _LEARNING
        self._partly = False
        """Only a part of the gradients is looked at."""
        self._whole = True
        """The decision at hand is about all optimizers."""
        self._works: tuple[RecordedMicroBatch, ...] = ()
        # by all ranks or none: who runs the model again alone waits for the others
        self._missing = self._parts.ranks.any_rank(lambda: not self._works)
        self._options: tuple[Mapping[str, Any], ...] = ()
        self._taken: tuple[tuple[RecordedMicroBatch, ...], Outcome, int, tuple[Mapping[str, Any], ...]] | None = None
        self.busy = False
        """A step of the optimizer is the guard's own: an update is replayed."""
        self._undo: Undo | None = None
        self._view: GradientView | None = None
        self._evaluations = 0
        self._parts.runner.given_losses = True
        self._parts.recovery.begin(step=0, updates=0)
        self._fresh: list[int] | None = self._versions()

    def decide_about(self, others: Sequence[Parameter]) -> None:
        """As `decide`, with the gradients of `others` out of sight: they belong to another loss."""
        aside = [(p, p.grad) for p in others if p.grad is not None]
        self._partly, self._whole = bool(aside), not others
        for parameter, _ in aside:
            parameter.grad = None
        try:
            self.decide()
        finally:
            self._partly = False
            for parameter, grad in aside:
                parameter.grad = grad

    def decide(self, returned: Any = None) -> None:
        """MEASURE ─► NOTICE ─► EXPLAIN ─► DECIDE, and all of ACT but the step."""
        self._at_work(True)
        try:
            self._decide(returned)
        finally:
            self._at_work(False)

    def _decide(self, returned: Any) -> None:
        parts, pipeline = self._parts, self._pipeline
        parts.begin_step()
        if self._fresh is not None:
            if self._fresh != self._versions():  # loaded since: what was remembered is not what is trained
                parts.recovery.outdate()
            self._fresh = None
        shrunk = self._seen.touched  # a scaler's unscaling does not count as a touch
        scaled = self.scaling.open()
        losses, scale = self._losses(returned, scaled=scaled)
        if not losses:  # a step without gradients does nothing
            return
        norms = self._seen.norms if shrunk and not self._partly else None
        if norms is not None and scale is not None:
            norms = list(torch._foreach_div(norms, scale))
        parts.learning_rate.place(self._progress.updates)
        repeats = parts.recovery.remembers and not self._several and self._whole
        self._works = self._seen.micro_batches(unchanged=not shrunk and not scaled) if repeats else ()
        view = pipeline.measure_losses(
            losses,
            scale=scale if scale is not None or not scaled else torch.ones((), device=losses[0].device),
            metrics=pipeline.metrics,
            batches=self._reruns.batches,
            measured=norms,
        )
        self._works = () if self._missing() else self._works
        self._reruns.show(parts.runner, self._works)
        clips = shrunk and scale is None and not parts.ranks.sharded
        verdict = pipeline.judge(view, self.judge, clipped=clips)
        view, plan = replace(view, signals=verdict.signals), verdict.plan
        if self._several and REFUSALS.isdisjoint(plan.actions) and Action.ROLLBACK not in plan.actions:
            plan = Plan()  # why: a line search with rescaled gradients is lost
        if plan.actions:
            self._reruns.show(parts.runner, self._works, view.signals.bad_micro_batches)
        self._case = parts.nan_tracer.open(plan, view, updates=self._progress.updates)
        held = self._held() if plan.actions and not self._quiet else ()
        self._outcome = self._acted(plan, view, verdict.diagnosis, shrunk=shrunk)
        if not self._outcome.stepped:
            self._stand_still(held, restored=self._outcome.restored is not None)
        self._seen.measuring, self._view = shrunk, view if self._several else None

    def judged(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """The closure, and right after it the decision: gradients exist only then."""
        self._evaluations = 0
        if self._touches and (self._from_start or self._learning):
            self._undo = Undo(self._optimizer)

        def run() -> Any:
            self._evaluations += 1
            if self._evaluations == 1:
                self._learn()
                loss = closure()
                self.decide(loss)
                return loss
            late = self._undo is None and self._touches
            self._from_start = True
            loss = closure()
            if self._accepted and not self._parts.ranks.all(loss_is_finite(loss, self._optimizer)):
                if late:
                    raise self._too_late()
                self.decide(loss)
            if self._accepted:
                return loss
            self._parts.around.drop()
            return -math.inf  # why: with no gradient and no better loss to be had, a line search ends here

        return run

    def close(self) -> Outcome | None:
        """The step was called. None when nothing was decided in it."""
        self._at_work(True)
        try:
            return self._close()
        finally:
            self._at_work(False)

    def _close(self) -> Outcome | None:
        outcome, self._outcome = self._outcome, None
        if outcome is None:
            return None
        undo, self._undo = self._undo, None
        view, self._view = self._view, None
        if undo is not None and view is not None and outcome.stepped and not self._parts.ranks.all(not undo.needed):
            outcome = self._undone(view)
        if undo is not None and not outcome.stepped:
            undo.back()
        parts = self._parts
        parts.around.after(outcome)
        self._taken = None
        if self._works and outcome.stepped:
            rate, mult = parts.learning_rate, outcome.lr_mult
            used = self._options if mult == 1.0 else rate.times(self._options, mult)
            self._taken = self._works, outcome, self._progress.updates + 1, used
        self._works = ()
        outcome, self._case = self._parts.nan_tracer.close(outcome, self._case), None
        self._seen.clear()
        self._reruns.clear()
        return outcome

    def remember(self) -> None:
        """The update that was closed can be replayed as it was taken: by all that it is about."""
        taken, self._taken = self._taken, None
        if taken is not None:
            micro_batches, outcome, updates, options = taken
            self._parts.recovery.remember(micro_batches, outcome, updates=updates, options=options)

    def abandon(self) -> None:
        """A step that raised leaves the learning rate as the user set it, and a refused one nothing at all."""
        self._parts.around.abandon()
        undo, self._undo = self._undo, None
        if undo is not None and self._outcome is not None and not self._outcome.stepped:
            undo.back()
        self._outcome = None

    def _acted(self, plan: Plan, view: GradientView, diagnosis: Diagnosis, *, shrunk: bool) -> Outcome:
        parts = self._parts
        parts.runner.offer(self._works)
        # before the update: some optimizers set their own rate in it
        self._options = parts.learning_rate.options() if self._works else ()
        try:
            if Action.ROLLBACK not in plan.actions:
                return parts.around.before(plan, view, diagnosis, shrunk=shrunk)
            outcome = parts.rollback.carry_out(plan, view, diagnosis, measure=self._measure_again)
            parts.around.drop()
            return outcome
        finally:
            parts.runner.given_losses = True

    def _measure_again(self, kept: Sequence[int]) -> GradientView:
        """Measure the gradients of an update that is replayed. Its losses were divided by the loop."""
        parts = self._parts
        losses = [parts.runner.group.members[i].loss for i in kept]
        losses = losses if len(losses) == 1 else [loss * len(losses) for loss in losses]
        return self._pipeline.measure_losses(losses)

    def _at_work(self, busy: bool) -> None:
        """What the guard runs by itself is none of the loop's doing."""
        self.busy = busy
        self._seen.pause(busy)

    def _learn(self) -> None:
        """At the first call of a closure: what the optimizer has done by then."""
        if self._undo is not None and self._learning:
            self._learning -= 1
            self._from_start = self._from_start or self._undo.moved

    def _too_late(self) -> UnsupportedError:
        return UnsupportedError(
            f"{type(self._optimizer).__name__} called its closure once per step so far and has now called it a "
            "second time with a non-finite loss or gradient: what it did in between cannot be undone. Load your "
            "last checkpoint"
        )

    def _held(self) -> list[tuple[Parameter, Tensor]]:
        parameters = [p for group in self._optimizer.param_groups for p in group["params"]]
        return [(p, p.grad) for p in parameters if p.grad is not None]

    def _stand_still(self, held: Sequence[tuple[Parameter, Tensor]], *, restored: bool) -> None:
        """The step that follows changes nothing; or what it changes is undone."""
        if self._quiet:
            return
        if self._undo is None or restored:
            self._undo = Undo(self._optimizer, rng=True)
        for parameter, grad in held:  # why zeros: who wrote this optimizer may not have thought of a missing gradient
            parameter.grad = grad.detach().zero_()

    def _undone(self, view: GradientView) -> Outcome:
        """Every evaluation was finite, and the weights it came to are not."""
        parts, cause = self._parts, Cause.LEARNING_RATE_TOO_HIGH
        stop = (Action.STOP,) if parts.budget.skips_spent(view.signals.step) else ()
        plan = Plan(actions=(Action.SKIP_STEP, *stop), reason=cause.value)
        evidence = "the optimizer's step produced non-finite weights"
        parts.probes.cancel()
        advice = advise(cause, parts.judge.setup, plan)
        diagnosis = Diagnosis(cause=cause.value, evidence=evidence, advice=advice)
        return parts.updater.report(plan, view, diagnosis, stepped=False)

    @property
    def outcome(self) -> Outcome | None:
        """What was decided and is not closed yet."""
        return self._outcome

    @property
    def _accepted(self) -> bool:
        return self._outcome is None or self._outcome.stepped

    def _losses(self, returned: Any, *, scaled: bool) -> tuple[list[Tensor], Tensor | None]:
        scale = self.scaling.scale(self._parts.measurer.parameters[0].device) if scaled else None
        if scaled and scale is None and not self._seen.was_given:
            raise MisuseError(
                "a GradScaler is in use, so backward is called on the scaled loss: use watch(model, optimizer, "
                "scaler=scaler)"
            )
        losses, stages = self._seen.losses(scale), self._parts.ranks.stages
        if stages is not None:
            return [stages.given(losses)], scale
        if not losses and isinstance(returned, Tensor) and returned.numel() == 1:
            losses = [returned.detach().reshape(())]
        if not losses and any(p.grad is not None for p in self._parts.measurer.parameters):
            raise MisuseError(no_loss_seen())
        return losses, scale

    def _versions(self) -> list[int]:
        return [parameter._version for parameter in self._parts.measurer.parameters]
