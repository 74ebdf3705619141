"""Moments of a program's life at which it gets a signal: in its own arithmetic, and around every call to the disk."""

import os
import signal
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, final

IN_THE_LOOP = ("a batch", "forward", "backward", "the update", "the average", "a validation")
ON_DISK = ("mkdir", "open", "half a write", "before fsync", "after fsync", "before rename", "after rename", "remove")


@final
@dataclass(frozen=True, slots=True)
class Moment:
    """The `number`-th time (from 1) that the program is there."""

    kind: str
    number: int
    signal: int = signal.SIGKILL


@final
class Moments:
    """Counts where the program has been; at the moments that are due it sends itself the signal."""

    def __init__(self, due: Sequence[Moment] = ()) -> None:
        self.counts: Counter[str] = Counter()
        self._due = {(moment.kind, moment.number): moment.signal for moment in due}

    def reach(self, kind: str) -> None:
        """The program is there."""
        self.counts[kind] += 1
        number = self._due.get((kind, self.counts[kind]))
        if number is not None:
            os.kill(os.getpid(), number)

    def watch_the_disk(self) -> None:
        """Put a moment around the calls that checkpoints are made of, in this process, for good."""
        for name, before, after in (
            ("mkdir", None, "mkdir"),
            ("fsync", "before fsync", "after fsync"),
            ("rename", "before rename", "after rename"),
            ("replace", "before rename", "after rename"),
            ("unlink", "remove", None),
            ("rmdir", "remove", None),
        ):
            setattr(os, name, self._around(getattr(os, name), before, after))
        opened = Path.open

        def opening(path: Path, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
            file = opened(path, mode, *args, **kwargs)
            if "x" not in mode:
                return file
            self.reach("open")
            return _Torn(file, self)

        Path.open = opening  # type: ignore[method-assign, assignment]

    def _around(self, call: Callable[..., Any], before: str | None, after: str | None) -> Callable[..., Any]:
        def watched(*args: Any, **kwargs: Any) -> Any:
            if before is not None:
                self.reach(before)
            result = call(*args, **kwargs)
            if after is not None:
                self.reach(after)
            return result

        return watched


@final
class _Torn:
    """A file of which half a piece is on the disk before the other half is."""

    def __init__(self, file: IO[bytes], moments: Moments) -> None:
        self._file = file
        self._moments = moments

    def write(self, piece: bytes | memoryview) -> int:
        """In two halves."""
        half = len(piece) // 2
        self._file.write(piece[:half])
        self._file.flush()
        self._moments.reach("half a write")
        return half + self._file.write(piece[half:])

    def flush(self) -> None:
        """As the file does."""
        self._file.flush()

    def fileno(self) -> int:
        """As the file does."""
        return self._file.fileno()

    def __enter__(self) -> "_Torn":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
