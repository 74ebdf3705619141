"""In the place of what a rollback needs where nothing is rolled back: the same methods, and nothing behind them."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, final

from steadystep import state
from steadystep.records import Outcome
from steadystep.snapshots import Snapshot
from steadystep.snapshots.replay_buffer import RecordedMicroBatch, RecordedUpdate, Repeatable
from steadystep.state import KeptObject

Options = tuple[Mapping[str, Any], ...]
"""The numbers of each parameter group."""


@final
class NoRecovery:
    """Nothing is remembered: `observe` and `careful`, or `auto_recovery: false`."""

    states: Sequence[Snapshot] = ()
    lr_mult = 1.0
    due: float | None = None
    remembers = False
    leaves_behind = False

    def finite_states(self) -> list[Snapshot]:
        """There are none."""
        return []

    def weights_of(self, snapshot: Snapshot) -> AbstractContextManager[None]:
        """Never asked for without a state."""
        raise AssertionError("the weights of no state")

    def keep(self, name: str, thing: KeptObject, update: Callable[[], object] | None = None) -> None:
        """Nothing is rolled back."""

    def follow(self) -> None:
        """Nothing is replayed."""

    def take_along(self, parts: Mapping[str, state.Stateful]) -> None:
        """Nothing is rolled back."""

    def pin(self, step: int) -> None:
        """Never asked for without a state."""

    def begin(self, *, step: int, updates: int) -> None:
        """Nothing to remember."""

    def after(
        self, outcome: Outcome, *, updates: int, calm: bool, suspected_since: int | None, at_once: bool = False
    ) -> None:
        """Nothing to remember."""

    def remember(
        self,
        micro_batches: Sequence[RecordedMicroBatch],
        outcome: Outcome,
        updates: int,
        options: Options,
        place: tuple[int, int] | None = None,
    ) -> None:
        """Nothing to remember."""

    def remembered(self, most: int) -> list[Repeatable]:
        """None."""
        return []

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

    def roll_back(self, step: int, *, replay: bool) -> int:
        """Never planned without a state to restore."""
        raise AssertionError("a rollback without a state")

    def keep_present(self, *, step: int, updates: int, lr: float, to: int) -> bool:
        """There is no room for it."""
        return False

    def come_back(self, step: int) -> None:
        """Never planned without a state to restore."""
        raise AssertionError("a rollback without a state")

    def restore_moments(self, step: int) -> None:
        """Never planned without a state to restore."""
        raise AssertionError("a rollback without a state")

    def restore_kept(self, tensors: Sequence[str]) -> None:
        """There is nothing to restore them from."""

    def forget(self) -> None:
        """Nothing to forget."""

    def outdate(self) -> None:
        """There are none."""
