"""Rolls a run back: restores an older state, replays the updates since, and gives the learning rate back.

The batch at hand is dropped with everything since that cannot be replayed. Where no state in memory can be used, the
newest finite checkpoint of this run is.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import final

from steadystep import state
from steadystep.actions import Updater
from steadystep.checkpoints.checkpoint import Checkpoint
from steadystep.checkpoints.checkpointing import Checkpointing
from steadystep.checkpoints.loop_state import LoopState
from steadystep.diagnosis.causes import Cause
from steadystep.diagnosis.explain import advised, as_warning, of_data
from steadystep.diagnosis.facts import Setup
from steadystep.engine.learning_rate import LearningRate
from steadystep.engine.replay import MeasureGroup, Replayed, Replayer
from steadystep.errors import SteadystepError
from steadystep.records import Action, DetectorName, Diagnosis, Outcome, Plan, Quarantined
from steadystep.signals import Measurer
from steadystep.signals.gradients import GradientView, Probing
from steadystep.snapshots.buffers import Buffers
from steadystep.snapshots.recovery import Recovery
from steadystep.snapshots.replay_buffer import RecordedUpdate

_OF_THE_BATCH = (
    Cause.BAD_BATCH,
    Cause.EXPLODING_GRADIENT,
    Cause.FORWARD_OVERFLOW,
    Cause.NON_FINITE_GRADIENT,
    Cause.NON_FINITE_INPUT,
    Cause.NON_FINITE_LOSS,
)
_ABOUT = 8  # steps: how well the beginning of a lasting trouble is known


@final
@dataclass(slots=True)
class RunProgress:
    """How far a run is."""

    attempts: int = 0
    """Optimizer steps tried, refused ones included."""
    updates: int = 0
    """Contained in the weights: the position of the schedule."""
    examined: tuple[int, tuple[Diagnosis, ...]] = (0, ())
    """What the last examination found, and at how many attempts."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Rollback:
    """Carries out a plan that asks for one."""

    progress: RunProgress
    updater: Updater
    learning_rate: LearningRate
    recovery: Recovery
    replayer: Replayer
    measurer: Measurer
    buffers: Buffers
    probing: Probing
    checkpoints: "Checkpoints"
    rewarm_steps: int
    setup: Setup
    replay: bool
    """The loop gives the same batches again, so random numbers are rolled back with the weights."""

    def carry_out(
        self, plan: Plan, view: GradientView, diagnosis: Diagnosis, *, measure: MeasureGroup | None = None
    ) -> Outcome:
        """Restore, replay, report. `measure` measures the micro-batches of the group at hand."""
        if plan.to is None:
            return self._from_checkpoint(plan, view, diagnosis)
        present = self._present(view) if plan.until is not None and measure is not None else ()
        if plan.or_nothing and not (present and self._keeps_present(plan.to, view)):
            return self.updater.take(Plan(), view, diagnosis)
        self.updater.drop_gradients(overflow=False)
        view.grads.clear()
        schedules, options = self.recovery.schedules(), self.learning_rate.options()
        restored = self.recovery.roll_back(plan.to, replay=self.replay)
        old_options = self.learning_rate.options()
        self.updater.runner.close()
        self.probing.cancel()
        replayed, jumped = Replayed([], healed=False, exact=False), False
        missed: tuple[RecordedUpdate, ...] = ()
        if plan.until is not None and measure is not None:
            missed = self._missed(restored, len(options))
            try:
                replayed, jumped = self._replay_updates(plan, missed, present, view, diagnosis, measure)
            except BaseException:
                self._give_up(plan.to, restored)
                raise
        if plan.or_nothing and measure and not (replayed.healed and len(replayed.updates) > len(missed) > 0):
            return self._as_before(present, view, diagnosis, measure)
        if replayed.quarantined:
            diagnosis = of_data(diagnosis, len(replayed.quarantined))
        made, quarantined = replayed.updates, quarantine(replayed.quarantined, diagnosis.cause)
        whole = 0 < len(missed) <= len(made) + len(replayed.quarantined)
        if whole:  # why: schedule and options are those of the last of these updates
            schedules()
            self.learning_rate.put(options, in_place_of=old_options)
        self.recovery.replayed(restored, made)
        innocent = (plan.outside and not jumped) or bool(quarantined)
        plan = as_carried_out(plan, whole=whole, some=bool(made), innocent=innocent, skips=bool(quarantined))
        self.updater.prepare(plan)
        outcome = self._restored(plan, view, diagnosis, updates=restored + len(made))
        exact = bool(made) and replayed.exact and not self.recovery.leaves_behind
        return replace(outcome, replayed=len(made), exact=exact, quarantined=quarantined)

    @staticmethod
    def refused(outcome: Outcome, place: tuple[int, int] | None) -> Outcome:
        """A step that was refused for its batch, whose place in the data this is, is in quarantine from now on."""
        if (
            outcome.stepped
            or Action.SKIP_STEP not in outcome.plan.actions
            or outcome.diagnosis.cause not in _OF_THE_BATCH
        ):
            return outcome
        epoch, last = place or (None, -1)
        numbers = tuple(range(last + 1)[-len(outcome.signals.losses or (0,)) :]) if outcome.signals is not None else ()
        entry = Quarantined(step=outcome.step, cause=outcome.diagnosis.cause, epoch=epoch, batches=numbers)
        return replace(outcome, quarantined=(entry,))

    def _restored(self, plan: Plan, view: GradientView, diagnosis: Diagnosis, *, updates: int) -> Outcome:
        if Action.REWARM in plan.actions:
            steps = self.rewarm_steps if plan.hold is None else min(plan.hold, self.rewarm_steps)
            self.learning_rate.ceiling.rewarm(steps)
        diagnosis = advised(diagnosis, view.signals, plan, self.setup)  # why again: it shows only now what was replayed
        return Outcome.of(plan, view.signals, diagnosis, stepped=False, restored=updates)

    def _from_checkpoint(self, plan: Plan, view: GradientView, diagnosis: Diagnosis) -> Outcome:
        """No state in memory can be used: the newest checkpoint that is finite, or an end."""
        self.updater.drop_gradients(overflow=False)
        view.grads.clear()
        self.buffers.put_back()
        found = self.checkpoints.restore()
        self.updater.runner.close()
        self.probing.cancel()
        if found is None:
            plan = Plan(actions=(Action.SKIP_STEP, Action.STOP), reason=plan.reason)
            diagnosis = advised(diagnosis, view.signals, plan, self.setup)
            return self.updater.report(plan, view, diagnosis, stepped=False)
        plan = replace(plan, to=found.step)
        self.updater.prepare(plan)
        return self._restored(plan, view, diagnosis, updates=found.updates)

    def _keeps_present(self, to: int, view: GradientView) -> bool:
        """Remember the state before this step, beside that of `to`."""
        with self.buffers.untouched():
            self.buffers.put_back()
            step, lr = view.signals.step - 1, view.signals.lr * self.recovery.lr_mult
            return self.recovery.keep_present(step=step, updates=self.progress.updates, lr=lr, to=to)

    def _as_before(
        self, present: Sequence[RecordedUpdate], view: GradientView, diagnosis: Diagnosis, measure: MeasureGroup
    ) -> Outcome:
        """Undo the rollback and make the update at hand: replaying has led to nothing better."""
        self.updater.undo()
        self.recovery.come_back(view.signals.step - 1)
        made = self.replayer.replay(present, measure, first_sign=view.signals.step, outside=True).updates
        mult, told = self.learning_rate.ceiling.multiplier(view.signals.lr), as_warning(diagnosis)
        return Outcome.of(Plan(), view.signals, told, stepped=bool(made), lr_mult=mult)

    def _present(self, view: GradientView) -> tuple[RecordedUpdate, ...]:
        """The update at hand, to be made after those before it."""
        micro_batches, rate = self.updater.runner.micro_batches(), self.learning_rate
        used = rate.times(rate.options(), rate.ceiling.multiplier(view.signals.lr))
        return (RecordedUpdate(micro_batches, view.signals, used),) if micro_batches and used else ()

    def _replay_updates(
        self,
        plan: Plan,
        missed: Sequence[RecordedUpdate],
        present: Sequence[RecordedUpdate],
        view: GradientView,
        diagnosis: Diagnosis,
        measure: MeasureGroup,
    ) -> tuple[Replayed, bool]:
        """Those of `missed` that go well this time, from the first on, and then the one at hand.

        And whether they led to where the weights had jumped to: then it was the updates after all.
        """
        assert plan.to is not None
        assert plan.until is not None
        if not missed:
            return Replayed([], healed=False, exact=False), False
        wanted, sign = [*missed, *present], plan.until
        made = self.replayer.replay(wanted, measure, first_sign=sign, outside=plan.outside, slack=_ABOUT)
        if not plan.outside and not made.healed and any(done.signals.step >= sign for done in made.updates):
            self._restore_again(plan.to)  # it was the updates: those from the first sign on are not wanted
            made = self.replayer.replay(missed, measure, first_sign=sign)
            made = self._sorted_out(made, wanted, measure, plan, diagnosis)
        jumped = plan.outside and bool(made.updates) and not made.healed and self._jumped_again(view, diagnosis)
        if jumped:
            self._restore_again(plan.to)
            made = self.replayer.replay(missed, measure, first_sign=sign)
        if made.updates and plan.only_whole and len(made.updates) < len(missed):
            self._restore_again(plan.to)
            made = replace(made, updates=[])
        return made, jumped

    def _sorted_out(
        self,
        made: Replayed,
        wanted: Sequence[RecordedUpdate],
        measure: MeasureGroup,
        plan: Plan,
        diagnosis: Diagnosis,
    ) -> Replayed:
        """It was the updates; where their batches are unusual, those alone stay out."""
        rest = wanted[len(made.updates) :]
        if not made.updates or not rest or plan.only_whole or Action.SKIP_BATCHES not in plan.actions:
            return made
        more, unusual = self.replayer.sort_out(rest, made.updates, measure, known=_repetitions(diagnosis))
        return replace(made, updates=[*made.updates, *more], quarantined=tuple(unusual))

    def _missed(self, restored: int, groups: int) -> tuple[RecordedUpdate, ...]:
        missed = self.recovery.missed(restored)
        return missed if all(len(done.options) == groups for done in missed) else ()  # a group was added

    def _give_up(self, step: int, restored: int) -> None:
        self._restore_again(step)
        self.recovery.replayed(restored, ())
        self.progress.updates = restored

    def _restore_again(self, step: int) -> None:
        self.updater.undo()
        self.recovery.roll_back(step, replay=self.replay)
        self.updater.runner.close()

    def _jumped_again(self, view: GradientView, diagnosis: Diagnosis) -> bool:
        """The weights are again where they had jumped to: it was the updates after all."""
        jump = next((f for f in diagnosis.findings if f.detector == DetectorName.WEIGHT_JUMP), None)
        if jump is None or not jump.where:
            return False
        now = self.measurer.weights(view.signals).get(jump.where[0], math.nan)
        return jump.baseline is not None and abs(now - jump.value) < abs(now - jump.baseline)


