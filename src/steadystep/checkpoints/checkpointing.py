"""When a state goes to disk: every so often, when validation was never better, when somebody wants the run to end.

Ctrl-C and SIGTERM: the step is finished, the state saved, and then the program ends as it would have.
"""

import os
import signal
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, final

from steadystep._utils.text import logger
from steadystep.checkpoints.checkpoint import MANIFEST, Checkpoint, read_checkpoint
from steadystep.checkpoints.loop_state import LoopState
from steadystep.checkpoints.shared_store import SharedCheckpointStore, Shelving, read_shared
from steadystep.checkpoints.store import BackgroundWriter, CheckpointStore, check_finite
from steadystep.errors import CheckpointError
from steadystep.parallel import Ranks, SingleProcess

_REMEMBERED = 1024  # steps of the last checkpoints: more than are ever kept


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
        ranks: Ranks | None = None,
    ) -> None:
        self._ranks = ranks or SingleProcess()
        self._store = store_at(folder, self._ranks, keep_last=keep_last)
        self._writer = BackgroundWriter(self._store)
        self._loop = loop
        self._every = every
        self._clock = clock
        self._interrupts = Interrupts()
        self._interrupts.install()
        weakref.finalize(self, self._interrupts.remove)  # a guard that was dropped must not keep Ctrl-C
        self._last_step: int | None = None
        self._resumed: int | None = None
        self._written: deque[int] = deque(maxlen=_REMEMBERED)
        self._last_time = clock()
        self._score: float | None = None
        # What one rank wants happens on all of them, at the same step.
        self._stops = self._ranks.any_rank(lambda: self._interrupts.asked is not None)
        self._late = self._ranks.any_rank(self._time_is_up)
        self._busy = self._ranks.any_rank(lambda: self._writer.busy)

    @property
    def folder(self) -> Path:
        """Where they are."""
        return self._store.folder

    def between(self, step: int, updates: int) -> None:
        """Called between two steps; `step` is the one that comes next."""
        stop = self._stops()
        if stop or self._score is not None or self._due(step):
            self.save(step, updates, wait=stop or self._score is not None)
        if stop:
            self._obey(step)

    def validated(self, score: float) -> None:
        """The best so far: the next save is that of this score."""
        self._score = score

    def save(self, step: int, updates: int, *, wait: bool = False) -> None:
        """Begin to write the present state, unless the last one is still being written and `wait` is false."""
        if self._score is None and step == self._last_step and self._is_there(step):
            return
        if self._busy() and not wait:
            return  # before gathering, which costs as much as a few layers
        if self._writer.save(self._loop.gather(), step=step, updates=updates, score=self._score, wait=wait):
            self._last_step, self._last_time, self._score = step, self._clock(), None
            self._written.append(step)

    def flush(self) -> Path:
        """Wait until it is written, by all ranks."""
        self._writer.flush()
        self._ranks.all(True)
        return self._path(self._last_step or 0)

    def newest(self) -> Checkpoint | None:
        """What to continue from; None when nothing was written yet."""
        found = self._store.newest()
        if found is None:
            none_is_lost(self._store.folder, self._ranks)
        else:
            self._last_step = self._resumed = found.step
        return found

    def newest_of_this_run(self) -> Checkpoint | None:
        """The newest that was written since this was made, or before what was resumed from: others share the folder."""
        self._writer.flush()
        self._ranks.all(True)
        resumed = -1 if self._resumed is None else self._resumed
        return self._store.newest(lambda step: step in self._written or step <= resumed)

    def best(self) -> Checkpoint | None:
        """The one with the lowest validation loss."""
        self._writer.flush()
        self._ranks.all(True)
        return self._store.best()

    def close(self, step: int, updates: int, *, save: bool) -> None:
        """Write what is left, let go of signals, and obey one that came after the last step."""
        if save and step > 0:
            self.save(step, updates, wait=True)
        elif isinstance(self._store, SharedCheckpointStore):
            self._store.hurry()
        self._writer.close()
        if self._interrupts.asked is not None:
            self._obey(step)
        self._interrupts.remove()

    def _obey(self, step: int) -> None:
        self._writer.flush()
        if self._ranks.rank > 0:
            pass  # the first one says it
        elif self._path(step).exists():
            logger.warning(
                "saved a checkpoint of step %d in %s; Guard.resume continues from it", step, self._store.folder
            )
        else:
            logger.warning(
                "step %d was not saved in %s; Guard.resume continues from an earlier checkpoint",
                step,
                self._store.folder,
            )
        self._interrupts.obey()

    def _path(self, step: int) -> Path:
        return self._store.folder / f"step-{step:08d}"

    def _is_there(self, step: int) -> bool:
        # why: in a distributed run the first rank completes it, so the others cannot tell by looking
        return self._ranks.size > 1 or self._writer.busy or self._path(step).exists()

    def _time_is_up(self) -> bool:
        return self._every.seconds is not None and self._clock() - self._last_time >= self._every.seconds

    def _due(self, step: int) -> bool:
        if self._every.seconds is not None:
            return self._late()
        return step - (self._last_step or 0) >= (self._every.steps or 0)


