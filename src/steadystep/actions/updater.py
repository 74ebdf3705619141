"""Takes an update, or refuses it without a trace.

Clipping tensor by tensor or unit by unit is from the norms that were measured already. An update that somebody else
takes has a part before it and a part after it: `Around`.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, final

from torch.optim import Optimizer

from steadystep import optimizers
from steadystep._utils.tensors import measure
from steadystep.clip import TensorEMAClip
from steadystep.clip.global_norm import EPSILON, clamp_, clip_global_norm_, multiply_, multiply_each_, scale_by_norm_
from steadystep.clip.learned import NormRule
from steadystep.clip.per_tensor import scale_units_
from steadystep.optimizers import Trained
from steadystep.parallel.stages import Stages
from steadystep.precision import Precision
from steadystep.records import Action, Diagnosis, Outcome, Plan
from steadystep.rl import Controls

if TYPE_CHECKING:
    from steadystep.engine.learning_rate import LearningRate
    from steadystep.engine.microbatches import MicroBatchRunner
    from steadystep.signals.gradients import Gradients, GradientView, Probing
    from steadystep.snapshots.buffers import Buffers
    from steadystep.snapshots.recovery import Recovery
    from steadystep.snapshots.replay_buffer import RecordedUpdate


class TensorClip(Protocol):
    """Scales some of the gradients of a view, in place."""

    def clip_(self, view: "GradientView") -> bool:
        """True when one was known to be scaled."""
        ...


@final
class ByUnits:
    """Adaptive gradient clipping. What it scaled stays on the device: asking would cost a second host read."""

    def __init__(self, trained: Trained) -> None:
        self._trained = trained

    def clip_(self, view: "GradientView") -> bool:
        """Each unit to at most a hundredth of its weights' norm."""
        scale_units_([p for p in self._trained.parameters if p.grad is not None])
        return False


@final
class ByTensors:
    """Each tensor against its own past."""

    def __init__(self, rule: TensorEMAClip) -> None:
        self._rule = rule

    def clip_(self, view: "GradientView") -> bool:
        """Learn from the norms and scale the tensors above their limits."""
        norms = dict(zip(view.signals.names, view.signals.norms, strict=True))
        limits = self._rule.limits(norms)
        self._rule.learn(norms)
        factors = [min(1.0, limits[name] / norms[name]) if norms[name] else 1.0 for name in view.names]
        if all(factor == 1.0 for factor in factors):
            return False
        multiply_each_(view.grads, view.layout, factors)
        return True


_MARGIN = 1.0 + 1e-4
REFUSALS = frozenset((Action.SKIP_STEP, Action.LEAVE_OUT, Action.BACK_OFF_SCALE))


