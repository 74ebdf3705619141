"""Checkpoints written while training goes on: the loop waits for a copy in memory, not for the disk.

One thread per write, so nothing waits between two of them and nothing outlives the last. A process that is forked off
meanwhile has the buffers but no write under way; only the parent finishes it.
"""

import atexit
import weakref
from collections.abc import Mapping
from threading import Thread
from typing import Any, final

import torch
from torch import Tensor

from steadystep._utils.tensors import copy_to_host_, host_room
from steadystep._utils.text import warn
from steadystep.checkpoints.finite import not_finite, said
from steadystep.checkpoints.packing import Packed, pack
from steadystep.checkpoints.shared_store import Shelving
from steadystep.errors import CheckpointError, MisuseError

_SHARD = "shard of "  # keeps a part apart from a whole tensor of the same name
_PATIENCE_S = 600.0  # at exit: a disk that hangs must not keep the process alive for ever

_writers: "weakref.WeakSet[BackgroundWriter]" = weakref.WeakSet()


@final
class BackgroundWriter:
    """Save states through a `CheckpointStore`, one at a time.

    It keeps one copy of the state's tensors in host memory (pinned for tensors of an accelerator) and uses it again for
    the next. A write that fails is said once, when `save`, `report` or `flush` is called next, and the next success is
    said once; training goes on and older checkpoints stay. A state of a guarded loop that holds NaN or infinity is not
    written, and that counts as a failure. A write under way at the end of the program is completed.
    """

    def __init__(self, store: Shelving) -> None:
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
        """A write is under way."""
        return self._thread is not None and self._thread.is_alive()

    def save(
        self, state: Mapping[str, Any], *, step: int, updates: int, score: float | None = None, wait: bool = False
    ) -> bool:
        """Copy `state` and begin to write it; False if nothing was begun: the last one is still being written.

        With `wait` it waits for the last one first. The state may change as soon as this returns.

        Raises:
            CheckpointError: the first state given has no form in a file. A later one is a failed write, and False.
        """
        if self._closed:
            raise MisuseError("save() after close(): make another BackgroundWriter")
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
        """Say what became of the last write, if that is news. Costs nothing otherwise."""
        if self.busy or (self._failure is not None) == self._failing:
            return
        self._failing = self._failure is not None
        if self._failing:
            warn(f"{self._failure}; training goes on without new checkpoints, older ones stay")
        else:
            warn(f"checkpoints are written to {self._store.folder} again")

    def flush(self) -> None:
        """Wait until what is under way is written."""
        self._wait(None)

    def close(self) -> None:
        """Wait, and give the memory back."""
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
                raise CheckpointError(f"the state of step {details['step']} is not finite ({said(bad)})")
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
