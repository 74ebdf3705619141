"""When a state goes to disk: every so often, when validation was never better, when somebody wants the run to end."""

import logging
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import final

from steadystep.errors import CheckpointError
from steadystep.recovery.background_writer import BackgroundWriter
from steadystep.recovery.checkpoint import Checkpoint, read_checkpoint
from steadystep.recovery.interrupts import Interrupts
from steadystep.recovery.loop_state import LoopState
from steadystep.recovery.manifest import MANIFEST
from steadystep.recovery.shelf import Shelf

logger = logging.getLogger("steadystep")


@final
@dataclass(frozen=True, slots=True)
class Every:
    """So many steps, or so many seconds."""

    steps: int | None = None
    seconds: float | None = None


@final
class Checkpointing:
    """Saves between two steps, when no batch is half used; the training waits for a copy in memory only."""

    def __init__(
        self,
        folder: Path,
        loop: LoopState,
        every: Every,
        *,
        keep_last: int = 3,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._shelf = Shelf(folder, keep_last=keep_last)
        self._writer = BackgroundWriter(self._shelf)
        self._loop = loop
        self._every = every
        self._clock = clock
        self._interrupts = Interrupts()
        self._interrupts.install()
        weakref.finalize(self, self._interrupts.remove)  # a guard that was dropped must not keep Ctrl-C
        self._last_step: int | None = None
        self._last_time = clock()
        self._score: float | None = None

    @property
    def folder(self) -> Path:
        """Where they are."""
        return self._shelf.folder

    def between(self, step: int, updates: int) -> None:
        """Called between two steps; `step` is the one that comes next."""
        stop = self._interrupts.asked is not None
        if stop or self._score is not None or self._due(step):
            self.save(step, updates, wait=stop or self._score is not None)
        if stop:
            self._obey(step)

    def validated(self, score: float) -> None:
        """The best so far: the next save is that of this score."""
        self._score = score

    def save(self, step: int, updates: int, *, wait: bool = False) -> None:
        """Begin to write the present state, unless the last one is still being written and `wait` is false."""
        if self._score is None and step == self._last_step and (self._writer.busy or self._path(step).exists()):
            return
        if self._writer.busy and not wait:
            return  # before gathering, which costs as much as a few layers
        if self._writer.save(self._loop.gather(), step=step, updates=updates, score=self._score, wait=wait):
            self._last_step, self._last_time, self._score = step, self._clock(), None

    def flush(self) -> Path:
        """Wait until it is written."""
        self._writer.flush()
        return self._path(self._last_step or 0)

    def newest(self) -> Checkpoint | None:
        """What to continue from."""
        found = self._shelf.newest()
        if found is not None:
            self._last_step = found.step
        return found

    def best(self) -> Checkpoint | None:
        """The one with the lowest validation loss."""
        self._writer.flush()
        return self._shelf.best()

    def close(self, step: int, updates: int, *, save: bool) -> None:
        """Write what is left, let go of signals, and obey one that came after the last step."""
        if save and step > 0:
            self.save(step, updates, wait=True)
        self._writer.close()
        if self._interrupts.asked is not None:
            self._obey(step)
        self._interrupts.remove()

    def _obey(self, step: int) -> None:
        self._writer.flush()
        if self._path(step).exists():
            logger.warning("saved at step %d in %s: Guard.resume continues there", step, self._shelf.folder)
        else:
            logger.warning("step %d is not in %s: Guard.resume continues from an earlier one", step, self._shelf.folder)
        self._interrupts.obey()

    def _path(self, step: int) -> Path:
        return self._shelf.folder / f"step-{step:08d}"

    def _due(self, step: int) -> bool:
        if self._every.seconds is not None:
            return self._clock() - self._last_time >= self._every.seconds
        return step - (self._last_step or 0) >= (self._every.steps or 0)


def read_any(path: Path) -> Checkpoint:
    """One checkpoint, or the newest whole one of a folder of them."""
    if (path / MANIFEST).exists():
        return read_checkpoint(path)
    inner = path / "checkpoints"
    found = Shelf(inner if inner.is_dir() else path).newest() if path.is_dir() else None
    if found is None:
        raise CheckpointError(f"{path}: there is no checkpoint here")
    return found
