"""Memory relief: activation checkpointing, splitting a batch, and trying again in smaller parts.

Activation checkpointing loads on first use: it brings torch's compiler with it, which takes seconds.
"""

from typing import TYPE_CHECKING

from steadystep.memory.attempt import Attempt
from steadystep.memory.batch_lr import scale_lr
from steadystep.memory.retry import OutOfMemoryRetry, is_out_of_memory, weighted_mean
from steadystep.memory.saved_bytes import SavedBytes
from steadystep.memory.split import BatchPart, split_batch

if TYPE_CHECKING:
    from steadystep.memory.checkpointing import CheckpointedBlocks, checkpoint_blocks

__all__ = [
    "Attempt",
    "BatchPart",
    "CheckpointedBlocks",
    "OutOfMemoryRetry",
    "SavedBytes",
    "checkpoint_blocks",
    "is_out_of_memory",
    "scale_lr",
    "split_batch",
    "weighted_mean",
]


def __getattr__(name: str) -> object:
    if name in ("CheckpointedBlocks", "checkpoint_blocks"):
        from steadystep.memory import checkpointing

        return getattr(checkpointing, name)
    raise AttributeError(f"module 'steadystep.memory' has no attribute {name!r}")
