"""Going back: what is remembered, whether going back would help, and restoring everything a loop owns together."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol, final

from steadystep import state
from steadystep.engine.closures import RecordedMicroBatch
from steadystep.engine.microbatches import MicroBatchRunner
from steadystep.parallel import Ranks, SingleProcess
from steadystep.records import WEIGHTS_EVERY, Counterfactual, Outcome, Signals
from steadystep.snapshots.replay_buffer import RecordedUpdate, ReplayBuffer
from steadystep.snapshots.snapshots import KeptObject, Snapshot, Snapshots

Options = tuple[Mapping[str, Any], ...]
"""The numbers of each parameter group."""

_SAME = 1e-3  # of a loss: the same batch under the same weights, at any precision
_SPARE = 4  # steps until damage shows
_DOUBT = 64  # steps: a loss that stays high is looked at for so long before anything is restored
_PLANNED = 1.1  # times the learning rate of a state: with that much more by plan, the loss is meant to be higher


class Recovery(Protocol):
    """What the guard needs of it."""

    @property
    def states(self) -> Sequence[Snapshot]:
        """What one could go back to, oldest first."""
        ...

    def finite_states(self) -> list[Snapshot]:
        """Those without NaN and infinity. Looks at all of them: only in trouble."""
        ...

    def keep(self, name: str, thing: KeptObject, update: Callable[[], object] | None = None) -> None:
        """Let `thing` go back together with the weights; `update` is what the loop does to it after each step."""
        ...

    def follow(self) -> None:
        """An update was made again: what follows the weights is updated as well."""
        ...

    @property
    def leaves_behind(self) -> bool:
        """Something that is kept holds tensors, and stays where it was while updates are made again."""
        ...

    def take_along(self, parts: Mapping[str, state.Stateful]) -> None:
        """Let these parts of the guard go back too; before the first state is kept."""
        ...

    def begin(self, *, step: int, updates: int) -> None:
        """Called before the forward pass of `step`, when that is known."""
        ...

    def after(self, outcome: Outcome, *, updates: int, calm: bool, suspected_since: int | None) -> None:
        """Called after each attempt; `calm` says that no trouble is under way, `suspected_since` that one may be."""
        ...

    @property
    def remembers(self) -> bool:
        """Whether `remember` makes use of what it is given."""
        ...

    def remember(
        self, micro_batches: Sequence[RecordedMicroBatch], outcome: Outcome, *, updates: int, options: Options
    ) -> None:
        """An update was taken that could be made again, with these options of the parameter groups in use."""
        ...

    def schedules(self) -> Callable[[], None]:
        """To be called after a rollback: puts kept schedulers, and their learning rates, where they are now."""
        ...

    def missed(self, updates: int) -> tuple[RecordedUpdate, ...]:
        """The updates after the first `updates`, if all of them are remembered."""
        ...

    def replayed(self, restored: int, made: Sequence[RecordedUpdate]) -> None:
        """After a rollback to so many updates: those that were made again since, as they went this time."""
        ...

    def is_as_it_was(self, updates: int) -> bool:
        """While updates are made again: whether everything is as in the state of so many updates; True without one."""
        ...

    def comparable(self, signals: Signals, states: Sequence[Snapshot]) -> list[Snapshot]:
        """Those of `states` that the loss under the present learning rate may be compared with."""
        ...

    def testify(self, signals: Signals, states: Sequence[Snapshot]) -> Counterfactual | None:
        """How the present batch does under `states`, the newest that does better; None when that cannot be told."""
        ...

    def compare(self, snapshot: Snapshot) -> tuple[float, float] | None:
        """The loss of the present batch under that state and under the present weights, if it can be run again."""
        ...

    def held(self, snapshot: Snapshot, count: int) -> list[tuple[float, float]]:
        """As `compare`, for up to `count` remembered batches."""
        ...

    def repeats(self, snapshot: Snapshot) -> bool | None:
        """Whether the first batch after that state still has the loss it had; None when it is not remembered."""
        ...

    def roll_back(self, step: int, *, replay: bool) -> int:
        """Restore the state of `step`; returns the number of updates it contains."""
        ...

    def restore_moments(self, step: int) -> None:
        """Restore the optimizer's state of `step`; weights stay."""
        ...

    def restore_kept(self, tensors: Sequence[str]) -> None:
        """Restore the kept objects that these tensors belong to; everything else stays."""
        ...

    def forget(self) -> None:
        """Drop what is remembered: somebody else replaced the weights. Called by every rank."""
        ...

    def outdate(self) -> None:
        """The states no longer fit, which one rank may know alone: all drop theirs when they agree next."""
        ...


