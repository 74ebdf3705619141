"""What is kept of a run: its checkpoints, its place in the data, its best weights."""

import logging
from pathlib import Path
from typing import final

from steadystep.dist import Alone, Ranks
from steadystep.errors import CheckpointError, MisuseError
from steadystep.policy import EarlyStopping
from steadystep.recovery.best_weights import BestWeights
from steadystep.recovery.checkpoint import write_checkpoint
from steadystep.recovery.checkpointing import Checkpointing, read_any, shelf_at
from steadystep.recovery.data_position import DataPosition
from steadystep.recovery.loop_state import LoopState

logger = logging.getLogger("steadystep")


@final
class Keeping:
    """Saving, resuming, early stopping. Without checkpoints the best weights are kept in memory, if they are wanted."""

    def __init__(
        self,
        data: DataPosition,
        loop: LoopState,
        early: EarlyStopping,
        *,
        checkpoints: Checkpointing | None,
        ranks: Ranks | None = None,
    ) -> None:
        self._ranks = ranks or Alone()
        self.data = data
        self.loop = loop
        self.early_stopping = early
        self.checkpoints = checkpoints
        self._best = BestWeights(loop) if checkpoints is None and early.wanted else None

    def between(self, step: int, updates: int) -> None:
        """Between two steps; `step` is the one that comes next."""
        if self.checkpoints is not None:
            self.checkpoints.between(step, updates)

    def validated(self, loss: float) -> None:
        """A validation is over; the best weights are worth keeping."""
        if not self.early_stopping.update(loss):
            return
        if self.checkpoints is not None:
            self.checkpoints.validated(loss)
        elif self._best is not None:
            self._best.note()

    def resume(self, path: Path | None) -> None:
        """Continue from the newest checkpoint, if there is one, or from `path`."""
        if path is not None:
            found = read_any(path, self._ranks)
        else:
            newest = None if self.checkpoints is None else self.checkpoints.newest()
            if newest is None:
                return
            found = newest
        self.loop.put_back(found.state)
        if self._ranks.rank == 0:
            logger.info("continues at step %d, from %s", found.step, found.path)

    def save(self, folder: Path | None, step: int, updates: int) -> Path:
        """Write a checkpoint and wait for it."""
        if folder is not None:
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise CheckpointError(f"{folder} cannot be made ({error.strerror})") from None
            if self._ranks.size == 1:
                return write_checkpoint(folder, self.loop.gather(), step=step, updates=updates)
            shelf, written = shelf_at(folder, self._ranks), None
            try:
                written = shelf.put(self.loop.gather(), step=step, updates=updates)
            finally:  # the first rank has completed it, or the others need not wait
                whole = self._ranks.all(written is not None)
            if not whole:
                raise CheckpointError(f"the checkpoint in {folder} could not be written by another rank")
            return written
        if self.checkpoints is None:
            raise MisuseError("save() without a path needs run_dir= and monitoring.save_checkpoints: true")
        self.checkpoints.save(step, updates, wait=True)
        path = self.checkpoints.flush()
        if not path.exists():
            raise CheckpointError(f"{path} could not be written: the warning before this says why")
        return path

    def restore_best(self, step: int, updates: int) -> bool:
        """Put the weights of the best validation back, from disk or from memory; False when there are none."""
        if self.checkpoints is None:
            return self._best is not None and self._best.put_back()
        self.checkpoints.save(step, updates, wait=True)  # the best may be the present ones
        found = self.checkpoints.best()
        if found is not None:
            self.loop.put_weights_back(found.state)
        return found is not None

    def close(self, step: int, updates: int, *, save: bool) -> None:
        """Save the last state, if it is whole."""
        if self.checkpoints is not None:
            self.checkpoints.close(step, updates, save=save)
