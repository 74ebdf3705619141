"""Checkpoints on disk: written atomically, verified on reading, resumed exactly; and the position in the data."""

from steadystep.checkpoints.checkpoint import Checkpoint, read_checkpoint, write_checkpoint
from steadystep.checkpoints.packing import Packed, pack, unpack
from steadystep.checkpoints.store import BackgroundWriter, CheckpointStore

__all__ = [
    "BackgroundWriter",
    "Checkpoint",
    "CheckpointStore",
    "Packed",
    "pack",
    "read_checkpoint",
    "unpack",
    "write_checkpoint",
]