@final
class NoRecovery:
    """Nothing is remembered: `observe` and `careful`, or `auto_recovery: false`."""

    states: Sequence[Snapshot] = ()

    def finite_states(self) -> list[Snapshot]:
        """There are none."""
        return []

    def keep(self, name: str, thing: KeptObject, update: Callable[[], object] | None = None) -> None:
        """There is no going back for anything."""

    def follow(self) -> None:
        """There is no going back for anything."""

    leaves_behind = False

    def take_along(self, parts: Mapping[str, state.Stateful]) -> None:
        """There is no going back for anything."""

    def begin(self, *, step: int, updates: int) -> None:
        """Nothing to remember."""

    def after(self, outcome: Outcome, *, updates: int, calm: bool, suspected_since: int | None) -> None:
        """Nothing to remember."""

    remembers = False

    def remember(
        self, micro_batches: Sequence[RecordedMicroBatch], outcome: Outcome, *, updates: int, options: Options
    ) -> None:
        """Nothing to remember."""

    def schedules(self) -> Callable[[], None]:
        """There are none."""
        return lambda: None

    def missed(self, updates: int) -> tuple[RecordedUpdate, ...]:
        """Nothing is known of them."""
        return ()

    def replayed(self, restored: int, made: Sequence[RecordedUpdate]) -> None:
        """Nothing is known of them."""

    def is_as_it_was(self, updates: int) -> bool:
        """Nothing to compare with."""
        return True

    def comparable(self, signals: Signals, states: Sequence[Snapshot]) -> list[Snapshot]:
        """There are none."""
        return []

    def testify(self, signals: Signals, states: Sequence[Snapshot]) -> Counterfactual | None:
        """Nothing to compare with."""
        return None

    def compare(self, snapshot: Snapshot) -> tuple[float, float] | None:
        """Nothing to compare with."""
        return None

    def repeats(self, snapshot: Snapshot) -> bool | None:
        """Nothing is remembered."""
        return None

    def held(self, snapshot: Snapshot, count: int) -> list[tuple[float, float]]:
        """Nothing is remembered."""
        return []

    def roll_back(self, step: int, *, replay: bool) -> int:
        """Never planned without a state to go to."""
        raise AssertionError("a rollback without a state")

    def restore_moments(self, step: int) -> None:
        """Never planned without a state to go to."""
        raise AssertionError("a rollback without a state")

    def restore_kept(self, tensors: Sequence[str]) -> None:
        """There is nothing to restore them from."""

    def forget(self) -> None:
        """Nothing to forget."""

    def outdate(self) -> None:
        """There are none."""