@final
class Updater:
    """Clips, steps and clears the gradients; or puts everything back."""

    def __init__(
        self,
        optimizer: Optimizer,
        precision: Precision,
        buffers: "Buffers",
        runner: "MicroBatchRunner",
        learning_rate: "LearningRate",
        recovery: "Recovery",
        probing: "Probing",
        *,
        clip_norm: float | None,
        clip_value: float | None,
        clip_rule: NormRule | None,
        tensor_clip: TensorClip | None = None,
        sharded: "Gradients | Stages | None" = None,
        copy_from: Callable[[int, Optimizer], None] | None = None,
    ) -> None:
        self._optimizer, self._precision = optimizer, precision
        self._buffers, self._recovery = buffers, recovery
        self.runner = runner
        self._lr, self._probing = learning_rate, probing
        self._clip_norm, self._clip_value, self._clip_rule = clip_norm, clip_value, clip_rule
        self._tensor_clip = tensor_clip
        self._sharded = sharded
        """Where gradients are spread over ranks: those whose norm torch computes together, or stages of a pipeline."""
        self._copy_from = copy_from
        self.controls: Controls | None = None

    def take(
        self, plan: Plan, view: "GradientView", diagnosis: Diagnosis, *, left_out: tuple[int, ...] = ()
    ) -> Outcome:
        """Clip, step with the learning rate under its ceiling, clear the gradients."""
        signals, ceiling = view.signals, self._lr.ceiling
        clipped = self.clip_(view, limit=plan.norm)
        lr_mult = self._lr.lower(signals.lr)
        step, every = signals.step, self._probing.every
        probing = (step < every or step % every == 0) and self._probing.due(step)
        try:
            if probing:
                self._probing.before()
            self._step(view)
            if probing:
                self._probing.after(signals.step)
        finally:
            if lr_mult != 1.0:
                self._lr.put_back()
        if ceiling.low:
            ceiling.updated(signals.lr)
        view.grads.clear()
        optimizers.zero_grad(self._optimizer)
        self.runner.close()
        # In observe() an overflow is left to the scaler, which skips by itself.
        stepped = not signals.scaled or math.isfinite(signals.grad_norm)
        return Outcome.of(
            plan, signals, diagnosis, stepped=stepped, left_out=left_out, clipped=clipped, lr_mult=lr_mult
        )

    def take_again(self, view: "GradientView", done: "RecordedUpdate") -> None:
        """An update that was undone, as it was taken then."""
        touch = done.micro_batches[-1].touch
        if touch is not None:
            touch()
        self.clip_(view, limit=done.norm, again=touch is not None)
        with self._lr.using(done.options):
            self._step(view)
        view.grads.clear()
        optimizers.zero_grad(self._optimizer)
        self.runner.close()

    def refuse(self, plan: Plan, view: "GradientView", diagnosis: Diagnosis, *, overflow: bool) -> Outcome:
        """Drop the gradients; weights, moments and buffers stay as they were."""
        self.drop_gradients(overflow=overflow)
        return self.report(plan, view, diagnosis, stepped=False)

    def prepare(self, plan: Plan) -> None:
        """What a plan asks for beside the update itself."""
        if plan.lr is not None:
            self._lr.ceiling.limit(plan.lr, hold=plan.hold)
        if Action.RESTORE_MOMENTS in plan.actions and plan.to is not None:
            self._recovery.restore_moments(plan.to)
        self._recovery.restore_kept(plan.kept)
        if plan.raises and self.controls is not None:
            self.controls.raise_(plan.raises)
        if plan.rank is not None and self._copy_from is not None:
            self._copy_from(plan.rank, self._optimizer)
            self._recovery.forget()  # states in memory may be of the odd weights

    def report(self, plan: Plan, view: "GradientView", diagnosis: Diagnosis, *, stepped: bool) -> Outcome:
        """What somebody else did about a plan; a batch that was not used leaves no trace in buffers."""
        if not stepped:
            self._buffers.put_back()
        self.runner.close()
        return Outcome.of(plan, view.signals, diagnosis, stepped=stepped)

    def drop(self, step: int, diagnosis: Diagnosis, *, plan: Plan | None = None) -> Outcome:
        """Give up a group whose gradients cannot be had."""
        self.undo()
        plan = replace(plan or Plan(actions=(Action.SKIP_STEP,)), reason=diagnosis.cause)
        return Outcome(step=step, reading=math.nan, stepped=False, plan=plan, diagnosis=diagnosis)

    def undo(self) -> None:
        """As if the group at hand had not been computed."""
        self.drop_gradients(overflow=False)
        self._buffers.put_back()
        self.runner.close()

    def drop_gradients(self, *, overflow: bool) -> None:
        """Clear them; `overflow` says that the loss scale is to blame."""
        self._precision.refuse(overflow=overflow)
        self._optimizer.zero_grad()

    def _step(self, view: "GradientView") -> None:
        if view.grads:
            self._precision.step(self._optimizer)
        else:  # why: a scaler that has seen no gradient refuses to step, a plain loop does not
            self._precision.refuse(overflow=False)
            optimizers.step(self._optimizer)

    def clip_(self, view: "GradientView", *, limit: float | None, again: bool = False) -> bool:
        """Hold the gradients down; `again` says that the loop has clipped them since they were measured."""
        norm = view.signals.grad_norm
        learned = math.inf if self._clip_rule is None else self._learned_limit(self._clip_rule, norm)
        if again:  # what was measured no longer holds, and the host does not know what does
            bound = min(b for b in (limit, self._clip_norm, learned) if b is not None)
            if bound < norm < math.inf:
                self._scale(replace(view, norms=measure(view.grads, view.layout), stacked=None), max_norm=bound)
            return bound < norm
        if self._tensor_clip is not None and math.isfinite(norm):
            clipped = self._tensor_clip.clip_(view)
            if self._clip_norm is not None:  # what was measured no longer holds
                self._scale(
                    replace(view, norms=measure(view.grads, view.layout), stacked=None), max_norm=self._clip_norm
                )
            return clipped
        fixed = math.inf if self._clip_norm is None else self._clip_norm
        if limit is not None:
            learned = min(limit, learned)
        if learned < min(norm, fixed):
            multiply_(view.grads, view.layout, learned / norm)
        # A factor of exactly 1 changes nothing and is not applied. The margin covers that torch adds the norm up in its
        # own dtype; `not <` because in observe() a NaN norm must do what torch's clipping does with it.
        elif self._clip_norm is not None and (view.layout.half or not norm * _MARGIN + EPSILON < fixed):
            self._scale(view, max_norm=fixed, is_above=norm > fixed * _MARGIN)
        if self._clip_value is not None:
            clamp_(view.grads, view.layout, max_value=self._clip_value)
        return norm > min(learned, fixed)

    def _scale(self, view: "GradientView", *, max_norm: float, is_above: bool = False) -> None:
        """With torch's bits, which for sharded gradients costs the collective that torch's own clipping costs."""
        if isinstance(self._sharded, Stages):  # torch has no norm over stages: the one that was agreed on
            multiply_(view.grads, view.layout, min(1.0, max_norm / (view.signals.grad_norm + EPSILON)))
        elif self._sharded is None:
            known: dict[str, Any] = {"max_norm": max_norm, "stacked": view.stacked, "is_above": is_above}
            scale_by_norm_(view.grads, view.layout, view.norms, **known)
        else:
            clip_global_norm_(self._sharded.parameters, max_norm=max_norm)

    @staticmethod
    def _learned_limit(rule: NormRule, norm: float) -> float:
        if not math.isfinite(norm):
            return math.inf
        limit = rule.limit(norm)
        rule.learn(norm)
        return limit


