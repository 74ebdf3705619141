"""States to go back to, in memory, and the way back."""

from steadystep.recovery.holdings import Holdings
from steadystep.recovery.recovery import InMemory, NoRecovery, Recovery
from steadystep.recovery.snapshots import Snapshot, Snapshots

__all__ = ["Holdings", "InMemory", "NoRecovery", "Recovery", "Snapshot", "Snapshots"]
