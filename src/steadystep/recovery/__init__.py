"""States to go back to, in memory and on disk, and the way back."""

from steadystep.recovery.background_writer import BackgroundWriter
from steadystep.recovery.checkpoint import Checkpoint, read_checkpoint, write_checkpoint
from steadystep.recovery.holdings import Holdings
from steadystep.recovery.packing import Packed, pack, unpack
from steadystep.recovery.recovery import InMemory, NoRecovery, Recovery
from steadystep.recovery.shelf import Shelf
from steadystep.recovery.snapshots import Snapshot, Snapshots

__all__ = [
    "BackgroundWriter",
    "Checkpoint",
    "Holdings",
    "InMemory",
    "NoRecovery",
    "Packed",
    "Recovery",
    "Shelf",
    "Snapshot",
    "Snapshots",
    "pack",
    "read_checkpoint",
    "unpack",
    "write_checkpoint",
]
