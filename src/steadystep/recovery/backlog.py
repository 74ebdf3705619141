"""The last updates, in a form that can be made again: closures, batches and what came of them.

After a rollback the batches since are not lost: they are run once more, from the restored weights on. It holds
references, no copies; what a step costs is a look at the size of its batch.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

from steadystep.accumulation import Work
from steadystep.records import Signals
from steadystep.recovery.batch_bytes import bytes_of

_MOST = 512  # updates: no state that one goes back to is older


@final
@dataclass(frozen=True, slots=True)
class Done:
    """One update that was taken."""

    works: tuple[Work, ...]
    signals: Signals
    options: tuple[Mapping[str, Any], ...]
    """The numbers of each parameter group as they were used: learning rate, momentum, decay."""
    norm: float | None = None
    """What the gradient was held down to, beyond the usual clipping."""
    updates: int = 0
    """Contained in the weights after it; 0 for the one that is still to be taken."""

    @property
    def is_at_hand(self) -> bool:
        """It has not been taken yet."""
        return self.updates == 0


@final
class Backlog:
    """A bounded memory of updates. Once batches prove too large for it, it keeps none for the rest of the run."""

    def __init__(self, *, max_bytes: float) -> None:
        self._max_bytes = max_bytes
        self._done: deque[tuple[Done, float]] = deque()
        self._bytes = 0.0

    @property
    def open(self) -> bool:
        """Whether it is worth giving it anything."""
        return self._max_bytes > 0

    def add(self, done: Done) -> None:
        """One more update."""
        size = sum(bytes_of(work) for work in done.works)
        self._done.append((done, size))
        self._bytes += size
        if len(self._done) > _MOST:
            self._bytes -= self._done.popleft()[1]
        if self._bytes > self._max_bytes:
            self._max_bytes = 0.0
            self.clear()

    def forget_until(self, updates: int) -> None:
        """Drop what the state with so many updates contains."""
        while self._done and self._done[0][0].updates <= updates:
            self._bytes -= self._done.popleft()[1]

    def since(self, updates: int, *, until: int) -> tuple[Done, ...]:
        """All updates after the first `updates`, of `until`; none if one of them is not known."""
        found = tuple(done for done, _ in self._done if done.updates > updates)
        return found if [done.updates for done in found] == list(range(updates + 1, until + 1)) else ()

    def keep_until(self, updates: int) -> None:
        """The weights contain so many updates now."""
        while self._done and self._done[-1][0].updates > updates:
            self._bytes -= self._done.pop()[1]

    def clear(self) -> None:
        """Drop all."""
        self._done.clear()
        self._bytes = 0.0

    def state_dict(self) -> dict[str, Any]:
        """Whether batches have proved too large; the batches themselves are not saved."""
        return {"open": self.open}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        self.clear()
        if not state["open"]:
            self._max_bytes = 0.0