def _repetitions(diagnosis: Diagnosis) -> range:
    """Steps whose batch was that of the step before."""
    found = next((f for f in diagnosis.findings if f.detector == DetectorName.SAME_BATCH and f.severity == "act"), None)
    return range(0) if found is None or found.since is None else range(found.since + 1, found.since + int(found.value))


def quarantine(left_out: Sequence[RecordedUpdate], cause: str) -> tuple[Quarantined, ...]:
    """Which batches these updates were computed from."""
    return tuple(
        Quarantined(step=done.signals.step, cause=cause, epoch=done.epoch, batches=done.places) for done in left_out
    )


def as_carried_out(plan: Plan, *, whole: bool, some: bool, innocent: bool, skips: bool = False) -> Plan:
    """What became of a plan to replay: with all updates replayed there is nothing to recover from.

    And where no update did the damage (`innocent`), the learning rate had no part in it. `skips` says that the batches
    that did it stay out.
    """
    if whole:
        skipped = (Action.SKIP_BATCHES,) if skips else ()
        return replace(plan, actions=(Action.ROLLBACK, Action.REPLAY, *skipped), lr=None, hold=None)
    undone = {Action.REPLAY} if not some else set()
    undone |= {Action.CUT_LR, Action.REWARM} if innocent else set()
    actions = tuple(action for action in plan.actions if action not in undone)
    return replace(plan, actions=actions, until=plan.until if some else None, lr=None if innocent else plan.lr)


@final
@dataclass(frozen=True, slots=True)
class Checkpoints:
    """Those of this run, as a place to roll back to.

    Weights, buffers, optimizer, kept objects and the guard's own parts are restored. The place in the data, the random
    numbers and a learning rate that no kept scheduler sets stay where they are.
    """

    checkpointing: Checkpointing | None
    loop: LoopState
    parts: Mapping[str, state.Stateful]
    recovery: Recovery

    def restore(self) -> Checkpoint | None:
        """Restore the newest finite one; None without one. In a distributed run all ranks call it."""
        found = None if self.checkpointing is None else self.checkpointing.newest_of_this_run()
        if found is None:
            return None
        try:
            self.loop.roll_back(found.state)
        except SteadystepError:  # it does not fit: nothing was changed
            return None
        state.load(self.parts, found.state["guard"])
        self.recovery.forget()
        return found
