"""What a rollback needs: states in memory and the updates since, kept up to date and put back together."""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import final

from steadystep import state
from steadystep.parallel import Ranks, SingleProcess
from steadystep.records import WEIGHTS_EVERY, Outcome
from steadystep.snapshots import Snapshot, Snapshots
from steadystep.snapshots.no_recovery import NoRecovery, Options
from steadystep.snapshots.replay_buffer import RecordedMicroBatch, RecordedUpdate, Repeatable, ReplayBuffer
from steadystep.state import KeptObject

_SPARE = 4  # steps until damage shows
_DOUBT = 64  # steps: a loss that stays high is looked at for so long before anything is restored


@final
class InMemory:
    """Snapshots of weights, buffers, optimizer, kept objects and the guard's own parts; and the updates since."""

    def __init__(
        self,
        snapshots: Snapshots,
        parts: Mapping[str, state.Stateful],
        *,
        replay_buffer: ReplayBuffer | None = None,
        trust_steps: int = 20,
        ranks: Ranks | None = None,
    ) -> None:
        self._snapshots = snapshots
        self._ranks = ranks or SingleProcess()
        self._drop_on_all = self._ranks.on_all(self._drop)
        self._replay_buffer = replay_buffer or ReplayBuffer(max_bytes=0)
        self._trust_steps = trust_steps
        self._reach = trust_steps + 2 * WEIGHTS_EVERY + _SPARE + _DOUBT
        self._parts = dict(parts)
        self.due: float | None = math.inf
        """A snapshot is to be taken; the learning rate it belongs to."""
        self._suspected_since: int | None = None
        self._largest_lr = 0.0
        self._updates = 0
        """Contained in the weights."""
        self.lr_mult = 1.0
        """What the last update's learning rate was multiplied by: states remember the one in use."""

    @property
    def states(self) -> Sequence[Snapshot]:
        """What a rollback could restore, oldest first."""
        return self._snapshots.states

    def finite_states(self) -> list[Snapshot]:
        """Those without NaN and infinity. Looks at all of them: only in trouble."""
        return self._snapshots.finite()

    def weights_of(self, snapshot: Snapshot) -> AbstractContextManager[None]:
        """Inside it the model has the weights of that state."""
        return self._snapshots.weights_of(snapshot)

    def keep(self, name: str, thing: KeptObject, update: Callable[[], object] | None = None) -> None:
        """Let `thing` be rolled back together with the weights; `update` is what the loop does to it after each step.

        States from before do not know it.
        """
        self._snapshots.keep(name, thing, update)
        self.outdate()

    def pin(self, step: int) -> None:
        """Keep the state of `step` until another one is pinned."""
        self._snapshots.pinned = step

    def follow(self) -> None:
        """An update was replayed: kept objects that came with an `update` follow the weights."""
        self._snapshots.follow()

    @property
    def leaves_behind(self) -> bool:
        """Something that a rank keeps holds tensors, and stays where it was while updates are replayed."""
        return not self._ranks.all(not self._snapshots.leaves_behind)

    def take_along(self, parts: Mapping[str, state.Stateful]) -> None:
        """Let these parts of the guard be rolled back too; before the first state is kept."""
        self._parts |= parts

    def begin(self, *, step: int, updates: int) -> None:
        """Between two steps, when the loop has done with the last one (averaged weights, stepped a scheduler)."""
        if self.due is not None:
            self._take(step - 1, updates, self.due)

    def after(
        self, outcome: Outcome, *, updates: int, calm: bool, suspected_since: int | None, at_once: bool = False
    ) -> None:
        """An attempt is over: plan another snapshot when it is time.

        `calm` says that no trouble is under way, `suspected_since` that one may be, `at_once` that the next forward
        pass will be over before `begin` is called.
        """
        signals, self._updates = outcome.signals, updates
        # why earlier: what is worth keeping is a state that was trusted by then
        self._suspected_since = None if suspected_since is None else suspected_since - self._trust_steps + 1
        if not outcome.stepped or signals is None:
            return
        self.lr_mult = outcome.lr_mult
        lr = signals.lr * outcome.lr_mult
        self._largest_lr = max(self._largest_lr, lr)
        if calm and outcome.step >= self._snapshots.next_step and self._snapshots.due(outcome.step):
            self.due = lr
            if at_once:
                self._take(outcome.step, updates, lr)

    @property
    def remembers(self) -> bool:
        """Whether `remember` makes use of what it is given: until batches have proved too large."""
        return self._replay_buffer.open

    def remember(
        self,
        micro_batches: Sequence[RecordedMicroBatch],
        outcome: Outcome,
        updates: int,
        options: Options,
        place: tuple[int, int] | None = None,
    ) -> None:
        """An update was taken that could be replayed, with these options of the parameter groups in use."""
        if outcome.signals is not None and options:
            done = RecordedUpdate(tuple(micro_batches), outcome.signals, options, outcome.plan.norm, updates, place)
            self._replay_buffer.add(done)

    def remembered(self, most: int) -> list[Repeatable]:
        """The last micro-batches, at most so many, whose closures get them as `batch=`."""
        return self._replay_buffer.newest(most)

    def schedules(self) -> Callable[[], None]:
        """To be called after a rollback: puts kept schedulers, and their learning rates, where they are now."""
        return self._snapshots.schedules()

    def missed(self, updates: int) -> tuple[RecordedUpdate, ...]:
        """The updates after the first `updates`, if all of them are remembered, on every rank."""
        found = self._replay_buffer.since(updates, until=self._updates)
        return found if self._ranks.same([len(done.micro_batches) for done in found]) else ()

    def replayed(self, restored: int, made: Sequence[RecordedUpdate]) -> None:
        """After a rollback to so many updates: those that were replayed, as they went this time; the rest is gone."""
        self._snapshots.settle()
        self._replay_buffer.keep_until(restored)
        for number, done in enumerate(made, start=restored + 1):
            self._replay_buffer.add(replace(done, updates=number))

    def is_as_it_was(self, updates: int) -> bool:
        """Whether everything is as in a state of so many updates that the rollback passed over; True without one."""
        return self._snapshots.is_as_it_was(updates)

    def roll_back(self, step: int, *, replay: bool) -> int:
        """Restore everything of the state of `step` together; returns the number of updates it contains."""
        snapshot = self._snapshots.roll_back(step, replay=replay)
        state.load(self._parts, snapshot.parts)
        self.due = None
        return snapshot.updates

    def keep_present(self, *, step: int, updates: int, lr: float, to: int) -> bool:
        """Take a snapshot to `come_back` to, not in the place of that of `to`; False where they are not both kept."""
        self._suspected_since = to + 1
        self._take(step, updates, lr)
        kept = [state.step for state in self.states]
        return to in kept and kept[-1] == step

    def come_back(self, step: int) -> None:
        """Undo a rollback: everything is as it was when `keep_present` was called."""
        state.load(self._parts, self._snapshots.come_back(step).parts)

    def restore_moments(self, step: int) -> None:
        """Restore the optimizer's state of `step`; weights stay."""
        self._snapshots.moments_back(step)

    def restore_kept(self, tensors: Sequence[str]) -> None:
        """Restore the kept objects that these tensors belong to, from the newest states in which they are well."""
        self._snapshots.restore_kept(tensors)

    def forget(self) -> None:
        """Drop what is remembered: somebody else replaced the weights. Called by every rank."""
        self._replay_buffer.clear()
        self._drop()

    def outdate(self) -> None:
        """The states no longer fit, which one rank may know alone: all drop theirs when they agree next."""
        # all ranks hold states of the same steps, so a rank without any has nobody to tell
        if self._snapshots.states:
            self._drop_on_all()

    def _drop(self) -> None:
        self._snapshots.forget()
        self.due = math.inf

    def _take(self, step: int, updates: int, lr: float) -> None:
        self._snapshots.take(
            step=step,
            updates=updates,
            lr=lr,
            parts=state.save(self._parts),
            largest_lr=self._largest_lr,
            suspected_since=self._suspected_since,
        )
        self.due = None
        old = [state.updates for state in self._snapshots.states if state.step <= step - self._reach]
        self._replay_buffer.forget_until(max(old, default=0))


Recovery = InMemory | NoRecovery
