"""States on disk: written whole or not at all, resumed exactly; and where a loop is in its data."""

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