@final
class InMemory:
    """Snapshots of weights, buffers, optimizer and the guard's own parts."""

    def __init__(
        self,
        snapshots: Snapshots,
        runner: MicroBatchRunner,
        parts: Mapping[str, state.Stateful],
        *,
        replay_buffer: ReplayBuffer | None = None,
        trust_steps: int = 20,
        ranks: Ranks | None = None,
    ) -> None:
        self._snapshots = snapshots
        self._drop_on_all = (ranks or SingleProcess()).on_all(self._drop)
        self._replay_buffer = replay_buffer or ReplayBuffer(max_bytes=0)
        self._trust_steps = trust_steps
        self._reach = trust_steps + 2 * WEIGHTS_EVERY + _SPARE + _DOUBT
        self._runner = runner
        self._parts = dict(parts)
        self._due: float | None = math.inf
        """A snapshot is to be taken; the learning rate it belongs to."""
        self._suspected_since: int | None = None
        self._largest_lr = 0.0
        self._updates = 0
        """Contained in the weights."""
        self._lr_mult = 1.0
        """What the last update's learning rate was multiplied by: states remember the one in use."""

    @property
    def states(self) -> Sequence[Snapshot]:
        """Oldest first."""
        return self._snapshots.states

    def finite_states(self) -> list[Snapshot]:
        """Oldest first."""
        return self._snapshots.finite()

    def keep(self, name: str, thing: KeptObject, update: Callable[[], object] | None = None) -> None:
        """Let `thing` go back together with the weights. States from before do not know it."""
        self._snapshots.keep(name, thing, update)
        self.outdate()

    def follow(self) -> None:
        """Those that came with a way to do it."""
        self._snapshots.follow()

    @property
    def leaves_behind(self) -> bool:
        """Those that came without."""
        return self._snapshots.leaves_behind

    def take_along(self, parts: Mapping[str, state.Stateful]) -> None:
        """Beside those it was made with."""
        self._parts |= parts

    def begin(self, *, step: int, updates: int) -> None:
        """Between two steps, when the loop has done with the last one (averaged weights, stepped a scheduler)."""
        if self._due is not None:
            self._take(step - 1, updates, self._due)

    def after(self, outcome: Outcome, *, updates: int, calm: bool, suspected_since: int | None) -> None:
        """Plan another snapshot when it is time."""
        signals, self._updates = outcome.signals, updates
        # why earlier: what is worth keeping is a state that was trusted by then
        self._suspected_since = None if suspected_since is None else suspected_since - self._trust_steps + 1
        if not outcome.stepped or signals is None:
            return
        self._lr_mult = outcome.lr_mult
        lr = signals.lr * outcome.lr_mult
        if lr > self._largest_lr:
            self._largest_lr = lr
        if calm and self._snapshots.due(outcome.step):
            self._due = lr
            if self._runner.given_losses:  # the next forward pass will be over before we are called again
                self._take(outcome.step, updates, lr)

    @property
    def remembers(self) -> bool:
        """Until batches have proved too large."""
        return self._replay_buffer.open

    def remember(
        self, micro_batches: Sequence[RecordedMicroBatch], outcome: Outcome, *, updates: int, options: Options
    ) -> None:
        """Keep references to the batches of this update."""
        if outcome.signals is not None and options:
            self._replay_buffer.add(
                RecordedUpdate(tuple(micro_batches), outcome.signals, options, outcome.plan.norm, updates)
            )

    def schedules(self) -> Callable[[], None]:
        """Of the kept objects."""
        return self._snapshots.schedules()

    def missed(self, updates: int) -> tuple[RecordedUpdate, ...]:
        """From the backlog."""
        return self._replay_buffer.since(updates, until=self._updates)

    def replayed(self, restored: int, made: Sequence[RecordedUpdate]) -> None:
        """What was not made again is gone."""
        self._snapshots.settle()
        self._replay_buffer.keep_until(restored)
        for number, done in enumerate(made, start=restored + 1):
            self._replay_buffer.add(replace(done, updates=number))

    def is_as_it_was(self, updates: int) -> bool:
        """Compared with a state that the rollback has passed over."""
        return self._snapshots.is_as_it_was(updates)

    def comparable(self, signals: Signals, states: Sequence[Snapshot]) -> list[Snapshot]:
        """A state from a time of lower learning rate does not count when the rise was planned."""
        lr = signals.lr * self._lr_mult
        return [state for state in states if not _by_plan(state, lr, signals.announced_lr)]

    def testify(self, signals: Signals, states: Sequence[Snapshot]) -> Counterfactual | None:
        """After refused updates gradient and buffers count too: a flipped bit may show there only."""
        tried = [self._snapshots.weights_of(snapshot) for snapshot in states]
        losses = self._runner.compare(tried, backward=signals.refused_in_a_row > 0) if states else None
        if losses is None:
            return None
        now, *then = losses
        heard = [
            Counterfactual(step=snapshot.step, old_loss=loss, current_loss=now, lr=snapshot.lr)
            for snapshot, loss in zip(states, then, strict=True)
        ]
        finite = [counterfactual for counterfactual in heard if math.isfinite(counterfactual.old_loss)]
        return finite[-1] if finite else heard[-1]

    def compare(self, snapshot: Snapshot) -> tuple[float, float] | None:
        """Nothing stays changed."""
        losses = self._runner.compare([self._snapshots.weights_of(snapshot)], backward=False)
        return None if losses is None else (losses[1], losses[0])

    def repeats(self, snapshot: Snapshot) -> bool | None:
        """From the backlog: another loss than then means another target network, adversary or environment."""
        missed = self.missed(snapshot.updates)
        if not missed:
            return None
        first = missed[0]
        then = first.signals.losses[0] if first.signals.losses else first.signals.loss
        losses = self._runner.compare_again(first.micro_batches[0], self._snapshots.weights_of(snapshot))
        return losses is not None and math.isclose(losses[1], then, rel_tol=_SAME, abs_tol=1e-9)

    def held(self, snapshot: Snapshot, count: int) -> list[tuple[float, float]]:
        """The newest remembered batches. The present weights have learned from them, so a doubt is in their favour."""
        micro_batches = [done.micro_batches[0] for done in self.missed(snapshot.updates)[-count:]]
        tried = [self._runner.compare_again(work, self._snapshots.weights_of(snapshot)) for work in micro_batches]
        return [(losses[1], losses[0]) for losses in tried if losses is not None]

    def roll_back(self, step: int, *, replay: bool) -> int:
        """Everything together: weights, buffers, optimizer, kept objects, and the guard's own parts."""
        snapshot = self._snapshots.roll_back(step, replay=replay)
        state.load(self._parts, snapshot.parts)
        self._due = None
        return snapshot.updates

    def restore_moments(self, step: int) -> None:
        """Restore the optimizer's state of `step`; weights stay."""
        self._snapshots.moments_back(step)

    def restore_kept(self, tensors: Sequence[str]) -> None:
        """From the newest states in which they are well."""
        self._snapshots.restore_kept(tensors)

    def forget(self) -> None:
        """Drop all states."""
        self._replay_buffer.clear()
        self._drop()

    def outdate(self) -> None:
        """All ranks hold states of the same steps, so a rank without any has nobody to tell."""
        if self._snapshots.states:
            self._drop_on_all()

    def _drop(self) -> None:
        self._snapshots.forget()
        self._due = math.inf

    def _take(self, step: int, updates: int, lr: float) -> None:
        self._snapshots.take(
            step=step,
            updates=updates,
            lr=lr,
            parts=state.save(self._parts),
            largest_lr=self._largest_lr,
            suspected_since=self._suspected_since,
        )
        self._due = None
        old = [state.updates for state in self._snapshots.states if state.step <= step - self._reach]
        self._replay_buffer.forget_until(max(old, default=0))


def _by_plan(snapshot: Snapshot, lr: float, announced: float) -> bool:
    """The learning rate has risen a good deal since, to where it has been before or was announced to go."""
    known = max(snapshot.largest_lr, announced)
    return snapshot.lr * _PLANNED < lr <= known * 1.001
