"""Memory relief: activation checkpointing, splitting a batch, and retrying in smaller parts when memory runs out.

Activation checkpointing loads on first use: it imports torch's compiler, which takes seconds.
"""

from typing import TYPE_CHECKING

from steadystep._utils import lazy_names
from steadystep.memory.recompute import SavedBytes
from steadystep.memory.retry import Attempt, OutOfMemoryRetry, is_out_of_memory, weighted_mean
from steadystep.memory.split import BatchPart, scale_lr, split_batch

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

__getattr__ = lazy_names(__name__, {"checkpointing": ("CheckpointedBlocks", "checkpoint_blocks")})
