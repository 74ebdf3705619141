"""The last updates, in a form that can be replayed: closures, batches and what came of them.

After a rollback the batches since are not lost: they are run once more, from the restored weights on. It holds
references, no copies; what a step costs is a look at the size of its batch.
"""

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol, final

from steadystep._utils.tree import bytes_of
from steadystep.records import Signals

_MOST = 512  # updates: no state that is rolled back to is older
_LUMP = 16  # updates whose batches are weighed together: one by one, with cold caches, took three times as long


class Repeatable(Protocol):
    """A forward pass that can be run again later and still means the same batch."""

    @property
    def rng(self) -> object | None:
        """The random numbers it began with, where they are put back for it and the loop goes on after its draws."""
        ...

    @property
    def batch(self) -> Any:
        """What is held in memory for it."""
        ...

    @property
    def closure(self) -> Callable[..., Any]:
        """What computes the loss."""
        ...

    def again(self) -> tuple[Callable[..., Any], Any]:
        """The closure and its batch, with the random numbers put back to that moment."""
        ...


@final
@dataclass(frozen=True, slots=True)
class RecordedMicroBatch:
    """One micro-batch of an update that is over."""

    recipe: Repeatable
    weight: float | None
    """As it was given to `step`."""
    touch: Callable[[], None] | None = None
    """What a loop does to the gradients after this pass and before its step: its own clipping."""


@final
@dataclass(frozen=True, slots=True)
class RecordedUpdate:
    """One update that was taken."""

    micro_batches: tuple[RecordedMicroBatch, ...]
    signals: Signals
    options: tuple[Mapping[str, Any], ...]
    """The numbers of each parameter group as they were used: learning rate, momentum, decay."""
    norm: float | None = None
    """What the gradient was held down to, beyond the usual clipping."""
    updates: int = 0
    """Contained in the weights after it; 0 for the one that is still to be taken."""
    place: tuple[int, int] | None = None
    """Epoch and number of the last of its batches, where `guard.batches` counts them."""

    @property
    def epoch(self) -> int | None:
        """The pass over the data it belongs to."""
        return None if self.place is None else self.place[0]

    @property
    def places(self) -> tuple[int, ...]:
        """Numbers of its batches within the epoch, from 0; none where nobody counts them."""
        if self.place is None:
            return ()
        last = self.place[1]
        return tuple(range(max(0, last + 1 - len(self.micro_batches)), last + 1))

    @property
    def is_at_hand(self) -> bool:
        """It has not been taken yet."""
        return self.updates == 0


@final
class ReplayBuffer:
    """A bounded memory of updates. Once batches prove too large for it, it keeps none for the rest of the run."""

    def __init__(self, *, max_bytes: float) -> None:
        self._max_bytes = max_bytes
        self.open = max_bytes > 0
        """Whether it is worth giving it anything."""
        self._done: deque[RecordedUpdate] = deque()
        self._sizes: deque[float] = deque()
        """Of the first of them; the last have not been weighed yet."""
        self._bytes = self._largest = 0.0

    def add(self, done: RecordedUpdate) -> None:
        """One more update."""
        self._done.append(done)
        if len(self._done) > _MOST:
            self._drop_oldest()
        # why the largest: what is not weighed at once must be known to fit
        lump = _LUMP if self._sizes and self._bytes + _LUMP * self._largest <= self._max_bytes else 1
        if len(self._done) - len(self._sizes) >= lump:
            self._weigh()

    def forget_until(self, updates: int) -> None:
        """Drop what the state with so many updates contains."""
        self._weigh()
        while self._done and self._done[0].updates <= updates:
            self._drop_oldest()

    def since(self, updates: int, *, until: int) -> tuple[RecordedUpdate, ...]:
        """All updates after the first `updates`, of `until`; none if one of them is not known."""
        found = tuple(done for done in self._done if done.updates > updates)
        return found if [done.updates for done in found] == list(range(updates + 1, until + 1)) else ()

    def keep_until(self, updates: int) -> None:
        """The weights contain so many updates now."""
        self._weigh()
        while self._done and self._done[-1].updates > updates:
            self._done.pop()
            self._bytes -= self._sizes.pop()

    def newest(self, most: int) -> list[Repeatable]:
        """Recipes of the last micro-batches that came with a batch, the oldest of them first."""
        recipes = [work.recipe for done in self._done for work in done.micro_batches if work.recipe.batch is not None]
        return recipes[-most:]

    def clear(self) -> None:
        """Drop all."""
        self._done.clear()
        self._sizes.clear()
        self._bytes = 0.0

    def _weigh(self) -> None:
        """Those that have not been; once they prove too large, nothing is kept."""
        for done in islice(self._done, len(self._sizes), None):
            size = sum(bytes_of(work.recipe.batch, work.recipe.closure) for work in done.micro_batches)
            self._sizes.append(size)
            self._bytes += size
            self._largest = max(self._largest, size)
        if self._bytes > self._max_bytes:
            self._max_bytes, self.open = 0.0, False
            self.clear()

    def _drop_oldest(self) -> None:
        self._done.popleft()
        self._bytes -= self._sizes.popleft()

    def state_dict(self) -> dict[str, Any]:
        """Whether batches have proved too large; the batches themselves are not saved."""
        return {"open": self.open}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        self.clear()
        if not state["open"]:
            self._max_bytes, self.open = 0.0, False