@final
@dataclass(frozen=True, slots=True)
class Around:
    """Carries out a plan around a step of the loop's own.

    A refused step is one without gradients: torch's optimizers leave alone what has none, weight decay and moments
    included.
    """

    optimizer: Optimizer
    updater: Updater
    learning_rate: "LearningRate"
    probing: "Probing"

    def before(self, plan: Plan, view: "GradientView", diagnosis: Diagnosis, *, shrunk: bool) -> Outcome:
        """Everything up to the step; what is reported holds once the step has been called.

        `shrunk` says that the loop has clipped these gradients after they were measured. A rollback is not for here.
        """
        self.updater.prepare(plan)
        if not REFUSALS.isdisjoint(plan.actions):
            view.grads.clear()
            self.drop()
            return self.updater.report(plan, view, diagnosis, stepped=False)
        clipped = self.updater.clip_(view, limit=plan.norm, again=shrunk)
        lr_mult = self.learning_rate.lower(view.signals.lr)
        if self.probing.due(view.signals.step):
            self.probing.before()
        return Outcome.of(plan, view.signals, diagnosis, stepped=True, clipped=clipped, lr_mult=lr_mult)

    def after(self, outcome: Outcome) -> None:
        """The step has been called, and did what `before` let it do."""
        self.abandon()
        if not outcome.stepped or outcome.signals is None:
            return
        if self.learning_rate.ceiling.low:
            self.learning_rate.ceiling.updated(outcome.signals.lr)
        if self.probing.due(outcome.step):
            self.probing.after(outcome.step)
        self.updater.runner.close()

    def abandon(self) -> None:
        """The learning rate is the user's again; also when the step raised."""
        self.learning_rate.put_back()

    def drop(self) -> None:
        """Leave the step that follows no gradient."""
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None
