"""A folder of checkpoints, the last few and the best one; and checkpoints written while training goes on.

For those the loop waits for a copy in memory, not for the disk. One thread per write, so nothing waits between two of
them and nothing outlives the last. A process that is forked off meanwhile has the buffers but no write under way; only
the parent finishes it.
"""

import atexit
import math
import re
import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor

from steadystep._utils.tensors import copy_to_host_, host_room
from steadystep._utils.text import warn
from steadystep.checkpoints.atomic_io import clear_leftovers, remove
from steadystep.checkpoints.checkpoint import Checkpoint, Manifest, read_checkpoint, read_manifest, write_checkpoint
from steadystep.checkpoints.finite import not_finite, said
from steadystep.checkpoints.packing import Packed, pack
from steadystep.errors import CheckpointError, ConfigError, MisuseError

if TYPE_CHECKING:
    from steadystep.checkpoints.shared_store import Shelving


_NAME = re.compile(r"step-(\d{8,})")
_LOOKS = 3  # a writer may replace or tidy away what was just listed; then the folder is listed again


@final
class CheckpointStore:
    """A folder of checkpoints: keeps the newest and the best, and reads the newest or best intact one.

    One process writes to a folder; any number may read. Opening it removes what a killed process left incomplete.

    Args:
        folder: the folder.
        keep_last: number of newest checkpoints to keep, the one just written included.
        keep_best: also keep the one with the lowest score.
    """

    def __init__(self, folder: Path, *, keep_last: int = 3, keep_best: bool = True) -> None:
        if keep_last < 1:
            raise ConfigError(f"keep_last = {keep_last}: must be at least 1")
        self.folder = Path(folder)
        self._keep_last = keep_last
        self._keep_best = keep_best
        self._complained = False
        self._not_finite: set[int] = set()
        """Steps that were read and are nothing to continue from: they take no good one's place."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            clear_leftovers(self.folder)
        except OSError as error:
            raise ConfigError(f"{self.folder}: cannot store checkpoints there ({error.strerror})") from None

    def put(self, state: Mapping[str, Any] | Packed, *, step: int, updates: int, score: float | None = None) -> Path:
        """Write a checkpoint; once it is on disk, remove older ones that are no longer needed.

        One of the same step is replaced. Those of later steps (from a run that was continued at an earlier point) stay.
        """
        with suppress(OSError):  # somebody may have deleted it; what cannot be made is said when it is written to
            self.folder.mkdir(parents=True, exist_ok=True)
        path = write_checkpoint(self.folder, state, step=step, updates=updates, score=score)
        self._not_finite.discard(step)
        self.tidy(step)
        return path

    def refuse(self, step: int) -> None:
        """Announce that there will be no checkpoint of `step`, so that no rank waits for it."""

    def newest(self, among: Callable[[int], bool] = lambda step: True) -> Checkpoint | None:
        """Return the latest checkpoint that is intact and finite; others are named in a warning and skipped.

        `among` limits the steps that count.
        """
        return self._first(lambda: filter(among, reversed(self.steps())))

    def best(self) -> Checkpoint | None:
        """Return the intact and finite checkpoint with the lowest score, the latest of equals."""
        return self._first(self.by_score)

    def steps(self) -> list[int]:
        """Return the steps of all checkpoints, intact or not, in ascending order."""
        try:
            found = [_NAME.fullmatch(path.name) for path in self.folder.iterdir()]
        except OSError:
            return []
        return sorted(int(match[1]) for match in found if match)

    def _first(self, listed: Callable[[], Iterable[int]]) -> Checkpoint | None:
        found: Checkpoint | None = None
        damaged: list[str] = []
        for _ in range(_LOOKS):
            found, damaged, moved = None, [], False
            for step in listed():
                try:
                    found = read_checkpoint(self._path(step))
                    check_finite(found)
                    break
                except CheckpointError as error:
                    if found is not None:
                        self._not_finite.add(step)
                    found = None
                    if self._path(step).exists():
                        damaged.append(str(error))
                    else:
                        moved = True
            if found or not moved:
                break
        if damaged:
            instead = f"using {found.path} instead" if found else "no intact checkpoint is left"
            warn(f"{'; '.join(damaged)}; {instead}")
        return found

    def _path(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}"

    def _whole(self, steps: Iterable[int]) -> dict[int, Manifest]:
        """Those that look whole, without reading the large files."""
        found = {}
        for step in steps:
            with suppress(CheckpointError):
                found[step] = read_manifest(self._path(step))
        return found

    def by_score(self) -> list[int]:
        """Return the steps that have a score, the best first."""
        scores = {step: manifest.score for step, manifest in self._whole(self.steps()).items()}
        known = {step: score for step, score in scores.items() if score is not None and not math.isnan(score)}
        return sorted(known, key=lambda step: (known[step], -step))

    def tidy(self, written: int) -> None:
        """Remove checkpoints older than the one just `written` that are no longer needed."""
        older = [step for step in self.steps() if step < written]
        usable = [step for step in self._whole(older) if step not in self._not_finite]
        wanted = set(sorted(usable, reverse=True)[: self._keep_last - 1])
        if self._keep_best:
            wanted.update(self.by_score()[:1])
        for step in older:
            if step not in wanted:
                self._remove(step)

    def _remove(self, step: int) -> None:
        try:
            remove(self._path(step))
        except OSError as error:
            if not self._complained:
                self._complained = True
                warn(f"{self._path(step)} is outdated and cannot be removed ({error.strerror or error})")


def check_finite(found: Checkpoint) -> None:
    """Raise CheckpointError for one that nothing can be learned from."""
    if found.not_finite:
        raise CheckpointError(f"{found.path} contains non-finite values ({said(found.not_finite)})")


_SHARD = "shard of "  # keeps a part apart from a whole tensor of the same name
_PATIENCE_S = 600.0  # at exit: a disk that hangs must not keep the process alive for ever

_writers: "weakref.WeakSet[BackgroundWriter]" = weakref.WeakSet()


@final
class BackgroundWriter:
    """Writes states through a `CheckpointStore` in a background thread, one at a time.

    Keeps one copy of the state's tensors in host memory (pinned for tensors of an accelerator) and reuses it. A failed
    write is reported once, when `save`, `report` or `flush` is called next; training continues and older checkpoints
    stay. A state of a guarded loop that holds NaN or infinity is not written and counts as a failure. A write under way
    at the end of the program is completed.

    Args:
        store: where to write.
    """

    def __init__(self, store: "Shelving") -> None:
        self._store = store
        self._buffers: dict[str, Tensor] = {}
        self._thread: Thread | None = None
        self._failure: str | None = None
        """Of the last write that ended; None if it succeeded."""
        self._failing = False
        """Said so, and not yet that it is over."""
        self._packable = False
        self._closed = False
        # why: a loop that failed and is started again in the same process (a notebook) left its last write under way
        for other in [writer for writer in _writers if writer._store.folder == store.folder]:
            other._wait(_PATIENCE_S)
        _writers.add(self)

    @property
    def busy(self) -> bool:
        """Whether a write is under way."""
        return self._thread is not None and self._thread.is_alive()

    def save(
        self, state: Mapping[str, Any], *, step: int, updates: int, score: float | None = None, wait: bool = False
    ) -> bool:
        """Copy `state` and begin to write it; return False if the last write is still under way.

        With `wait` it waits for that one first. The state may change as soon as this returns.

        Raises:
            CheckpointError: the first state given cannot be stored. A later one is a failed write, and False.
        """
        if self._closed:
            raise MisuseError("save() after close(): create a new BackgroundWriter")
        if self.busy and not wait:
            return False
        self.flush()
        try:
            packed = pack(state)
        except CheckpointError as error:
            if not self._packable:  # why: at the first save somebody is looking; days later a run must not end of it
                raise
            self._failure = f"the checkpoint of step {step} cannot be written: {error}"
            self.report()
            return False
        self._packable = True
        copies = self._copied(packed.tensors | {f"{_SHARD}{name}": part for name, part in packed.shards.items()})
        parts = {name: copies.pop(f"{_SHARD}{name}") for name in packed.shards}
        job = Packed(packed.tree, copies, parts, packed.places)
        details = {"step": step, "updates": updates, "score": score}
        self._thread = Thread(target=self._write, args=(job, details), name="steadystep-checkpoint", daemon=True)
        self._thread.start()
        return True

    def report(self) -> None:
        """Report the result of the last write, if it is new. Costs nothing otherwise."""
        if self.busy or (self._failure is not None) == self._failing:
            return
        self._failing = self._failure is not None
        if self._failing:
            warn(f"{self._failure}; training continues without new checkpoints; older ones are kept")
        else:
            warn(f"checkpoints are being written to {self._store.folder} again")

    def flush(self) -> None:
        """Wait until the write under way is complete."""
        self._wait(None)

    def close(self) -> None:
        """Wait, and release the memory."""
        self._closed = True
        self.flush()
        self._buffers = {}

    def _wait(self, seconds: float | None) -> None:
        if self._thread is not None:
            self._thread.join(seconds)
        self.report()

    def _copied(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        # why: under inference mode the buffers could not be written to again outside it
        with torch.inference_mode(False), torch.no_grad():
            old = self._buffers
            self._buffers = {name: host_room(t, old.get(name), contiguous=True) for name, t in tensors.items()}
            copy_to_host_(list(self._buffers.values()), list(tensors.values()))
        return dict(self._buffers)

    def _write(self, job: Packed, details: dict[str, Any]) -> None:
        try:
            # here and not in `save`: it costs a pass over the state, and the training does not wait for this one
            bad = not_finite(job.tensors | job.shards, job.tree)
            if bad:
                self._store.refuse(details["step"])
                raise CheckpointError(f"the state of step {details['step']} has non-finite values ({said(bad)})")
            self._store.put(job, **details)
        except Exception as error:  # whatever it is, it must not end the training
            known = isinstance(error, CheckpointError)
            self._failure = str(error) if known else f"the checkpoint of step {details['step']} failed: {error!r}"
        else:
            self._failure = None


@atexit.register
def _finish() -> None:
    for writer in list(_writers):
        writer._wait(_PATIENCE_S)
