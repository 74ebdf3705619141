"""One optimizer step: measure ─► judge ─► apply ─► record.

    closure/loss ─► backward ─► MEASURE ─► NOTICE ─► EXPLAIN ─► DECIDE ─► ACT ─► RECORD
                                measure     └────── judge ──────┘       apply   record

The only orchestrator. `Guard.step` runs it whole (`step`); `Guard.inspect` and `commit` leave `apply` to the loop;
`watch` splits it around a step of torch's own. Nothing is changed before the decision except gradients and the buffers
that the forward pass writes by itself, and those are put back when the step is refused: docs/adr/0001.
"""

import math
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, final

from torch import Tensor

from steadystep._utils.text import warn
from steadystep.actions import REFUSALS
from steadystep.diagnosis import not_repeatable
from steadystep.engine.closures import Closure
from steadystep.engine.judge import Judge
from steadystep.engine.parts import Parts
from steadystep.engine.verdict import Needs, Verdict, settle
from steadystep.errors import MisuseError
from steadystep.records import Action, Outcome, Plan
from steadystep.signals import Metrics
from steadystep.signals.gradients import GradientView
from steadystep.tracking import GradientSample


@final
class Pipeline:
    """Knows all stages of one guard, and nothing of how a loop calls it."""

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        self.progress = parts.progress
        self.metrics: dict[str, float | Tensor] = {}
        """Given for the step at hand."""
        self.staged: list[Future[Any]] = []  # copies of the weights that are being taken elsewhere
        self._inspected: tuple[GradientView, Verdict] | None = None
        self._runner, self._group = parts.runner, parts.runner.group
        self._measurer, self._probes = parts.measurer, parts.probes
        self._judge, self._edits, self._counterfactuals = parts.judge, parts.edits, parts.counterfactuals
        self._lr, self._updater, self._rollback = parts.learning_rate, parts.updater, parts.rollback
        self._budget, self._recovery, self._tracer = parts.budget, parts.recovery, parts.nan_tracer
        self._history, self._log, self._ranks = parts.run_history, parts.log, parts.ranks
        self._run_state, self._data = parts.run_state, parts.run_state.data
        self._checksums, self._twice, self._flips = parts.checksums, parts.recomputation, parts.recomputation.flips
        self._samples = parts.gradient_samples if parts.log.wants_samples else None

    def collect(self, work: Closure | Tensor, batch: Any, weight: float | None, metrics: Metrics) -> Outcome:
        """Run one micro-batch; with the last of its group, the step."""
        try:
            return self._collect(work, batch, weight, metrics)
        except Exception as error:
            outcome = self.parts.closure_errors.outcome(error, step=self.progress.attempts)
            if outcome is not None:
                return self.record(outcome)
            raise

    def _collect(self, work: Closure | Tensor, batch: Any, weight: float | None, metrics: Metrics) -> Outcome:
        progress = self.progress
        with self._runner:
            self.metrics.update(metrics)
            if not isinstance(work, Tensor) and not self._group.members:
                if self._checksums.armed:
                    self._checksums.verify(everything=self._recovery.due is not None)
                if self._recovery.due is not None:
                    self._recovery.begin(step=progress.attempts, updates=progress.updates)
            step, every = progress.attempts, self._probes.every
            if self._twice.every:
                self._twice.note(work, batch, step)
            if (step < every or step % every == 0) and self._probes.due(step):
                with self._probes.watching(batch, step):
                    member = self._runner.add(work, batch=batch, weight=weight)
            else:
                member = self._runner.add(work, batch=batch, weight=weight)
            if len(self._group.members) < self._group.size:
                return Outcome(step=progress.attempts, reading=member.loss, stepped=False, pending=True)
            return self.step()

    def step(self) -> Outcome:
        """Decide about the group at hand, and do it."""
        progress = self.progress
        if self.staged:  # why so early: weights are also exchanged for a moment to judge a step
            self.staged = list(wait(self.staged).not_done)
        if self._lr.scheduled:
            self._lr.place(progress.updates)
        if self._group.stale and not self._runner.reruns.refresh():
            given = any(member.batch is not None for member in self._group.members)
            return self.record(self._updater.drop(progress.attempts, not_repeatable(given=given)))
        measure = partial(self.measure, range(len(self._group.members)))
        view = self._twice.measured(measure) if self._twice.every else measure()
        self._history.loop.renewed += self._runner.began_clear
        if view.signals.bit_flips:
            view = self._recomputed(view)
        if self._samples is not None and self._samples.due(view.signals.step):
            taken = self._samples.take(view.names, view.grads)
            self._log.sampled(GradientSample(step=view.signals.step, values=taken))
        verdict = self.judge(view)
        return self.record(self.apply(view, self._twice.ended(verdict) if verdict.signals.miscomputations else verdict))

    def measure(self, kept: Sequence[int], *, finished: bool = False) -> GradientView:
        """The gradients of these micro-batches of the group, as all ranks see them; `finished` if they are means."""
        if not finished:
            self._runner.finish(kept)
        members = [self._group.members[i] for i in kept]
        losses, weights = [member.loss for member in members], [member.weight for member in members]
        view = self.measure_losses(
            losses,
            weights,
            scale=self.parts.precision.scale(losses[0].device) if self.parts.precision.scales else None,
            metrics=self.metrics,
            batches=[member.batch for member in members if member.batch is not None],
            repeatable=self._group.repeatable,
        )
        again = self._ranks.size > 1 and self._runner.in_parts(kept, step=self.progress.attempts)
        return self.measure(kept) if again else view

    def measure_losses(
        self,
        losses: list[Tensor],
        weights: list[float] | None = None,
        *,
        refused_in_a_row: int | None = None,
        **more: Any,
    ) -> GradientView:
        """The gradients as they stand, for losses that were computed elsewhere; `more` as for `Measurer.measure`."""
        if self._checksums.armed:
            self._measurer.riders = [*self._checksums.compare(), *self._measurer.riders]
        view = self._measurer.measure(
            step=self.progress.attempts,
            losses=losses,
            weights=[1.0] * len(losses) if weights is None else weights,
            refused_in_a_row=self._budget.refused_in_a_row if refused_in_a_row is None else refused_in_a_row,
            **more,
        )
        if self._checksums.armed and (flips := self._checksums.found(self._measurer.ridden)):
            view = replace(view, signals=replace(view.signals, bit_flips=flips))
        return view if self._ranks.size == 1 else self._measurer.weighed(self._flips.agree(view))

    def _recomputed(self, view: GradientView) -> GradientView:
        """The gradients of the group at hand with the bits in place that were flipped while it was computed."""
        flips = view.signals.bit_flips
        spoiled = all(flip.repaired for flip in flips) and any(flip.used for flip in flips)
        if not spoiled or not self._runner.reruns.repeat(self._updater.undo):
            return view
        fresh = self.measure(range(len(self._group.members)))
        unused = tuple(replace(flip, used=False) for flip in flips)
        return replace(fresh, signals=replace(fresh.signals, bit_flips=unused))

    def judge(
        self, view: GradientView, judge: Judge | None = None, *, careful: bool = False, clipped: bool = False
    ) -> Verdict:
        """What is to be done about it; further measurements are made as the judge asks for them."""
        judge = self._judge if judge is None else judge
        if self._edits.suspected:
            self._edits.count()
        if self._edits.edition != judge.edition:  # other weights: there is nothing to roll back to
            self._recovery.forget()
            judge.start_again(self._edits.edition)
            self._history.start_again()
        verdict = judge.judge(
            view.signals,
            updates=self.progress.updates,
            ceiling=self._lr.ceiling.lr,
            careful=careful,
            clipped=clipped,
        )
        if isinstance(verdict, Needs):
            return settle(verdict, lambda ask: self._counterfactuals.measure(ask, view))
        return verdict

    def apply(self, view: GradientView, verdict: Verdict) -> Outcome:
        """Do what the plan says, remember how it could be replayed, and write down where a refused step went wrong."""
        if verdict.signals is not view.signals:
            view = replace(view, signals=verdict.signals)
        plan, diagnosis = verdict.plan, verdict.diagnosis
        case = self._tracer.open(plan, view, updates=self.progress.updates) if plan.actions else None
        remembered = self._runner.micro_batches() if self._recovery.remembers and self._runner.at_hand else ()
        # before the update: some optimizers set their own rate in it
        options = self._lr.options() if remembered else ()
        if not plan.actions:
            outcome = self._updater.take(plan, view, diagnosis)
        elif Action.ROLLBACK in plan.actions:
            outcome = self._rollback.carry_out(plan, view, diagnosis, measure=self.measure)
        else:
            outcome = self._rollback.refused(self._intervene(view, verdict), self._data.place)
        if remembered and outcome.stepped and not outcome.left_out:
            used = options if outcome.lr_mult == 1.0 else self._lr.times(options, outcome.lr_mult)
            self._recovery.remember(remembered, outcome, self.progress.updates + 1, used, self._data.place)
        return outcome if case is None else self._tracer.close(outcome, case)

    def _intervene(self, view: GradientView, verdict: Verdict) -> Outcome:
        """Another update than the one that was asked for, or none."""
        updater, plan, diagnosis = self._updater, verdict.plan, verdict.diagnosis
        updater.prepare(plan)
        if REFUSALS.isdisjoint(plan.actions):
            return updater.take(plan, view, diagnosis)
        overflow = Action.BACK_OFF_SCALE in plan.actions
        if Action.LEAVE_OUT in plan.actions:
            kept, fresh = self._runner.reruns.without_bad(view, self.measure)
            if kept:
                left = tuple(i for i in range(len(view.signals.losses)) if i not in kept)
                return updater.take(plan, fresh, diagnosis, left_out=left)
            overflow = fresh.signals.scaled and math.isfinite(fresh.signals.loss)
        return updater.refuse(plan, view, diagnosis, overflow=overflow)

    def record(self, outcome: Outcome) -> Outcome:
        """One attempt is over: it goes into the history, among the remembered states and into the log."""
        if outcome.pending:  # its closure raised, and the group goes on without it
            self._log.record(outcome)
            return outcome
        progress, signals = self.progress, outcome.signals
        progress.attempts += 1
        progress.updates = progress.updates + outcome.stepped if outcome.restored is None else outcome.restored
        self._data.is_used = self._data.open
        self.metrics = {}
        if self._edits.suspected:
            self._edits.forget()  # why: what a rollback has put back is no edit of the loop's
        self._budget.count(outcome)
        if signals is not None:
            self._history.opposed = self._judge.turns.are_taken
            self._history.note(signals, outcome.diagnosis, stepped=outcome.stepped, plan=outcome.plan)
        episode = self._budget.episode
        self._recovery.after(
            outcome,
            updates=progress.updates,
            # why not while weights are compared: a new state could take the place of the one that is being tried
            calm=self._judge.trial.finding is None and episode.calm(outcome.step),
            suspected_since=episode.suspected_since(outcome.step),
            at_once=self._runner.given_losses,
        )
        if self._checksums.armed or outcome.step % self._checksums.every == self._checksums.at:
            self._checksums.renew(outcome.step)
        if self._tracer.keeps_history:
            self._tracer.note(outcome)
        self._log.record(outcome)
        if (believed := self._history.volunteers(outcome.step)) is not None:
            self._log.volunteered(outcome.step, believed)
        if Action.STOP in outcome.plan.actions and not outcome.stepped:
            raise self._budget.halt(outcome)
        if self._runner.given_losses:  # the next forward pass is over before we are called
            self._probes.expect(progress.attempts)
            if not self._data.open:
                self.between()
        return outcome

    def inspect(self, loss: Tensor) -> Plan:
        """Measure and judge gradients that a loop computed; it applies the plan itself, and says so with `commit`."""
        with self._runner:
            self._lr.place(self.progress.updates)
            view = self.measure_losses([loss], refused_in_a_row=0)  # why: nothing is run again here to look closer
            verdict = self.judge(view, careful=True)
            self._inspected = replace(view, signals=verdict.signals), verdict
            return verdict.plan

    def commit(self, *, stepped: bool) -> Outcome:
        """Record what the loop did about the plan of `inspect`."""
        if self._inspected is None:
            raise MisuseError("commit() without inspect(): call guard.inspect(loss) first")
        (view, verdict), self._inspected = self._inspected, None
        return self.record(self._updater.report(verdict.plan, view, verdict.diagnosis, stepped=stepped))

    def between(self) -> None:
        """No step is under way: a checkpoint may be written."""
        if self._run_state.checkpoints is not None and not self._group.members:
            self._run_state.between(self.progress.attempts, self.progress.updates)

    def validated(self, loss: float, metrics: Mapping[str, float]) -> None:
        """A validation is over: schedules, the best weights and the log hear of the mean over all ranks."""
        loss = self._ranks.validation(loss)
        self._lr.validated(loss)
        self._run_state.validated(loss)
        self._log.validated(self.progress.attempts, {"val_loss": loss, **metrics})

    def save(self, folder: Path | None) -> Path:
        """Write a checkpoint between two steps, and wait for it."""
        if self._group.members:
            raise MisuseError("save() inside a group of micro-batches: call flush() first, or save after the group")
        return self._run_state.save(folder, self.progress.attempts, self.progress.updates)

    def restore_best(self) -> bool:
        """Put the weights of the best validation back; states in memory are of others."""
        self._recovery.forget()
        return self._run_state.restore_best(self.progress.attempts, self.progress.updates)

    def close(self, *, save: bool) -> None:
        """Save the last state, write the last lines, and let go of files, hooks and memory."""
        if dropped := self._runner.reset():
            warn(f"closed with {dropped} micro-batches of an incomplete group, which are dropped: call flush() first")
        try:
            self._run_state.close(self.progress.attempts, self.progress.updates, save=save and not dropped)
        finally:  # it passes a signal on that came during the last step
            self.parts.close()
