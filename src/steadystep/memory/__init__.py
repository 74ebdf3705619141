"""Memory relief: activation checkpointing, splitting a batch, and trying again in smaller parts."""

from steadystep.memory.attempt import Attempt
from steadystep.memory.batch_lr import scale_lr
from steadystep.memory.checkpointing import CheckpointedBlocks, checkpoint_blocks
from steadystep.memory.retry import OutOfMemoryRetry, is_out_of_memory, weighted_mean
from steadystep.memory.saved_bytes import SavedBytes
from steadystep.memory.split import BatchPart, split_batch

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
