"""One step of somebody else's: decided in its pre-hook, closed in its post-hook."""

import math
from collections.abc import Callable
from typing import Any, final

import torch
from torch import Tensor
from torch.optim import Optimizer

from steadystep.actions.update import REFUSALS
from steadystep.diagnosis import ADVICE, Cause
from steadystep.errors import MisuseError
from steadystep.guard import Guard
from steadystep.incidents.case import Case
from steadystep.look import Look
from steadystep.norms import measure
from steadystep.records import Diagnosis, Outcome, Plan
from steadystep.watching.closures import Undo, is_finite
from steadystep.watching.collected import Collected
from steadystep.watching.loss_scaling import LossScaling
from steadystep.watching.reruns import Reruns


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
        self._guard, self._parts = guard, guard._parts
        self._optimizer = optimizer
        self._seen = seen
        self._scaling = scaling
        self._reruns = reruns
        self._several = several
        """The optimizer evaluates its closure as often as it likes, and moves the weights in between."""
        self._outcome: Outcome | None = None
        self._case: Case | None = None
        self._touches = guard.config.mode != "observe"
        self._undo: Undo | None = None
        self._look: Look | None = None
        self._evaluations = 0
        self._parts.passes.given_losses = True
        self._parts.recovery.begin(step=0, updates=0)
        self._fresh: list[int] | None = self._versions()

    def decide(self, returned: Any = None) -> None:
        """MEASURE ─► NOTICE ─► EXPLAIN ─► DECIDE, and all of ACT but the step."""
        parts, guard = self._parts, self._guard
        self.abandon()
        if self._fresh is not None:
            if self._fresh != self._versions():  # loaded since: what was remembered is not what is trained
                parts.recovery.forget()
            self._fresh = None
        shrunk = self._seen.touched  # a scaler's unscaling does not count as a touch
        scaled = self._scaling.open()
        losses, scale = self._losses(returned, scaled=scaled)
        if not losses:  # a step without gradients does nothing
            return
        norms = self._seen.norms if shrunk else None
        if norms is not None and scale is not None:
            norms = list(torch._foreach_div(norms, scale))
        parts.learning_rate.place(guard.updates)
        self._reruns.show(parts.passes)
        look = parts.looker.look(
            step=guard.attempts,
            losses=losses,
            weights=[1.0] * len(losses),
            scale=scale if scale is not None or not scaled else torch.ones((), device=losses[0].device),
            metrics=guard._metrics,
            batches=self._reruns.batches,
            refused_in_a_row=parts.budget.refused_in_a_row,
            measured=norms,
        )
        look = parts.ranks.agree(look)
        clips = _norm_now if shrunk and scale is None and not parts.ranks.sharded else None
        diagnosis, plan = parts.judge.judge(look, updates=guard.updates, clipped_norm=clips)
        if self._several and REFUSALS.isdisjoint(plan.steps) and "rollback" not in plan.steps:
            plan = Plan()  # why: a line search with rescaled gradients is lost
        if plan.steps:
            self._reruns.show(parts.passes, look.signals.bad_micro_batches)
        self._case = parts.examiner.open(plan, look, updates=guard.updates)
        self._outcome = parts.around.before(plan, look, diagnosis, shrunk=shrunk)
        self._seen.measuring = shrunk
        self._look = look if self._several else None

    def judged(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """The closure, and right after it the decision: gradients exist only then."""
        self._evaluations = 0

        def run() -> Any:
            self._evaluations += 1
            if self._evaluations == 1 and self._several and self._touches:
                self._undo = Undo(self._optimizer)
            loss = closure()
            if self._evaluations == 1:
                self.decide(loss)
                return loss
            if self._accepted and not self._parts.ranks.all(is_finite(loss, self._optimizer)):
                self.decide(loss)
            if self._accepted:
                return loss
            self._drop()
            return -math.inf  # why: with no gradient and no better loss to be had, a line search ends here

        return run

    def close(self) -> Outcome | None:
        """The step was called. None when nothing was decided in it."""
        outcome, self._outcome = self._outcome, None
        if outcome is None:
            return None
        undo, self._undo = self._undo, None
        look, self._look = self._look, None
        if undo is not None and look is not None and outcome.stepped and not self._parts.ranks.all(not undo.needed):
            outcome = self._undone(look)
        if undo is not None and not outcome.stepped and outcome.restored is None:
            undo.back()
        self._parts.around.after(outcome)
        outcome, self._case = self._parts.examiner.close(outcome, self._case), None
        self._seen.clear()
        self._reruns.clear()
        return outcome

    def abandon(self) -> None:
        """A step that raised leaves the learning rate as the user set it."""
        self._parts.around.abandon()

    def _undone(self, look: Look) -> Outcome:
        """Every evaluation was finite, and the weights it came to are not."""
        parts, cause = self._parts, Cause.LEARNING_RATE_TOO_HIGH
        stop = ("stop",) if parts.budget.skips_spent(look.signals.step) else ()
        plan = Plan(steps=("skip-step", *stop), reason=cause.value)
        evidence = "the optimizer's step led to weights that are not finite"
        parts.probes.cancel()
        diagnosis = Diagnosis(cause=cause.value, evidence=evidence, advice=ADVICE[cause])
        return parts.action.report(plan, look, diagnosis, stepped=False)

    @property
    def _accepted(self) -> bool:
        return self._outcome is None or self._outcome.stepped

    def _losses(self, returned: Any, *, scaled: bool) -> tuple[list[Tensor], Tensor | None]:
        device = self._parts.looker.parameters[0].device
        scale = self._scaling.scale(device) if scaled else None
        if scaled and scale is None and not self._seen.was_given:
            raise MisuseError(
                "a GradScaler is at work, and what backward is called on is the scaled loss: "
                "watch(model, optimizer, scaler=scaler)"
            )
        losses = self._seen.losses(scale)
        if not losses and isinstance(returned, Tensor) and returned.numel() == 1:
            losses = [returned.detach().reshape(())]
        if not losses and any(p.grad is not None for p in self._parts.looker.parameters):
            raise MisuseError(
                "optimizer.step() came, and no loss was seen before it: call loss.backward(), or say the loss with "
                "watcher.loss(loss)"
            )
        return losses, scale

    def _drop(self) -> None:
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

    def _versions(self) -> list[int]:
        return [parameter._version for parameter in self._parts.looker.parameters]


def _norm_now(look: Look) -> float:
    return math.hypot(*(float(norm) for norm in measure(look.grads, look.layout)))  # sync: only after a spike
