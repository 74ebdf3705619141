"""Taking the update, or refusing it without a trace."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import final

import torch
from torch.nn import Parameter
from torch.optim import Optimizer

from steadystep._utils.tensors import measure
from steadystep.actions.clip import TensorClip
from steadystep.checkpoints.checkpoint import Checkpoint
from steadystep.clip.global_norm import EPSILON, clamp_, clip_global_norm_, multiply_, scale_by_norm_
from steadystep.clip.learned import NormRule
from steadystep.engine.learning_rate import LearningRate
from steadystep.engine.microbatches import MicroBatchRunner
from steadystep.engine.replay import MeasureAgain, Replayed, Replayer, as_recorded
from steadystep.engine.rollback import Recovery
from steadystep.optimizers import bare_calls
from steadystep.precision import Precision
from steadystep.records import Action, DetectorName, Diagnosis, Outcome, Plan, Signals
from steadystep.signals.gradients import GradientView, Probing
from steadystep.snapshots.buffers import Buffers
from steadystep.snapshots.replay_buffer import RecordedUpdate

_MARGIN = 1.0 + 1e-4
_ABOUT = 8  # steps: how well the beginning of a lasting trouble is known
REFUSALS = frozenset((Action.SKIP_STEP, Action.LEAVE_OUT, Action.BACK_OFF_SCALE))


@final
class Update:
    """Carries out a plan: clip, step, zero_grad; or put everything back."""

    def __init__(
        self,
        optimizer: Optimizer,
        precision: Precision,
        buffers: Buffers,
        runner: MicroBatchRunner,
        learning_rate: LearningRate,
        recovery: Recovery,
        probing: Probing,
        *,
        clip_norm: float | None,
        clip_value: float | None,
        clip_rule: NormRule | None,
        tensor_clip: TensorClip | None = None,
        rewarm_steps: int = 0,
        replay: bool = False,
        sharded: Callable[[], Sequence[Parameter]] | None = None,
        learn: Callable[[Signals], None] | None = None,
        device: torch.device | None = None,
        weigh: Callable[[Signals], Mapping[str, float]] | None = None,
        from_disk: Callable[[], Checkpoint | None] | None = None,
        copy_from: Callable[[int, Optimizer], None] | None = None,
    ) -> None:
        self._optimizer = optimizer
        self._precision = precision
        self._buffers = buffers
        self.runner = runner
        self._clip_norm = clip_norm
        self._clip_value = clip_value
        self._clip_rule = clip_rule
        self._tensor_clip = tensor_clip
        self._lr = learning_rate
        self._recovery = recovery
        self._probing = probing
        self._rewarm_steps = rewarm_steps
        self._replay = replay
        self._sharded = sharded
        self._weigh = weigh or (lambda _: {})
        self._from_disk = from_disk or (lambda: None)
        self._copy_from = copy_from
        self.left_at: int | None = None
        """Updates in the weights after an exception that came out of a catch-up."""
        self._replayer = Replayer(
            runner,
            take=self._apply_again,
            undo=self._undo,
            learn=learn or (lambda _: None),
            device=device or torch.device("cpu"),
            verify=recovery.is_as_it_was,
            follow=recovery.follow,
        )

    def carry_out(
        self, plan: Plan, view: GradientView, diagnosis: Diagnosis, *, measure_again: MeasureAgain
    ) -> Outcome:
        """Do what the plan says and report it. `measure_again` measures the gradients of some of the micro-batches."""
        if plan.proceeds:
            return self._take(plan, view, diagnosis)
        if Action.ROLLBACK in plan.actions:
            return self.roll_back(plan, view, diagnosis, measure_again=measure_again)
        self.prepare(plan)
        if REFUSALS.isdisjoint(plan.actions):
            return self._take(plan, view, diagnosis)
        overflow = Action.BACK_OFF_SCALE in plan.actions
        if Action.LEAVE_OUT in plan.actions:
            kept, fresh = self._compute_again(view, measure_again)
            if kept:
                left_out = tuple(i for i in range(len(view.signals.losses)) if i not in kept)
                return self._take(plan, fresh, diagnosis, left_out=left_out)
            overflow = fresh.signals.scaled and math.isfinite(fresh.signals.loss)
        self._drop_gradients(overflow=overflow)
        return self.report(plan, view, diagnosis, stepped=False)

    def roll_back(
        self, plan: Plan, view: GradientView, diagnosis: Diagnosis, *, measure_again: MeasureAgain | None = None
    ) -> Outcome:
        """Restore an older state; the batch at hand is dropped with everything since that cannot be made again."""
        if plan.to is None:
            return self._from_checkpoint(plan, view, diagnosis)
        present = self._present(view) if plan.until is not None and measure_again is not None else ()
        self._drop_gradients(overflow=False)
        view.grads.clear()
        schedules, options = self._recovery.schedules(), self._lr.options()
        restored = self._recovery.roll_back(plan.to, replay=self._replay)
        old_options = self._lr.options()
        self.runner.close()
        self._probing.cancel()
        replayed = Replayed([], healed=False, exact=False)
        missed: tuple[RecordedUpdate, ...] = ()
        jumped = False
        if plan.until is not None and measure_again is not None:
            missed = self._recovery.missed(restored)
            if any(len(done.options) != len(options) for done in missed):  # a group was added since
                missed = ()
            try:
                replayed, jumped = self._replay_updates(plan, missed, present, view, diagnosis, measure_again)
            except BaseException:
                self._roll_back_again(plan.to)
                self._recovery.replayed(restored, ())
                self.left_at = restored
                raise
        made = replayed.updates
        whole = 0 < len(missed) <= len(made)
        if whole:  # why: schedule and options are those of the last of these updates
            schedules()
            self._lr.put(options, in_place_of=old_options)
        self._recovery.replayed(restored, made)
        plan = as_recorded(plan, whole=whole, some=bool(made), innocent=plan.outside and not jumped)
        self.prepare(plan)
        outcome = self._restored(plan, view, diagnosis, updates=restored + len(made))
        exact = bool(made) and replayed.exact and not self._recovery.leaves_behind
        return replace(outcome, replayed=len(made), exact=exact)

    def _restored(self, plan: Plan, view: GradientView, diagnosis: Diagnosis, *, updates: int) -> Outcome:
        if Action.REWARM in plan.actions:
            self._lr.ceiling.rewarm(self._rewarm_steps if plan.hold is None else min(plan.hold, self._rewarm_steps))
        signals = view.signals
        return Outcome(
            step=signals.step,
            reading=signals.loss,
            stepped=False,
            plan=plan,
            diagnosis=diagnosis,
            signals=signals,
            restored=updates,
        )

    def _from_checkpoint(self, plan: Plan, view: GradientView, diagnosis: Diagnosis) -> Outcome:
        """No state in memory can be used: the newest checkpoint that is finite, or an end."""
        self._drop_gradients(overflow=False)
        view.grads.clear()
        self._buffers.put_back()
        found = self._from_disk()
        self.runner.close()
        self._probing.cancel()
        if found is None:
            plan = Plan(actions=(Action.SKIP_STEP, Action.STOP), reason=plan.reason)
            return self.report(plan, view, diagnosis, stepped=False)
        plan = replace(plan, to=found.step)
        self.prepare(plan)
        return self._restored(plan, view, diagnosis, updates=found.updates)

    def _replay_updates(
        self,
        plan: Plan,
        missed: Sequence[RecordedUpdate],
        present: Sequence[RecordedUpdate],
        view: GradientView,
        diagnosis: Diagnosis,
        measure_again: MeasureAgain,
    ) -> tuple[Replayed, bool]:
        """Those of `missed` that go well this time, from the first on, and then the one at hand.

        And whether they led to where the weights had jumped to: then it was the updates after all.
        """
        assert plan.to is not None
        assert plan.until is not None
        if not missed:
            return Replayed([], healed=False, exact=False), False
        wanted, sign = [*missed, *present], plan.until
        made = self._replayer.replay(wanted, measure_again, first_sign=sign, outside=plan.outside, slack=_ABOUT)
        if not plan.outside and not made.healed and any(done.signals.step >= sign for done in made.updates):
            self._roll_back_again(plan.to)  # it was the updates: those from the first sign on are not wanted
            made = self._replayer.replay(missed, measure_again, first_sign=sign)
        jumped = plan.outside and bool(made.updates) and not made.healed and self._jumped_again(view, diagnosis)
        if jumped:
            self._roll_back_again(plan.to)
            made = self._replayer.replay(missed, measure_again, first_sign=sign)
        if made.updates and plan.only_whole and len(made.updates) < len(missed):
            self._roll_back_again(plan.to)
            made = replace(made, updates=[])
        return made, jumped

    def _roll_back_again(self, step: int) -> None:
        self._undo()
        self._recovery.roll_back(step, replay=self._replay)
        self.runner.close()

    def _jumped_again(self, view: GradientView, diagnosis: Diagnosis) -> bool:
        """The weights are again where they had jumped to: it was the updates after all."""
        jump = next(f for f in diagnosis.findings if f.detector == DetectorName.WEIGHT_JUMP)
        now = self._weigh(view.signals).get(jump.where[0], math.nan)
        return jump.baseline is not None and abs(now - jump.value) < abs(now - jump.baseline)

    def prepare(self, plan: Plan) -> None:
        """What a plan asks for beside the update itself."""
        if plan.lr is not None:
            self._lr.ceiling.limit(plan.lr, hold=plan.hold)
        if Action.RESTORE_MOMENTS in plan.actions and plan.to is not None:
            self._recovery.restore_moments(plan.to)
        self._recovery.restore_kept(plan.kept)
        if plan.rank is not None and self._copy_from is not None:
            self._copy_from(plan.rank, self._optimizer)
            self._recovery.forget()  # states in memory may be of the odd weights

    def report(self, plan: Plan, view: GradientView, diagnosis: Diagnosis, *, stepped: bool) -> Outcome:
        """What somebody else did about a plan; a batch that was not used leaves no trace in buffers."""
        if not stepped:
            self._buffers.put_back()
        self.runner.close()
        signals = view.signals
        return Outcome(
            step=signals.step, reading=signals.loss, stepped=stepped, plan=plan, diagnosis=diagnosis, signals=signals
        )

    def drop(self, step: int, diagnosis: Diagnosis, *, plan: Plan | None = None) -> Outcome:
        """Give up a group whose gradients cannot be had."""
        self._drop_gradients(overflow=False)
        self._buffers.put_back()
        self.runner.close()
        plan = replace(plan or Plan(actions=(Action.SKIP_STEP,)), reason=diagnosis.cause)
        return Outcome(step=step, reading=math.nan, stepped=False, plan=plan, diagnosis=diagnosis)

    def _drop_gradients(self, *, overflow: bool) -> None:
        self._precision.refuse(overflow=overflow)
        self._optimizer.zero_grad()

    def _take(self, plan: Plan, view: GradientView, diagnosis: Diagnosis, *, left_out: tuple[int, ...] = ()) -> Outcome:
        signals = view.signals
        clipped = self.clip_(view, limit=plan.norm)
        lr_mult = self._lr.lower(signals.lr)
        try:
            self._step(view)
        finally:
            self._lr.put_back()
        if self._lr.ceiling.low:
            self._lr.ceiling.updated(signals.lr)
        view.grads.clear()  # why: holding them would keep their memory from being freed
        bare_calls.zero_grad(self._optimizer)
        self.runner.close()
        return Outcome(
            step=signals.step,
            reading=signals.loss,
            # In observe() an overflow is left to the scaler, which skips by itself.
            stepped=not signals.scaled or math.isfinite(signals.grad_norm),
            plan=plan,
            diagnosis=diagnosis,
            signals=signals,
            left_out=left_out,
            clipped=clipped,
            lr_mult=lr_mult,
        )

    def _present(self, view: GradientView) -> tuple[RecordedUpdate, ...]:
        """The update at hand, to be made after those before it."""
        micro_batches, options = self.runner.micro_batches(), self._lr.options()
        mult = self._lr.ceiling.multiplier(view.signals.lr)
        used = self._lr.times(options, mult)
        return (RecordedUpdate(micro_batches, view.signals, used),) if micro_batches and used else ()

    def _apply_again(self, view: GradientView, done: RecordedUpdate) -> None:
        """An update that was undone, as it was taken then."""
        touch = done.micro_batches[-1].touch
        if touch is not None:
            touch()
        self.clip_(view, limit=done.norm, again=touch is not None)
        with self._lr.using(done.options):
            self._apply(view)
        view.grads.clear()
        bare_calls.zero_grad(self._optimizer)
        self.runner.close()

    def _undo(self) -> None:
        self._drop_gradients(overflow=False)
        self._buffers.put_back()
        self.runner.close()

    def _step(self, view: GradientView) -> None:
        probing = self._probing.due(view.signals.step)
        if probing:
            self._probing.before()
        self._apply(view)
        if probing:
            self._probing.after(view.signals.step)

    def _apply(self, view: GradientView) -> None:
        if view.grads:
            self._precision.step(self._optimizer)
        else:  # why: a scaler that has seen no gradient refuses to step, a plain loop does not
            self._precision.refuse(overflow=False)
            bare_calls.step(self._optimizer)

    def _compute_again(
        self, view: GradientView, measure_again: Callable[[Sequence[int]], GradientView]
    ) -> tuple[tuple[int, ...], GradientView]:
        views = [view]

        def finite(kept: Sequence[int]) -> bool:
            views.append(measure_again(kept))
            return views[-1].signals.all_finite

        bad = view.signals.bad_micro_batches
        kept = self.runner.compute_again(without=bad, finite=finite)
        return kept, views[-1]

    def clip_(self, view: GradientView, *, limit: float | None, again: bool = False) -> bool:
        """Hold the gradients down; `again` says that the loop has clipped them since they were measured."""
        norm = view.signals.grad_norm
        if again:  # what was measured no longer holds, and the host does not know what does
            bound = min(b for b in (limit, self._clip_norm, self._learned_limit(norm)) if b is not None)
            if bound < norm < math.inf:
                view.norms = measure(view.grads, view.layout)
                self._scale(view, max_norm=bound)
            return bound < norm
        if self._tensor_clip is not None and math.isfinite(norm):
            clipped = self._tensor_clip.clip_(view)
            if self._clip_norm is not None:  # what was measured no longer holds
                view.norms = measure(view.grads, view.layout)
                self._scale(view, max_norm=self._clip_norm)
            return clipped
        fixed = math.inf if self._clip_norm is None else self._clip_norm
        learned = self._learned_limit(norm)
        if limit is not None:
            learned = min(limit, learned)
        if learned < min(norm, fixed):
            multiply_(view.grads, view.layout, learned / norm)
        # A factor of exactly 1 changes nothing and is not applied. The margin covers that torch adds the norm up in its
        # own dtype; `not <` because in observe() a NaN norm must do what torch's clipping does with it.
        elif self._clip_norm is not None and (view.layout.half or not norm * _MARGIN + EPSILON < fixed):
            self._scale(view, max_norm=fixed)
        if self._clip_value is not None:
            clamp_(view.grads, view.layout, max_value=self._clip_value)
        return norm > min(learned, fixed)

    def _scale(self, view: GradientView, *, max_norm: float) -> None:
        """With torch's bits, which for sharded gradients costs the collective that torch's own clipping costs."""
        if self._sharded is None:
            scale_by_norm_(view.grads, view.layout, view.norms, max_norm=max_norm)
        else:
            clip_global_norm_(self._sharded(), max_norm=max_norm)

    def _learned_limit(self, norm: float) -> float:
        if self._clip_rule is None or not math.isfinite(norm):
            return math.inf
        limit = self._clip_rule.limit(norm)
        self._clip_rule.learn(norm)
        return limit
