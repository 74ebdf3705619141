"""Going back: what is remembered, asking an old batch, and restoring everything a loop owns together."""

import math
from collections.abc import Mapping, Sequence
from typing import Protocol, final

from steadystep import state
from steadystep.accumulation import Passes
from steadystep.records import Outcome, Witness
from steadystep.recovery.snapshots import Kept, Snapshot, Snapshots

_WITNESSES = 2  # older ones have seen weights so much worse that nothing looks bad to them


class Recovery(Protocol):
    """What the guard needs of it."""

    @property
    def states(self) -> Sequence[Snapshot]:
        """What one could go back to, oldest first."""
        ...

    def keep(self, name: str, thing: Kept) -> None:
        """Let `thing` go back together with the weights."""
        ...

    def begin(self, *, step: int, updates: int) -> None:
        """Called before the forward pass of `step`, when that is known."""
        ...

    def after(self, outcome: Outcome, *, updates: int, calm: bool, suspected_since: int | None) -> None:
        """Called after each attempt; `calm` says that no trouble is under way, `suspected_since` that one may be."""
        ...

    def testify(self, *, before: int, level: float, backward: bool) -> Witness | None:
        """How a batch from `before` does now, its gradient too with `backward`; None when there is none to ask.

        Where the loss was above `level` even then, nothing can be told.
        """
        ...

    def roll_back(self, step: int, *, replay: bool) -> int:
        """Restore the state of `step`; returns the number of updates it contains."""
        ...

    def restore_moments(self, step: int) -> None:
        """Restore the optimizer's state of `step`; weights stay."""
        ...

    def forget(self) -> None:
        """Drop what is remembered: somebody else replaced the weights."""
        ...


@final
class NoRecovery:
    """Nothing is remembered: `observe` and `careful`, or `auto_recovery: false`."""

    states: Sequence[Snapshot] = ()

    def keep(self, name: str, thing: Kept) -> None:
        """There is no going back for anything."""

    def begin(self, *, step: int, updates: int) -> None:
        """Nothing to remember."""

    def after(self, outcome: Outcome, *, updates: int, calm: bool, suspected_since: int | None) -> None:
        """Nothing to remember."""

    def testify(self, *, before: int, level: float, backward: bool) -> Witness | None:
        """Nobody to ask."""
        return None

    def roll_back(self, step: int, *, replay: bool) -> int:
        """Never planned without a state to go to."""
        raise AssertionError("a rollback without a state")

    def restore_moments(self, step: int) -> None:
        """Never planned without a state to go to."""
        raise AssertionError("a rollback without a state")

    def forget(self) -> None:
        """Nothing to forget."""


@final
class InMemory:
    """Snapshots of weights, buffers, optimizer and the guard's own parts, with one batch each as a witness."""

    def __init__(self, snapshots: Snapshots, passes: Passes, parts: Mapping[str, state.Stateful]) -> None:
        self._snapshots = snapshots
        self._passes = passes
        self._parts = parts
        self._due: float | None = math.inf
        """A snapshot is to be taken; the learning rate it belongs to."""
        self._suspected_since: int | None = None

    @property
    def states(self) -> Sequence[Snapshot]:
        """Oldest first."""
        return self._snapshots.states

    def keep(self, name: str, thing: Kept) -> None:
        """Let `thing` go back together with the weights."""
        self._snapshots.keep(name, thing)

    def begin(self, *, step: int, updates: int) -> None:
        """Between two steps, when the loop has done with the last one (averaged weights, stepped a scheduler)."""
        if self._due is not None:
            self._take(step - 1, updates, self._due)

    def after(self, outcome: Outcome, *, updates: int, calm: bool, suspected_since: int | None) -> None:
        """Take down what the witness of the last snapshot said; plan another snapshot when it is time."""
        signals, recipe, self._suspected_since = outcome.signals, self._passes.witness, suspected_since
        if recipe is not None:
            self._passes.witness = None
            if outcome.stepped and calm and signals is not None and self._snapshots.states:
                self._snapshots.states[-1].witness = (recipe, signals.losses[0])
        if calm and outcome.stepped and signals is not None and self._snapshots.due(outcome.step):
            self._due = signals.lr * outcome.lr_mult
            if self._passes.given_losses:  # the next forward pass will be over before we are called again
                self._take(outcome.step, updates, self._due)

    def testify(self, *, before: int, level: float, backward: bool) -> Witness | None:
        """The same batch with the same random numbers, now. Of the last two the one that has worsened less counts."""
        heard = []
        old = [s for s in self._snapshots.states if s.witness is not None and s.step < before and s.witness[1] < level]
        for snapshot in old[-_WITNESSES:]:
            recipe, then = snapshot.witness
            now = self._passes.try_again(recipe, backward=backward)
            if now is None:  # the closure cannot be run again: no use asking it any more
                snapshot.witness = None
            else:
                heard.append(Witness(step=snapshot.step + 1, then=then, now=now, lr=snapshot.lr))
        return min(heard, key=_worsening) if heard else None

    def roll_back(self, step: int, *, replay: bool) -> int:
        """Everything together: weights, buffers, optimizer, kept objects, and the guard's own parts."""
        snapshot = self._snapshots.go_back(step, replay=replay)
        state.load(self._parts, snapshot.parts)
        self._passes.witness, self._due = None, None
        return snapshot.updates

    def restore_moments(self, step: int) -> None:
        """Restore the optimizer's state of `step`; weights stay."""
        self._snapshots.moments_back(step)

    def forget(self) -> None:
        """Drop all states."""
        self._snapshots.forget()
        self._due = math.inf

    def _take(self, step: int, updates: int, lr: float) -> None:
        self._snapshots.take(
            step=step, updates=updates, lr=lr, parts=state.save(self._parts), suspected_since=self._suspected_since
        )
        self._passes.wants_witness, self._due = True, None


def _worsening(witness: Witness) -> float:
    change = witness.now - witness.then
    return change if math.isfinite(change) else math.inf