def store_at(folder: Path, ranks: Ranks, *, keep_last: int = 3) -> Shelving:
    """For one process, or for all ranks together."""
    return (
        CheckpointStore(folder, keep_last=keep_last)
        if ranks.size == 1
        else SharedCheckpointStore(folder, ranks, keep_last=keep_last)
    )


def none_is_lost(folder: Path, ranks: Ranks) -> None:
    """Raise where there are checkpoints and none can be used: a run that began anew would write over them."""
    there = sorted(path.name for path in folder.glob("step-*")) if ranks.rank == 0 else []
    newest = ranks.texts(there[-1] if there else "")[0]
    if newest:
        raise CheckpointError(
            f"no checkpoint in {folder} can be used, the newest is {newest}; the warning above lists the reason for "
            "each. To start over, move that folder away or use another run_dir. To continue from an intact copy, "
            "use Guard.resume(..., path=...)"
        )


def read_any(path: Path, ranks: Ranks) -> Checkpoint:
    """One checkpoint, or the newest of a folder of them that is whole and finite."""
    found: Checkpoint | None
    if (path / MANIFEST).exists():
        found = read_checkpoint(path) if ranks.size == 1 else read_shared(path, ranks)
        if found is not None:
            check_finite(found)
    else:
        folder = path / "checkpoints" if (path / "checkpoints").is_dir() else path
        found = store_at(folder, ranks).newest() if path.is_dir() else None
        if found is None:
            none_is_lost(folder, ranks)
    if found is None:
        raise CheckpointError(f"{path}: no checkpoint found")
    return found


_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@final
class Interrupts:
    """Remembers the first signal; the second one acts at once. Only the main thread can hear signals."""

    def __init__(self) -> None:
        self.asked: int | None = None
        """The signal that came."""
        self._process = os.getpid()
        self._before: dict[int, Any] = {}

    def install(self) -> None:
        """Listen, except for what is ignored on purpose, such as Ctrl-C by a job in the background of a shell."""
        if threading.current_thread() is threading.main_thread():
            heard = [number for number in _SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
            self._before = {number: signal.signal(number, self._heard) for number in heard}

    def remove(self) -> None:
        """Leave it to whoever listened before. Does nothing outside the main thread."""
        if threading.current_thread() is not threading.main_thread():
            return
        before, self._before = self._before, {}
        for number, handler in before.items():
            listener = signal.getsignal(number)
            if listener == self._heard and handler is not None:  # None: it was not set from Python
                signal.signal(number, handler)
            # why: another guard that listens since must not hand over to this one any more
            while isinstance(other := getattr(listener, "__self__", None), Interrupts):
                listener = other._before.get(number)
                if listener == self._heard:
                    other._before[number] = handler

    def obey(self) -> None:
        """The state is safe: do what the signal asked for."""
        # why: another rank may have heard it, and this one stops together with that one
        number, self.asked = self.asked or signal.SIGTERM, None
        handler = self._before.get(number)
        self.remove()
        if number == signal.SIGTERM and handler == signal.SIG_DFL:
            raise SystemExit(128 + number)  # why: the default action would not run `finally` or close files
        signal.raise_signal(number)

    def _heard(self, number: int, frame: FrameType | None) -> None:
        if self.asked is not None:
            self.obey()
            return
        self.asked = number
        if os.getpid() == self._process:  # a loader's forked worker has nothing to save: it only must not die first
            name = signal.Signals(number).name
            logger.warning("%s: finishing this step and saving; send it again to stop immediately", name)
