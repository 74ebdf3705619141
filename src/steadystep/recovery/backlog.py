"""The last updates, in a form that can be made again: closures, batches and what came of them.

After a rollback the batches since are not lost: they are run once more, from the restored weights on. It holds
references, no copies; what a step costs is a look at the size of its batch.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

from torch import Tensor

from steadystep.accumulation import Work
from steadystep.records import Signals

_DEEPEST = 8  # a container that holds itself
_HANDLE = 1 << 20  # bytes: a tensor in shared memory keeps a file open, and a process may have 1,024 of them


@final
@dataclass(frozen=True, slots=True)
class Done:
    """One update that was taken."""

    works: tuple[Work, ...]
    signals: Signals
    rates: tuple[float, ...]
    """The learning rate of each parameter group, as it was used."""
    norm: float | None = None
    """What the gradient was held down to, beyond the usual clipping."""
    updates: int = 0
    """Contained in the weights after it."""

    @property
    def size(self) -> int:
        """Bytes of its batches."""
        return sum(size_of(work.recipe.batch) for work in self.works)


@final
class Backlog:
    """A bounded memory of updates. Once batches prove too large for it, it keeps none for the rest of the run."""

    def __init__(self, *, max_bytes: float) -> None:
        self._max_bytes = max_bytes
        self._done: deque[tuple[Done, int]] = deque()
        self._bytes = 0

    @property
    def open(self) -> bool:
        """Whether it is worth giving it anything."""
        return self._max_bytes > 0

    def add(self, done: Done) -> None:
        """One more update."""
        size = done.size
        self._done.append((done, size))
        self._bytes += size
        if self._bytes > self._max_bytes:
            self._max_bytes = 0.0
            self.clear()

    def forget_until(self, updates: int) -> None:
        """Drop what the state with so many updates contains."""
        while self._done and self._done[0][0].updates <= updates:
            self._bytes -= self._done.popleft()[1]

    def since(self, updates: int) -> tuple[Done, ...]:
        """All updates after the first `updates`; none if one of them is not known."""
        found = tuple(done for done, _ in self._done if done.updates > updates)
        known = all(done.updates == updates + 1 + i for i, done in enumerate(found))
        return found if known else ()

    def keep_until(self, updates: int) -> None:
        """The weights contain so many updates now."""
        while self._done and self._done[-1][0].updates > updates:
            self._bytes -= self._done.pop()[1]

    def clear(self) -> None:
        """Drop all."""
        self._done.clear()
        self._bytes = 0


def size_of(batch: Any, depth: int = 0) -> int:
    """Bytes of all tensors in a batch; one that came from a worker process counts for a megabyte at least."""
    if isinstance(batch, Tensor):
        shared = batch.device.type == "cpu" and batch.is_shared()  # type: ignore[no-untyped-call]
        return max(batch.nbytes, _HANDLE) if shared else batch.nbytes
    if depth > _DEEPEST:
        return 0
    if isinstance(batch, Mapping):
        return sum(size_of(part, depth + 1) for part in batch.values())
    if isinstance(batch, Sequence) and not isinstance(batch, str | bytes):
        return sum(size_of(part, depth + 1) for part in batch)
    return 0
